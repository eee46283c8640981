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
    initial_state: Float[Array, "batch heads key_dim value_dim"],
    a_log: Float[Array, " heads"] | None,
    dt_bias: Float[Array, "heads key_dim"] | None,
    real: Bool[Array, "batch seq"] | None,
    starts: Bool[Array, "batch seq"] | None,
    activation: Activation,
    chunk_size: int | None,
) -> tuple[Float[Array, "batch seq heads value_dim"], Float[Array, "batch heads key_dim value_dim"]]:
    """Output of every token and the state after the last one."""
    batch, seq, heads, _ = query.shape
    if seq == 0:
        return jnp.zeros(value.shape, value.dtype), initial_state
    chunk = chunk_size or min(DEFAULT_CHUNK_SIZE, 1 << (seq - 1).bit_length())
    padding = -seq % chunk
    if padding and real is None:
        real = jnp.ones((batch, seq), bool)

    def split(x):
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, -1, chunk, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def step(state, tokens):
        *inputs, real, starts = tokens
        inputs = activate_tokens(*inputs, real, a_log, dt_bias, activation)
        inputs = [jnp.moveaxis(x, 2, 1) for x in inputs]
        segment = None if starts is None else jnp.cumsum(starts, axis=1, dtype=jnp.int32)
        state, output = _chunk_step(state, *inputs, segment)
        return state, jnp.moveaxis(output, 1, 2).astype(value.dtype)

    tokens = [None if x is None else split(x) for x in (query, key, value, gate, beta, real, starts)]
    final_state, output = jax.lax.scan(step, initial_state, tokens)
    return jnp.moveaxis(output, 0, 1).reshape(batch, -1, heads, value.shape[-1])[:, :seq], final_state
