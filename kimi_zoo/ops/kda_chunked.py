"""Kimi Delta Attention in chunks, in plain JAX: matmuls inside a chunk, one scan over chunks.

With `G` the log-decay summed from the start of the chunk, the recurrence over a chunk that starts from state `S` is

    (I + tril(A, -1)) U = beta * (V - (K * exp(G)) S),     A[i, j] = beta[i] * <K[i], exp(G[i] - G[j]) * K[j]>
    output = (Q * exp(G)) S + tril(P) U,                   P[i, j] = <Q[i], exp(G[i] - G[j]) * K[j]>
    state  = exp(G[-1]) * S + (K * exp(G[-1] - G))^T U

`exp(-G[j])` would overflow, so decays between two tokens are never taken apart that way. The chunk is halved again and
again, and a pair of tokens in different halves meets at the boundary between them: `exp(sum from the boundary to i)`
times `exp(sum from j to the boundary)`. Both exponents are at most 0 for any gate, and each is summed outward from the
boundary, so a strong decay elsewhere takes no digits away. The same halves invert the triangular matrix.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kimi_zoo.ops.kda_gates import Activation, activate_tokens
from kimi_zoo.ops.kda_recurrent import read_slot, write_slot
from kimi_zoo.ops.packing import align_segments, segment_starts

DEFAULT_CHUNK_SIZE = 64


def _halves(x: Float[Array, "... chunk dim"], half: int) -> tuple[Array, Array]:
    """The earlier and the later half of every block of `2 * half` tokens, each `... blocks half dim`."""
    x = x.reshape(*x.shape[:-2], -1, 2, half, x.shape[-1])
    return x[..., 0, :, :], x[..., 1, :, :]


def _before(x: Float[Array, "... seq dim"]) -> Float[Array, "... seq dim"]:
    """Sum over the tokens after each token: what decays it on the way to the end of the block."""
    later = jnp.flip(jnp.cumsum(jnp.flip(x[..., 1:, :], -2), axis=-2), -2)
    return jnp.concatenate([later, jnp.zeros_like(x[..., :1, :])], axis=-2)


def _place(blocks: Float[Array, "... blocks rows cols"], rows: int, row: int, col: int) -> Array:
    """Zero-padded copy of each block inside a square of `rows` rows, at (row, col)."""
    height, width = blocks.shape[-2:]
    pad = [(0, 0)] * (blocks.ndim - 2) + [(row, rows - row - height), (col, rows - col - width)]
    return jnp.pad(blocks, pad)


def _pairs(
    query: Float[Array, "batch heads chunk key_dim"],
    key: Float[Array, "batch heads chunk key_dim"],
    log_decay: Float[Array, "batch heads chunk key_dim"],
    beta: Float[Array, "batch heads chunk"],
    same: Bool[Array, "batch chunk chunk"] | None,
) -> tuple[Float[Array, "batch heads chunk chunk"], Float[Array, "batch heads chunk chunk"]]:
    """`tril(P)` and the inverse of `I + tril(A, -1)`, built from single tokens to the whole chunk by doubling."""
    chunk = query.shape[-2]
    scores = jnp.sum(query * key, axis=-1)[..., None, None]  # batch heads blocks 1 1
    inverse = jnp.ones_like(scores)
    beta = beta[..., None]
    half = 1
    while half < chunk:
        width = 2 * half
        _, late_query = _halves(query, half)
        early_key, late_key = _halves(key, half)
        early_decay, late_decay = _halves(log_decay, half)
        _, late_beta = _halves(beta, half)
        early_key = early_key * jnp.exp(_before(early_decay))
        onward = jnp.exp(jnp.cumsum(late_decay, axis=-2))
        read = jnp.einsum("...ik,...jk->...ij", late_query * onward, early_key)
        overlap = jnp.einsum("...ik,...jk->...ij", late_key * onward * late_beta, early_key)
        if same is not None:
            meet = same.reshape(same.shape[0], chunk // width, width, chunk // width, width)
            meet = jnp.moveaxis(jnp.diagonal(meet, axis1=1, axis2=3), -1, 1)[:, None, :, half:, :half]
            read, overlap = jnp.where(meet, read, 0.0), jnp.where(meet, overlap, 0.0)
        (early_scores, late_scores), (early_inverse, late_inverse) = (
            (x[..., 0::2, :, :], x[..., 1::2, :, :]) for x in (scores, inverse)
        )
        scores = (
            _place(early_scores, width, 0, 0) + _place(late_scores, width, half, half) + _place(read, width, half, 0)
        )
        corner = -late_inverse @ overlap @ early_inverse
        inverse = (
            _place(early_inverse, width, 0, 0)
            + _place(late_inverse, width, half, half)
            + _place(corner, width, half, 0)
        )
        half = width
    return scores[..., 0, :, :], inverse[..., 0, :, :]


def _chunk_step(state, query, key, value, log_decay, beta, segment):
    """One chunk, `batch heads chunk dim`; returns the state after it and its output."""
    same = None if segment is None else segment[:, :, None] == segment[:, None, :]
    scores, inverse = _pairs(query, key, log_decay, beta, same)
    from_start = jnp.exp(jnp.cumsum(log_decay, axis=-2))
    to_end = jnp.exp(_before(log_decay))
    through = from_start[..., -1, :]
    if segment is not None:
        first, last = segment[:, None, :, None] == 0, segment[:, None, :, None] == segment[:, None, -1:, None]
        from_start, to_end = jnp.where(first, from_start, 0.0), jnp.where(last, to_end, 0.0)
        through = from_start[..., -1, :]
    written = inverse @ (beta[..., None] * (value - (key * from_start) @ state))
    output = (query * from_start) @ state + scores @ written
    state = through[..., None] * state + jnp.swapaxes(key * to_end, -1, -2) @ written
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
    """Output of every token and the final state, or, for one initial state per segment id, as many final states."""
    seq = query.shape[1]
    if seq == 0:
        return value, initial_state
    chunk = chunk_size or min(DEFAULT_CHUNK_SIZE, 1 << (seq - 1).bit_length())
    tokens = (query, key, value, gate, beta)
    if initial_state.ndim == 4:
        output, state = _scan_chunks(*tokens, initial_state, a_log, dt_bias, segment_ids, activation, chunk)
        return output[:, :seq], state
    alignment = align_segments(segment_ids, chunk, initial_state.shape[1])
    tokens = [alignment.gather(x) for x in tokens]
    ids = alignment.gather(segment_ids)
    output, state = _scan_chunks(*tokens, initial_state, a_log, dt_bias, ids, activation, chunk)
    return alignment.restore(output), state


def _scan_chunks(
    query, key, value, gate, beta, initial_state, a_log, dt_bias, segment_ids, activation: Activation, chunk: int
):
    """One scan over chunks. With a state per segment, each chunk holds tokens of one segment only."""
    batch, seq, heads, _ = query.shape
    padding = -seq % chunk
    real = starts = slot = None
    if segment_ids is not None:
        real, starts = segment_ids > 0, segment_starts(segment_ids)
    elif padding:
        real = jnp.ones((batch, seq), bool)

    def split(x):
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, -1, chunk, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def step(states, tokens):
        *inputs, real, starts, slot = tokens
        inputs = activate_tokens(*inputs, real, a_log, dt_bias, activation)
        inputs = [jnp.moveaxis(x, 2, 1) for x in inputs]
        segment = None if starts is None else jnp.cumsum(starts, axis=1, dtype=jnp.int32)
        state, output = _chunk_step(read_slot(states, slot), *inputs, segment)
        return write_slot(states, slot, state), jnp.moveaxis(output, 1, 2).astype(value.dtype)

    if initial_state.ndim == 5:
        slot, starts = jnp.maximum(jnp.max(split(segment_ids), axis=-1) - 1, 0), None
    tokens = [None if x is None else split(x) for x in (query, key, value, gate, beta, real, starts)]
    final_state, output = jax.lax.scan(step, initial_state, (*tokens, slot))
    return jnp.moveaxis(output, 0, 1).reshape(batch, -1, heads, value.shape[-1]), final_state
