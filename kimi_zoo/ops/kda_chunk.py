"""One chunk of Kimi Delta Attention, forward and backward: the formulas of the chunked form, without the scan.

Let `F` be the decay of each token's channels from the start of the chunk (the token's own included), `E` the decay
behind it up to the end, and `S` the state before the chunk. With queries already scaled,

    (I + beta * A) U = beta * R      R = V - (K * F) S      A[i, j] = <K[i], decay(j, i) * K[j]>,  j < i
    output = (Q * F) S + P U                                P[i, j] = <Q[i], decay(j, i) * K[j]>,  j <= i
    state  = F[-1] * S + (K * E)^T U

where `decay(j, i)` is `exp` of the log-decays of tokens j + 1 to i. It is not `F[i] / F[j]`: that overflows, and the
difference of two long sums loses the digits of a short one. Instead the chunk is halved again and again, and two tokens
meet at the middle between them: at the first halving that parts them, `decay(j, i) = D[i] * D[j]` with `D[i]` from the
middle to i and `D[j]` from behind j to the middle. Every exponent is at most 0, whatever the gate, and each is summed
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

    inside: list[Float[Array, "batch heads blocks block key_dim"]]
    larger: list[Float[Array, "batch heads chunk key_dim"]]
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
    # barriers: XLA would otherwise compute these again wherever they are used
    query, key, value, log_decay = jax.lax.optimization_barrier((query, key, value, log_decay))
    decays = jax.lax.optimization_barrier(_decays(jnp.maximum(log_decay, _LEAST_LOG_DECAY), tiling))
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
    state = decays.from_start[..., -1, :, None] * state + _matmul(_transpose(to_end), written, tiling)
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
    d_written = _matmul(_transpose(read), output_cotangent, tiling) + _matmul(to_end, state_cotangent, tiling)
    d_scaled = _matmul(_transpose(inverse), d_written, tiling)
    d_value = beta[..., None] * d_scaled
    written_transposed = _transpose(written)
    d_read = _matmul(output_cotangent, written_transposed, tiling)
    d_system = -_matmul(d_scaled, written_transposed, tiling)
    if segment is not None:
        same = segment[:, None, :, None] == segment[:, None, None, :]
        d_read, d_system = jnp.where(same, d_read, 0.0), jnp.where(same, d_system, 0.0)
    d_beta = jnp.sum(d_scaled * missing, axis=-1) + jnp.sum(d_system * overlap, axis=-1)
    both = jnp.concatenate([output_cotangent, -d_value], axis=-2)
    d_from_start = _matmul(both, _transpose(state), tiling)
    d_to_end = _matmul(written, _transpose(state_cotangent), tiling)
    whole = decays.from_start[..., -1, :, None]
    d_state = whole * state_cotangent + _matmul(_transpose(from_start), both, tiling)

    d_query, d_key, d_inside, d_larger = _scores_backward(
        query, key, decays, d_read, beta[..., None] * d_system, tiling
    )
    query_part = decays.from_start * d_from_start[..., :size, :]
    key_part = decays.from_start * d_from_start[..., size:, :]
    last_part = decays.to_end * d_to_end
    d_start = query * query_part + key * key_part
    d_start = d_start.at[..., -1, :].add(whole[..., 0] * jnp.sum(state * state_cotangent, axis=-1))
    d_log_decay = _decays_backward(d_inside, d_larger, d_start, key * last_part, tiling)
    return d_state, (d_query + query_part, d_key + key_part + last_part, d_value, d_log_decay, d_beta)


def _matmul(x: Float[Array, "... i k"], y: Float[Array, "... k j"], tiling: Tiling) -> Float[Array, "... i j"]:
    return jnp.einsum("...ik,...kj->...ij", x, y, precision=tiling.precision)


def _transpose(x: Float[Array, "... i j"]) -> Float[Array, "... j i"]:
    """The transpose, really made: XLA's CPU backend takes twice as long for a product that has it inside."""
    return jax.lax.optimization_barrier(jnp.swapaxes(x, -1, -2))


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


def _sums_inside(block: int) -> np.ndarray:
    """Which tokens of its block each token sums over: to every middle, from the block's start, to its end."""
    up_to = np.tri(block, dtype=bool)
    return np.concatenate([*(_outward(half, block) for half in _halvings(block)), up_to, ~up_to])


def _sums_of_blocks(blocks: int) -> np.ndarray:
    """Which whole blocks each block's tokens sum over besides: to every larger middle, from the start, to the end."""
    others = ~np.eye(blocks, dtype=bool)
    up_to = np.tri(blocks, dtype=bool)
    outward = [_outward(half, blocks) for half in _halvings(blocks)]
    return np.concatenate([x & others for x in (*outward, up_to, ~up_to)])


def _apply(weights: np.ndarray, x: Float[Array, "... mid dim"], tiling: Tiling) -> Float[Array, "... rows dim"]:
    weights = jnp.asarray(weights, x.dtype)
    if tiling.block < tiling.chunk:  # many small products: XLA's CPU backend wants the constant batched as well
        weights = jnp.broadcast_to(weights, (*x.shape[:-2], *weights.shape))
    return _matmul(weights, x, tiling)


def _blocks(x: Float[Array, "... chunk dim"], size: int) -> Float[Array, "... blocks size dim"]:
    return x.reshape(*x.shape[:-2], -1, size, x.shape[-1])


def _parts(x: Float[Array, "... rows dim"], size: int) -> list[Float[Array, "... size dim"]]:
    return [x[..., n : n + size, :] for n in range(0, x.shape[-2], size)]


def _later(half: int, blocks: int) -> np.ndarray:
    return (np.arange(blocks) // half % 2 == 1)[:, None, None]


def _decays(log_decay: Float[Array, "batch heads chunk key_dim"], tiling: Tiling) -> Decays:
    """Each is `exp` of a sum of log-decays."""
    size, block = tiling.chunk, tiling.block
    in_blocks = _blocks(log_decay, block)
    sums = _apply(_sums_inside(block), in_blocks, tiling)
    if block == size:
        *inside, from_start, to_end = _parts(jnp.exp(sums), block)
        return Decays(inside, [], from_start[..., 0, :, :], to_end[..., 0, :, :])
    *inside, from_start, to_end = _parts(sums, block)
    blocks = size // block
    totals = _apply(_sums_of_blocks(blocks), jnp.sum(in_blocks, axis=-2), tiling)
    *outward, before, after = (x[..., None, :] for x in _parts(totals, blocks))
    larger = [
        jnp.where(_later(half, blocks), from_start, to_end) + whole
        for half, whole in zip(_halvings(blocks), outward, strict=True)
    ]
    joined = [jnp.exp(x).reshape(log_decay.shape) for x in (*larger, from_start + before, to_end + after)]
    return Decays([jnp.exp(x) for x in inside], joined[:-2], joined[-2], joined[-1])


def _decays_backward(
    inside: list[Array], larger: list[Array], from_start: Array, to_end: Array, tiling: Tiling
) -> Float[Array, "batch heads chunk key_dim"]:
    """Cotangent of the log-decays from those of the sums, each of the shape it has in `Decays`."""
    size, block = tiling.chunk, tiling.block
    shape = from_start.shape
    larger, from_start, to_end = [_blocks(x, block) for x in larger], _blocks(from_start, block), _blocks(to_end, block)
    of_blocks = None
    if block < size:
        blocks = size // block
        totals = jnp.concatenate([jnp.sum(x, axis=-2) for x in (*larger, from_start, to_end)], axis=-2)
        of_blocks = _apply(_sums_of_blocks(blocks).T, totals, tiling)[..., None, :]
        for half, x in zip(_halvings(blocks), larger, strict=True):
            from_start = from_start + jnp.where(_later(half, blocks), x, 0.0)
            to_end = to_end + jnp.where(_later(half, blocks), 0.0, x)
    sums = jnp.concatenate([*inside, from_start, to_end], axis=-2)
    result = _apply(_sums_inside(block).T, sums, tiling)
    return (result if of_blocks is None else result + of_blocks).reshape(shape)


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
    own = jnp.sum(query * key, axis=-1)
    read = jnp.where(np.eye(block, dtype=bool), own.reshape(*query_blocks.shape[:-1], 1), 0.0)
    overlap = jnp.zeros_like(read)
    for half, decay in zip(_halvings(block), decays.inside, strict=True):
        either_key = key_blocks * decay
        early = jnp.swapaxes(either_key, -1, -2)
        across = _across(half, block)
        read = jnp.where(across, _matmul(query_blocks * decay, early, tiling), read)
        overlap = jnp.where(across, _matmul(either_key, early, tiling), overlap)
    for half, decay in zip(_halvings(tiling.chunk)[len(decays.inside) :], decays.larger, strict=True):
        late_query, late_key, early_key = _halves(query, key, decay, half)
        early = jnp.swapaxes(early_key, -1, -2)
        read = _join(read, _matmul(late_query, early, tiling))
        overlap = _join(overlap, _matmul(late_key, early, tiling))
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
) -> tuple[Array, Array, list[Array], list[Array]]:
    """Cotangents of query and key through `P` and `A`, and of the logs of the halvings' decays."""
    block, shape = tiling.block, query.shape
    own = jnp.sum(jnp.where(np.eye(tiling.chunk, dtype=bool), d_read, 0.0), axis=-1, keepdims=True)
    d_query, d_key = own * key, own * query

    query_blocks, key_blocks = _blocks(query, block), _blocks(key, block)
    both = jnp.concatenate([_diagonal(d_read, block), _diagonal(d_overlap, block)], axis=-2)
    both_transposed = _transpose(both)
    of_query, of_key, inside, larger = 0.0, 0.0, [], []
    for half, decay in zip(_halvings(block), decays.inside, strict=True):
        across = np.concatenate([_across(half, block)] * 2)
        late_query, either_key = query_blocks * decay, key_blocks * decay
        late = _matmul(jnp.where(across, both, 0.0), either_key, tiling)
        late_pair = jnp.concatenate([late_query, either_key], axis=-2)
        early = _matmul(jnp.where(across.T, both_transposed, 0.0), late_pair, tiling)
        query_part = decay * late[..., :block, :]
        key_part = decay * (late[..., block:, :] + early)
        of_query, of_key = of_query + query_part, of_key + key_part
        inside.append(query_blocks * query_part + key_blocks * key_part)
    if inside:
        d_query, d_key = d_query + of_query.reshape(shape), d_key + of_key.reshape(shape)

    for half, decay in zip(_halvings(tiling.chunk)[len(inside) :], decays.larger, strict=True):
        late_query, late_key, early_key = _halves(query, key, decay, half)
        of_read, of_overlap = _corners(d_read, half), _corners(d_overlap, half)
        both = jnp.concatenate([of_read, of_overlap], axis=-2)
        late = _matmul(both, early_key, tiling)
        early = _matmul(_transpose(both), jnp.concatenate([late_query, late_key], axis=-2), tiling)
        query_part = jnp.stack([jnp.zeros_like(early), late[..., :half, :]], axis=-3).reshape(shape) * decay
        key_part = jnp.stack([early, late[..., half:, :]], axis=-3).reshape(shape) * decay
        d_query, d_key = d_query + query_part, d_key + key_part
        larger.append(query * query_part + key * key_part)
    return d_query, d_key, inside, larger


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
