"""Kimi Delta Attention in chunks, in plain JAX: matmuls inside a chunk, one scan over chunks.

With `G` the log-decay summed from the start of the chunk, the recurrence over a chunk that starts from state `S` is

    (I + A) U = beta * (V - (K * exp(G)) S)         A[i, j] = beta[i] * <K[i], exp(G[i] - G[j]) * K[j]>,  j < i
    output    = (Q * exp(G)) S + P U                P[i, j] = <Q[i], exp(G[i] - G[j]) * K[j]>,            j <= i
    state     = exp(G[-1]) * S + (K * exp(G[-1] - G))^T U

`exp(-G[j])` would overflow, so the decay between two tokens is never taken apart that way. The chunk is halved again
and again, and two tokens in different halves meet at the boundary between them: `exp(sum from the boundary to i)` times
`exp(sum from j to the boundary)`. Both exponents are at most 0 for any gate, and each is summed outward from the
boundary, never as a difference of longer sums, so a strong decay elsewhere takes no digits away. The same halves invert
the triangular matrix. Within blocks of 8 tokens all halvings are done at once, with masks.

The scan saves the state at the start of each chunk; its derivative recomputes the rest.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kimi_zoo.ops.kda_gates import Activation, activate_tokens
from kimi_zoo.ops.kda_recurrent import read_slot, write_slot
from kimi_zoo.ops.packing import align_segments, segment_starts

DEFAULT_CHUNK_SIZE = 64
_BLOCK_SIZE = 8
_LEAST_LOG_DECAY = -1e30  # stands for -inf, which would turn to NaN in a sum with weight 0; exp is 0 for both

_HIGHEST = jax.lax.Precision.HIGHEST


@jax.custom_vjp
def _matmul(x: Float[Array, "... i k"], y: Float[Array, "... k j"]) -> Float[Array, "... i j"]:
    return jnp.einsum("...ik,...kj->...ij", x, y, precision=_HIGHEST)


@jax.custom_vjp
def _matmul_transposed(x: Float[Array, "... i k"], y: Float[Array, "... j k"]) -> Float[Array, "... i j"]:
    """`x @ y^T`."""
    return jnp.einsum("...ik,...jk->...ij", x, y, precision=_HIGHEST)


def _transposed_matmul(x: Float[Array, "... k i"], y: Float[Array, "... k j"]) -> Float[Array, "... i j"]:
    """`x^T @ y`. XLA's CPU backend takes twice as long for it unless the transpose is really made first."""
    return _matmul(jax.lax.optimization_barrier(jnp.swapaxes(x, -1, -2)), y)


# the derivatives that JAX would take, with the products of transposed matrices taken as above
_matmul.defvjp(
    lambda x, y: (_matmul(x, y), (x, y)),
    lambda xy, ct: (_matmul_transposed(ct, xy[1]), _transposed_matmul(xy[0], ct)),
)
_matmul_transposed.defvjp(
    lambda x, y: (_matmul_transposed(x, y), (x, y)),
    lambda xy, ct: (_matmul(ct, xy[1]), _transposed_matmul(ct, xy[0])),
)


def _split(x: Array, size: int) -> Array:
    """`... tokens dim` to `... tokens/size size dim`."""
    return x.reshape(*x.shape[:-2], -1, size, x.shape[-1])


def _halvings(size: int) -> list[int]:
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


def _up_to(size: int) -> np.ndarray:
    return np.tri(size, dtype=bool)


def _after(size: int) -> np.ndarray:
    return ~np.tri(size, dtype=bool)


def _decays(
    log_decay: Float[Array, "batch heads chunk key_dim"],
) -> tuple[Float[Array, "batch heads blocks halvings block key_dim"], list[Array], Array, Array]:
    """All decays a chunk needs, each `exp` of a sum that is at most 0.

    Returns, per token: to or from the middle at each halving of its block; the same for each larger halving; from the
    start of the chunk; to the end of the chunk.
    """
    shape, chunk = log_decay.shape, log_decay.shape[-2]
    size = min(_BLOCK_SIZE, chunk)
    blocks = chunk // size
    per_block = _split(log_decay, size)
    inside = _weighted_sums([_outward(half, size) for half in _halvings(size)], per_block)
    (from_start,), (to_end,) = (
        jnp.moveaxis(_weighted_sums([x], per_block), -3, 0) for x in (_up_to(size), _after(size))
    )

    # sums over whole blocks: of those between a token's own and the middle, before its own, and after its own
    block = np.arange(blocks)
    own = np.eye(blocks, dtype=bool)
    halvings = _halvings(blocks)
    whole = [*(_outward(half, blocks) & ~own for half in halvings), _up_to(blocks) & ~own, _after(blocks)]
    whole = _weighted_sums(whole, jnp.sum(per_block, axis=-2))[..., None, :]
    larger = []
    for i, half in enumerate(halvings):
        later = (block // half % 2 == 1)[:, None, None]
        larger.append(jnp.exp(jnp.where(later, from_start, to_end) + whole[..., i, :, :, :]).reshape(shape))
    from_start = jnp.exp(from_start + whole[..., -2, :, :, :]).reshape(shape)
    to_end = jnp.exp(to_end + whole[..., -1, :, :, :]).reshape(shape)
    return jnp.exp(inside), larger, from_start, to_end


def _weighted_sums(which: list[np.ndarray], x: Float[Array, "... mid dim"]) -> Float[Array, "... sums mid dim"]:
    """For each matrix in `which`, its product with `x`."""
    weights = jnp.asarray(np.concatenate(which) if which else np.zeros((0, x.shape[-2])), x.dtype)
    # one small matrix for every block: XLA's CPU backend is slow when it is not batched as well
    sums = _matmul(jnp.broadcast_to(weights, (*x.shape[:-2], *weights.shape)), x)
    return sums.reshape(*x.shape[:-2], len(which), *x.shape[-2:])


def _scores(
    query: Float[Array, "batch heads chunk key_dim"],
    key: Float[Array, "batch heads chunk key_dim"],
    inside: Float[Array, "batch heads blocks halvings block key_dim"],
    larger: list[Array],
) -> tuple[Float[Array, "batch heads chunk chunk"], Float[Array, "batch heads chunk chunk"]]:
    """`P`, and `A` before it is multiplied with beta."""
    size = inside.shape[-2]
    halvings = _halvings(size)
    own = _split(jnp.sum(query * key, axis=-1)[..., None], size)
    both = jnp.where(np.eye(size, dtype=bool), own, 0.0)
    both = jnp.stack([both, jnp.zeros_like(both)], axis=-3)  # blocks, query or key, late, early
    if halvings:
        across = np.stack([_across(half, size) for half in halvings])[:, None]
        late_query, either_key = (_split(x, size)[..., None, :, :] * inside for x in (query, key))
        met = _matmul_transposed(jnp.concatenate([late_query, either_key], axis=-2), either_key)
        met = met.reshape(*met.shape[:-2], 2, size, size)
        both = both + jnp.sum(jnp.where(across, met, 0.0), axis=-4)
    for decay in larger:
        late_query, either_key = (_split(x * decay, size) for x in (query, key))
        late = jnp.concatenate([late_query[..., 1::2, :, :], either_key[..., 1::2, :, :]], axis=-2)
        met = _matmul_transposed(late, either_key[..., 0::2, :, :])
        met = met.reshape(*met.shape[:-2], 2, size, size)
        both = _join(both[..., 0::2, :, :, :], met, both[..., 1::2, :, :, :])
        size *= 2
    return both[..., 0, 0, :, :], both[..., 0, 1, :, :]


def _join(upper: Float[Array, "... size size"], corner: Float[Array, "... size size"], lower: Array) -> Array:
    """Lower-triangular blocks of twice the size, from two of them on the diagonal and one below the diagonal."""
    upper = jnp.concatenate([upper, jnp.zeros_like(upper)], axis=-1)
    return jnp.concatenate([upper, jnp.concatenate([corner, lower], axis=-1)], axis=-2)


def _inverse(overlap: Float[Array, "... chunk chunk"]) -> Float[Array, "... chunk chunk"]:
    """Inverse of `I + overlap`, which is strictly lower triangular, by inverting blocks of doubling size."""
    chunk = overlap.shape[-1]
    size = min(_BLOCK_SIZE, chunk)
    blocks = overlap.reshape(*overlap.shape[:-2], chunk // size, size, chunk // size, size)
    blocks = jnp.stack([blocks[..., n, :, n, :] for n in range(chunk // size)], axis=-3)
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=overlap.dtype), blocks.shape)
    for half in _halvings(size):
        corner = jnp.where(_across(half, size), blocks, 0.0)
        inverse = inverse - (corner if half == 1 else _matmul(_matmul(inverse, corner), inverse))
    while size < chunk:
        starts = range(0, chunk, 2 * size)
        corner = jnp.stack([overlap[..., n + size : n + 2 * size, n : n + size] for n in starts], axis=-3)
        upper, lower = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        inverse = _join(upper, -_matmul(lower, _matmul(corner, upper)), lower)
        size *= 2
    return inverse[..., 0, :, :]


@jax.custom_vjp
def _solve(overlap: Float[Array, "... chunk chunk"], values: Float[Array, "... chunk dim"]) -> Array:
    """`(I + overlap)^-1 values`."""
    return _matmul(_inverse(overlap), values)


def _solve_forward(overlap: Array, values: Array) -> tuple[Array, tuple[Array, Array]]:
    inverse = _inverse(overlap)
    solution = _matmul(inverse, values)
    return solution, (inverse, solution)


def _solve_backward(residuals: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    """The same inverse, transposed, solves for the cotangents: no derivative of the inversion itself."""
    inverse, solution = residuals
    of_values = _transposed_matmul(inverse, cotangent)
    return -_matmul_transposed(of_values, solution), of_values


_solve.defvjp(_solve_forward, _solve_backward)


def _chunk_step(
    state: Float[Array, "batch heads key_dim value_dim"],
    query: Float[Array, "batch heads chunk key_dim"],
    key: Float[Array, "batch heads chunk key_dim"],
    value: Float[Array, "batch heads chunk value_dim"],
    log_decay: Float[Array, "batch heads chunk key_dim"],
    beta: Float[Array, "batch heads chunk"],
    segment: Int[Array, "batch chunk"] | None,
) -> tuple[Float[Array, "batch heads key_dim value_dim"], Float[Array, "batch heads chunk value_dim"]]:
    """State after one chunk, and its output. `segment` numbers the chunk's segments; 0 continues from the state."""
    chunk = query.shape[-2]
    # barriers: XLA would otherwise compute these again wherever they are used
    inside, larger, from_start, to_end = jax.lax.optimization_barrier(_decays(jnp.maximum(log_decay, _LEAST_LOG_DECAY)))
    read, overlap = jax.lax.optimization_barrier(_scores(query, key, inside, larger))
    if segment is not None:
        segment = segment[:, None, :, None]
        same = segment == jnp.swapaxes(segment, -1, -2)
        read, overlap = jnp.where(same, read, 0.0), jnp.where(same, overlap, 0.0)
        from_start = jnp.where(segment == 0, from_start, 0.0)
        to_end = jnp.where(segment == segment[:, :, -1:], to_end, 0.0)
    recalled = _matmul(jnp.concatenate([query * from_start, key * from_start], axis=-2), state)
    values = beta[..., None] * (value - recalled[..., chunk:, :])
    written = _solve(beta[..., None] * overlap, values)
    output = recalled[..., :chunk, :] + _matmul(read, written)
    state = from_start[..., -1, :, None] * state + _transposed_matmul(key * to_end, written)
    return state, output


def kda_chunked(
    query: Float[Array, "batch seq heads key_dim"],
    key: Float[Array, "batch seq heads key_dim"],
    value: Float[Array, "batch seq heads value_dim"],
    gate: Float[Array, "batch seq heads key_dim"],
    beta: Float[Array, "batch seq heads"],
    initial_state: Float[Array, "batch *segments heads key_dim value_dim"],
    a_log: Float[Array, " heads"] | None,
    dt_bias: Float[Array, "heads key_dim"] | None,
    segment_ids: Int[Array, "batch seq"] | None,
    activation: Activation,
    chunk_size: int | None,
) -> tuple[Float[Array, "batch seq heads value_dim"], Float[Array, "batch *segments heads key_dim value_dim"]]:
    """Output of every token and the final state, or, for one initial state per segment id, as many final states.

    The inputs are raw: normalisation, scale and gate are applied chunk by chunk.
    """
    seq = query.shape[1]
    if seq == 0:
        return value, initial_state
    chunk = chunk_size or min(DEFAULT_CHUNK_SIZE, 1 << (seq - 1).bit_length())
    tokens = (query, key, value, gate, beta)
    if initial_state.ndim == 4:
        real = None if segment_ids is None else segment_ids > 0
        output, state = _scan_chunks(tokens, initial_state, a_log, dt_bias, real, segment_ids, None, activation, chunk)
        return output[:, :seq], state
    alignment = align_segments(segment_ids, chunk, initial_state.shape[1])  # now a chunk has tokens of one segment
    ids = alignment.gather(segment_ids)
    slots = jnp.maximum(jnp.max(_split(ids[..., None], chunk), axis=(-2, -1)) - 1, 0)
    tokens = tuple(alignment.gather(x) for x in tokens)
    output, state = _scan_chunks(tokens, initial_state, a_log, dt_bias, ids > 0, None, slots, activation, chunk)
    return alignment.restore(output), state


def _scan_chunks(
    tokens: tuple[Array, Array, Array, Array, Array],
    initial_state: Float[Array, "batch *segments heads key_dim value_dim"],
    a_log: Float[Array, " heads"] | None,
    dt_bias: Float[Array, "heads key_dim"] | None,
    real: Bool[Array, "batch seq"] | None,
    segment_ids: Int[Array, "batch seq"] | None,
    slots: Int[Array, "batch chunks"] | None,
    activation: Activation,
    chunk: int,
) -> tuple[Array, Array]:
    """Output, padded to whole chunks, and the final state or states; `slots` names the state each chunk works on."""
    batch, seq = tokens[0].shape[:2]
    padding = -seq % chunk
    if padding and real is None:
        real = jnp.ones((batch, seq), bool)

    def split(x):
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, -1, chunk, *x.shape[2:]), 1, 0)

    @functools.partial(jax.checkpoint, prevent_cse=False)  # nothing to prevent across the iterations of a scan
    def step(states, of_chunk):
        tokens, real, segment, slot = of_chunk
        tokens = activate_tokens(*tokens, real, a_log, dt_bias, activation)
        state, output = _chunk_step(read_slot(states, slot), *(jnp.moveaxis(x, 2, 1) for x in tokens), segment)
        return write_slot(states, slot, state), jnp.moveaxis(output, 1, 2)

    segments = None if segment_ids is None else _number_in_chunks(split(segment_starts(segment_ids)))
    slots = None if slots is None else slots.T
    final_state, output = jax.lax.scan(step, initial_state, (*jax.tree.map(split, (tokens, real)), segments, slots))
    return jnp.moveaxis(output, 0, 1).reshape(batch, -1, *tokens[2].shape[2:]), final_state


def _number_in_chunks(starts: Bool[Array, "chunks batch chunk"]) -> Int[Array, "chunks batch chunk"]:
    """How many segments have started in the chunk, up to and with each token."""
    up_to = np.tril(np.ones((starts.shape[-1], starts.shape[-1]), bool))
    return jnp.sum(starts[:, :, None, :] & up_to, axis=-1, dtype=jnp.int32)
