"""One chunk of Kimi Delta Attention, forward and backward: the formulas of the chunked form, without the scan.

Let `F` be the decay of each token's channels from the start of the chunk (the token's own included), `E` the decay
behind it up to the end, and `S` the state before the chunk. With queries already scaled,

    (I + beta * A) U = beta * R      R = V - (K * F) S      A[i, j] = <K[i], decay(j, i) * K[j]>,  j < i
    output = (Q * F) S + P U                                P[i, j] = <Q[i], decay(j, i) * K[j]>,  j <= i
    state  = F[-1] * S + (K * E)^T U

where `decay(j, i)` is `exp` of the log-decays of tokens j + 1 to i. It is not `F[i] / F[j]`: that overflows, and the
difference of two long sums loses the digits of a short one. Instead the chunk is halved again and again, and two tokens
meet at the middle between them: at the first halving that parts them, `decay(j, i) = D[i] * D[j]` with `D[i]` from the
middle to i and `D[j]` from behind j to the middle. Every exponent is at most 0, whatever the gate, and each D reaches
outward from its middle. One matmul per halving gives its entries of A and P. The same halvings invert `I + beta * A`:
two inverted diagonal blocks X and Z with B below the first make `[[X, 0], [-Z B X, Z]]`.

Within blocks of `block` tokens every halving is taken at full size and masked, which needs few operations; the larger
ones touch only the entries they are about.

Backward, with `dO` and `dS'` the cotangents of output and state (`lower` leaves the entries that A or P have):

    dU = P^T dO + (K * E) dS'       dP = lower(dO U^T)
    Y  = (I + beta * A)^-T dU       dB = -lower(Y U^T)      dA = beta * dB
    dV = beta * Y                   dbeta = rows of Y * R and dB * A, summed
    dS = F[-1] * dS' + (Q * F)^T dO - (K * F)^T dV
    d(Q * F) = dO S^T               d(K * F) = -dV S^T      d(K * E) = U dS'^T

and at each halving, for the tokens of the later half (i) and of the earlier one (j),

    d(Q * D)[i] = dP (K * D)[j]     d(K * D)[i] = dA (K * D)[j]     d(K * D)[j] = dP^T (Q * D)[i] + dA^T (K * D)[i]

A factor D reaches its log-decays as `D * dD = Q * dQ + K * dK`, with the parts of dQ and dK that came through it, and
from there the tokens between it and its middle: nothing is divided, and what underflowed to 0 has a gradient of 0.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

_LEAST_LOG_DECAY = -1e30  # stands for -inf, which would turn to NaN in a sum with weight 0; exp is 0 for both


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a chunk is computed: `chunk` tokens, in blocks of `block`, both powers of two; precision of the matmuls."""

    chunk: int
    block: int
    precision: jax.lax.Precision


class Chunk(NamedTuple):
    """What the backward pass of a chunk needs of its forward pass."""

    decays: "Decays"
    read: Float[Array, "batch heads chunk chunk"]  # P
    overlap: Float[Array, "batch heads chunk chunk"]  # A
    inverse: Float[Array, "batch heads chunk chunk"]  # of I + beta * A
    missing: Float[Array, "batch heads chunk value_dim"]  # R
    written: Float[Array, "batch heads chunk value_dim"]  # U
    from_start: Float[Array, "batch heads twochunk key_dim"]  # Q * F, and below it K * F
    to_end: Float[Array, "batch heads chunk key_dim"]  # K * E


class Decays(NamedTuple):
    """Decays of every token: to or from the middle of each halving, from the chunk's start, to its end."""

    middles: list[Float[Array, "batch heads chunk key_dim"]]  # the smallest halves first
    from_start: Float[Array, "batch heads chunk key_dim"]
    to_end: Float[Array, "batch heads chunk key_dim"]


def chunk_forward(
    state: Float[Array, "batch heads key_dim value_dim"],
    query: Float[Array, "batch heads chunk key_dim"],
    key: Float[Array, "batch heads chunk key_dim"],
    value: Float[Array, "batch heads chunk value_dim"],
    log_decay: Float[Array, "batch heads chunk key_dim"],
    beta: Float[Array, "batch heads chunk"],
    segment: Int[Array, "batch chunk"] | None,
    tiling: Tiling,
) -> tuple[Float[Array, "batch heads key_dim value_dim"], Float[Array, "batch heads chunk value_dim"], Chunk]:
    """State after the chunk, its output, and what the backward pass needs.

    `segment` numbers the chunk's segments; 0 continues from the state. Padding has zeros in all of its inputs.
    """
    size = tiling.chunk
    query, key, value, log_decay = _once((query, key, value, log_decay))
    decays = _decays(log_decay, tiling)
    read, overlap = _scores(query, key, decays, tiling)
    if segment is not None:
        segment = segment[:, None, :, None]
        same = segment == jnp.swapaxes(segment, -1, -2)
        read, overlap = jnp.where(same, read, 0.0), jnp.where(same, overlap, 0.0)
        decays = decays._replace(
            from_start=jnp.where(segment == 0, decays.from_start, 0.0),
            to_end=jnp.where(segment == segment[:, :, -1:], decays.to_end, 0.0),
        )
    inverse = _inverse(beta[..., None] * overlap, tiling)
    from_start = jnp.concatenate([query * decays.from_start, key * decays.from_start], axis=-2)
    to_end = key * decays.to_end
    recalled = _matmul(from_start, state, tiling)
    missing = value - recalled[..., size:, :]
    written = _matmul(inverse, beta[..., None] * missing, tiling)
    output = recalled[..., :size, :] + _matmul(read, written, tiling)
    state = decays.from_start[..., -1, :, None] * state + _transposed_matmul(to_end, written, tiling)
    return state, output, Chunk(decays, read, overlap, inverse, missing, written, from_start, to_end)


def chunk_backward(
    state: Float[Array, "batch heads key_dim value_dim"],
    query: Float[Array, "batch heads chunk key_dim"],
    key: Float[Array, "batch heads chunk key_dim"],
    beta: Float[Array, "batch heads chunk"],
    segment: Int[Array, "batch chunk"] | None,
    forward: Chunk,
    state_cotangent: Float[Array, "batch heads key_dim value_dim"],
    output_cotangent: Float[Array, "batch heads chunk value_dim"],
    tiling: Tiling,
) -> tuple[Array, tuple[Array, Array, Array, Array, Array]]:
    """Cotangents of the state before the chunk, and of query, key, value, log-decay and beta."""
    size = tiling.chunk
    decays, read, overlap, inverse, missing, written, from_start, to_end = forward
    d_written = _transposed_matmul(read, output_cotangent, tiling) + _matmul(to_end, state_cotangent, tiling)
    d_scaled = _transposed_matmul(inverse, d_written, tiling)
    d_value = beta[..., None] * d_scaled
    d_read = _matmul_transposed(output_cotangent, written, tiling)
    d_system = -_matmul_transposed(d_scaled, written, tiling)
    if segment is not None:
        same = segment[:, None, :, None] == segment[:, None, None, :]
        d_read, d_system = jnp.where(same, d_read, 0.0), jnp.where(same, d_system, 0.0)
    d_beta = jnp.sum(d_scaled * missing, axis=-1) + jnp.sum(d_system * overlap, axis=-1)
    both = jnp.concatenate([output_cotangent, -d_value], axis=-2)
    d_from_start = _matmul_transposed(both, state, tiling)
    d_to_end = _matmul_transposed(written, state_cotangent, tiling)
    whole = decays.from_start[..., -1, :, None]
    d_state = whole * state_cotangent + _transposed_matmul(from_start, both, tiling)

    d_query, d_key, d_middles = _scores_backward(query, key, decays, d_read, beta[..., None] * d_system, tiling)
    query_part = decays.from_start * d_from_start[..., :size, :]
    key_part = decays.from_start * d_from_start[..., size:, :]
    last_part = decays.to_end * d_to_end
    d_start = query * query_part + key * key_part
    d_whole = jnp.sum(whole * state * state_cotangent, axis=-1)  # of a sum over all of the chunk's tokens
    d_log_decay = _decays_backward(Decays(d_middles, d_start, key * last_part), tiling) + d_whole[..., None, :]
    return d_state, (d_query + query_part, d_key + key_part + last_part, d_value, d_log_decay, d_beta)


def _matmul(x: Float[Array, "... i k"], y: Float[Array, "... k j"], tiling: Tiling) -> Float[Array, "... i j"]:
    return jnp.einsum("...ik,...kj->...ij", x, y, precision=tiling.precision)


def _once(x):
    """Has XLA compute this once, not again wherever it is used."""
    return jax.lax.optimization_barrier(x)


def _matmul_transposed(x: Float[Array, "... i k"], y: Float[Array, "... j k"], tiling: Tiling) -> Array:
    """`x @ y^T`."""
    return jnp.einsum("...ik,...jk->...ij", x, y, precision=tiling.precision)


def _transposed_matmul(x: Float[Array, "... k i"], y: Float[Array, "... k j"], tiling: Tiling) -> Array:
    """`x^T @ y`. XLA's CPU backend takes twice as long for it unless the transpose is really made first."""
    return _matmul(_flip(x, tiling), y, tiling)


def _flip(x: Float[Array, "... i j"], tiling: Tiling) -> Float[Array, "... j i"]:
    """The transpose, where blocks are small (on a CPU) really made."""
    x = jnp.swapaxes(x, -1, -2)
    return x if tiling.block == tiling.chunk else _once(x)


# -- decays ----------------------------------------------------------------------------------------------------------


def _halvings(size: int) -> list[int]:
    """Sizes of the halves, the smallest first."""
    return [1 << level for level in range(size.bit_length() - 1)]


def _across(half: int, size: int) -> np.ndarray:
    """True at (i, j) when j is in the earlier and i in the later half of the same `2 * half` tokens."""
    i = np.arange(size)
    return (i[:, None] // half == i[None] // half + 1) & (i[:, None] // half % 2 == 1)


def _outward(half: int, size: int) -> np.ndarray:
    """True at (i, m) when m lies between i and the middle of its `2 * half` tokens.

    For a token of the later half that is from the middle up to itself, for one of the earlier half from behind itself
    up to the middle.
    """
    i, m = np.arange(size)[:, None], np.arange(size)[None]
    later = i // half % 2 == 1
    return (i // half == m // half) & np.where(later, m <= i, m > i)


def _summed(size: int) -> np.ndarray:
    """The tokens whose log-decays are summed: to every middle, from the start (itself too), to the end (itself not)."""
    up_to = np.tri(size, dtype=bool)
    return np.stack([*(_outward(half, size) for half in _halvings(size)), up_to, ~up_to])


def _blocks(x: Float[Array, "... chunk dim"], size: int) -> Float[Array, "... blocks size dim"]:
    return x.reshape(*x.shape[:-2], -1, size, x.shape[-1])


def _split(x: Float[Array, "... chunk dim"], half: int) -> tuple[Array, Array]:
    """The earlier and the later halves: `... pairs half dim`."""
    blocks = _blocks(x, half)
    return blocks[..., 0::2, :, :], blocks[..., 1::2, :, :]


def _merge(earlier: Float[Array, "... pairs half dim"], later: Float[Array, "... pairs half dim"]) -> Array:
    merged = jnp.concatenate([earlier, later], axis=-2)
    return merged.reshape(*merged.shape[:-3], -1, merged.shape[-1])


def _decays(log_decay: Float[Array, "batch heads chunk key_dim"], tiling: Tiling) -> Decays:
    """In one block, `exp` of sums by a matmul; in several, products within blocks of doubling size.

    Accelerators are good at the one, CPUs at the other, which takes one `exp` per token and channel.
    """
    size = log_decay.shape[-2]
    if tiling.block == size:
        weights = jnp.asarray(_summed(size)).astype(log_decay.dtype)
        log_decay = jnp.maximum(log_decay, _LEAST_LOG_DECAY)
        sums = jnp.einsum("lij,...jk->...lik", weights, log_decay, precision=tiling.precision)
        *middles, from_start, to_end = (sums[..., n, :, :] for n in range(len(weights)))
        return jax.tree.map(jnp.exp, Decays(middles, from_start, to_end))
    from_start = jnp.exp(log_decay)  # within blocks of one token
    to_end = jnp.ones_like(from_start)
    middles = []
    for half in _halvings(size):
        (early_start, late_start), (early_end, late_end) = _split(from_start, half), _split(to_end, half)
        middles.append(_merge(early_end, late_start))
        from_start = _merge(early_start, late_start * early_start[..., -1:, :])
        to_end = _merge(early_end * late_start[..., -1:, :], late_end)
    return _once(Decays(middles, from_start, to_end))


def _decays_backward(d_decays: Decays, tiling: Tiling) -> Float[Array, "batch heads chunk key_dim"]:
    """Cotangent of the log-decays from those of the logs of all decays."""
    middles, from_start, to_end = d_decays
    size = from_start.shape[-2]
    if tiling.block == size:
        weights = jnp.asarray(_summed(size)).astype(from_start.dtype)
        sums = jnp.stack([*middles, from_start, to_end], axis=-3)
        return jnp.einsum("lij,...lik->...jk", weights, sums, precision=tiling.precision)
    for half, middle in reversed(list(zip(_halvings(size), middles, strict=True))):
        (early_start, late_start), (early_end, late_end) = _split(from_start, half), _split(to_end, half)
        early, late = _split(middle, half)
        of_early, of_late = (jnp.sum(x, axis=-2, keepdims=True) for x in (late_start, early_end))
        last = (np.arange(half) == half - 1)[:, None]
        from_start = _merge(
            early_start + jnp.where(last, of_early, 0.0), late_start + late + jnp.where(last, of_late, 0.0)
        )
        to_end = _merge(early_end + early, late_end)
    return from_start


# -- scores between tokens -------------------------------------------------------------------------------------------


def _scores(
    query: Float[Array, "batch heads chunk key_dim"],
    key: Float[Array, "batch heads chunk key_dim"],
    decays: Decays,
    tiling: Tiling,
) -> tuple[Float[Array, "batch heads chunk chunk"], Float[Array, "batch heads chunk chunk"]]:
    """`P` and `A`."""
    block = tiling.block
    query_blocks, key_blocks = _blocks(query, block), _blocks(key, block)
    read = jnp.where(np.eye(block, dtype=bool), _matmul_transposed(query_blocks, key_blocks, tiling), 0.0)
    overlap = jnp.zeros_like(read)
    for level, half in enumerate(_halvings(block)):
        decay = _blocks(decays.middles[level], block)
        either_key = key_blocks * decay
        across = _across(half, block)
        read = jnp.where(across, _matmul_transposed(query_blocks * decay, either_key, tiling), read)
        overlap = jnp.where(across, _matmul_transposed(either_key, either_key, tiling), overlap)
    levels = len(_halvings(block))
    for half, decay in zip(_halvings(tiling.chunk)[levels:], decays.middles[levels:], strict=True):
        late_query, late_key, early_key = _halves(query, key, decay, half)
        read = _join(read, _matmul_transposed(late_query, early_key, tiling))
        overlap = _join(overlap, _matmul_transposed(late_key, early_key, tiling))
    return read[..., 0, :, :], overlap[..., 0, :, :]


def _halves(query: Array, key: Array, decay: Array, half: int) -> tuple[Array, Array, Array]:
    """Query and key of the later and key of the earlier halves, decayed: `... pairs half key_dim`."""
    query, key, decay = (_blocks(x, half) for x in (query, key, decay))
    late = decay[..., 1::2, :, :]
    return query[..., 1::2, :, :] * late, key[..., 1::2, :, :] * late, key[..., 0::2, :, :] * decay[..., 0::2, :, :]


def _join(blocks: Float[Array, "... two size size"], corner: Float[Array, "... one size size"]) -> Array:
    """Lower-triangular blocks of twice the size, from pairs of them on the diagonal and the blocks below the first."""
    upper, lower = blocks[..., 0::2, :, :], blocks[..., 1::2, :, :]
    upper = jnp.concatenate([upper, jnp.zeros_like(upper)], axis=-1)
    return jnp.concatenate([upper, jnp.concatenate([corner, lower], axis=-1)], axis=-2)


def _diagonal(x: Float[Array, "... chunk chunk"], size: int) -> Float[Array, "... blocks size size"]:
    return jnp.stack([x[..., n : n + size, n : n + size] for n in range(0, x.shape[-1], size)], axis=-3)


def _corners(x: Float[Array, "... chunk chunk"], half: int) -> Float[Array, "... pairs half half"]:
    """The blocks below the diagonal that a halving is about: later rows, earlier columns."""
    starts = range(0, x.shape[-1], 2 * half)
    return jnp.stack([x[..., n + half : n + 2 * half, n : n + half] for n in starts], axis=-3)


def _scores_backward(
    query: Float[Array, "batch heads chunk key_dim"],
    key: Float[Array, "batch heads chunk key_dim"],
    decays: Decays,
    d_read: Float[Array, "batch heads chunk chunk"],
    d_overlap: Float[Array, "batch heads chunk chunk"],
    tiling: Tiling,
) -> tuple[Array, Array, list[Array]]:
    """Cotangents of query and key through `P` and `A`, and of the logs of the halvings' decays."""
    block, shape = tiling.block, query.shape
    own = jnp.sum(jnp.where(np.eye(tiling.chunk, dtype=bool), d_read, 0.0), axis=-1, keepdims=True)
    d_query, d_key = own * key, own * query

    query_blocks, key_blocks = _blocks(query, block), _blocks(key, block)
    blocks = [_diagonal(x, block) for x in (d_read, d_overlap)]
    d_middles = []
    levels = len(_halvings(block))
    if levels:
        across = np.stack([_across(half, block) for half in _halvings(block)])
        decay = jnp.stack([_blocks(x, block) for x in decays.middles[:levels]], axis=-3)
        of_read, of_overlap = (jnp.where(across, x[..., None, :, :], 0.0) for x in blocks)
        late_query, either_key = (x[..., None, :, :] * decay for x in (query_blocks, key_blocks))
        query_part = decay * _matmul(of_read, either_key, tiling)
        early = _transposed_matmul(of_read, late_query, tiling) + _transposed_matmul(of_overlap, either_key, tiling)
        key_part = decay * (_matmul(of_overlap, either_key, tiling) + early)
        d_query, d_key = (x + jnp.sum(y, axis=-3).reshape(shape) for x, y in ((d_query, query_part), (d_key, key_part)))
        inside = query_blocks[..., None, :, :] * query_part + key_blocks[..., None, :, :] * key_part
        d_middles = [inside[..., level, :, :].reshape(shape) for level in range(levels)]

    for half, decay in zip(_halvings(tiling.chunk)[levels:], decays.middles[levels:], strict=True):
        late_query, late_key, early_key = _halves(query, key, decay, half)
        of_read, of_overlap = _corners(d_read, half), _corners(d_overlap, half)
        early = _transposed_matmul(of_read, late_query, tiling) + _transposed_matmul(of_overlap, late_key, tiling)
        late_query, late_key = (_matmul(x, early_key, tiling) for x in (of_read, of_overlap))
        query_part = jnp.stack([jnp.zeros_like(early), late_query], axis=-3).reshape(shape) * decay
        key_part = jnp.stack([early, late_key], axis=-3).reshape(shape) * decay
        d_query, d_key = d_query + query_part, d_key + key_part
        d_middles.append(query * query_part + key * key_part)
    return d_query, d_key, d_middles


def _inverse(overlap: Float[Array, "... chunk chunk"], tiling: Tiling) -> Float[Array, "... chunk chunk"]:
    """Inverse of `I + overlap`, which is strictly lower triangular, by inverting blocks of doubling size."""
    block = tiling.block
    blocks = _diagonal(overlap, block)
    inverse = jnp.broadcast_to(jnp.eye(block, dtype=overlap.dtype), blocks.shape)
    for half in _halvings(block):
        corner = jnp.where(_across(half, block), blocks, 0.0)
        below = corner if half == 1 else _matmul(_matmul(inverse, corner, tiling), inverse, tiling)
        inverse = inverse - below
    for half in _halvings(tiling.chunk)[len(_halvings(block)) :]:
        upper, lower = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        below = _matmul(lower, _matmul(_corners(overlap, half), upper, tiling), tiling)
        inverse = _join(inverse, -below)
    return inverse[..., 0, :, :]
