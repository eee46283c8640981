"""Causal softmax attention: over a packed sequence, and over new tokens behind a cache of latents."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kimi_zoo.ops.packing import segment_runs

MASKED = -1e30  # finite, so that a fully masked row gives weights of 0 after the final mask instead of NaN


def causal_attention(
    query: Float[Array, "batch seq heads dim"],
    key: Float[Array, "batch seq heads dim"],
    value: Float[Array, "batch seq heads value_dim"],
    *,
    scale: float,
    segment_ids: Int[Array, "batch seq"] | None = None,
    block_size: int = 256,
) -> Float[Array, "batch seq heads value_dim"]:
    """`softmax(scale * query key^T) value` over the tokens of the same document up to the query's own.

    Queries are taken in blocks, each against the keys before its end only, so that about half of the products are never
    computed. Scores and sums are float32, and kept for the derivative: for long rows see `blockwise_attention`.

    **Arguments:** `segment_ids`: 1, 2, ... for packed documents, 0 for padding (output 0, and never attended to).

    **Returns:** the attention output in the dtype of `value`.
    """
    seq = query.shape[1]
    if segment_ids is not None:
        segment_ids = segment_runs(segment_ids)
        # 0 * NaN is NaN: what padding holds must not reach the products
        query, key, value = (
            jnp.where((segment_ids > 0)[..., None, None], x, jnp.zeros((), x.dtype)) for x in (query, key, value)
        )
    outputs = [
        _attend_block(
            query[:, start : start + block_size],
            key[:, : start + block_size],
            value[:, : start + block_size],
            None if segment_ids is None else segment_ids[:, : start + block_size],
            start,
            scale,
        )
        for start in range(0, seq, block_size)
    ]
    return jnp.concatenate(outputs, axis=1) if outputs else value


def _attend_block(
    query: Array, key: Array, value: Array, segment_ids: Array | None, start: int | Array, scale: float
) -> Array:
    """Attention of the queries at positions `start ...` over all given keys."""
    length, total = query.shape[1], key.shape[1]
    mask = (start + jnp.arange(length))[:, None] >= jnp.arange(total)
    mask = mask[None]
    if segment_ids is not None:
        own = segment_ids[:, total - length :]
        mask = mask & (own[:, :, None] == segment_ids[:, None, :]) & (own > 0)[:, :, None]
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32) * scale
    weights = jax.nn.softmax(jnp.where(mask[:, None], scores, MASKED), axis=-1)
    if segment_ids is not None:
        weights = jnp.where(mask[:, None], weights, 0.0)
    return jnp.einsum("bhqk,bkhd->bqhd", weights.astype(value.dtype), value)


def latent_attention(
    query: Float[Array, "batch seq heads dim"],
    key: Float[Array, "batch seq heads dim"],
    value: Float[Array, "batch seq heads value_dim"],
    query_latent: Float[Array, "batch seq heads rank"],
    query_rope: Float[Array, "batch seq heads rope_dim"],
    latent: Float[Array, "batch capacity rank"],
    key_rope: Float[Array, "batch capacity rope_dim"],
    value_up: Float[Array, "heads value_dim rank"],
    *,
    lengths: Int[Array, " batch"],
    real: Bool[Array, "batch seq"] | None = None,
    scale: float,
    block_size: int = 512,
    query_block: int = 256,
) -> Float[Array, "batch seq heads value_dim"]:
    """Causal attention of new tokens over themselves and over a cache of latents.

    New tokens are attended to through their own keys and values; cached ones in the absorbed form, scores from
    `query_latent . latent + query_rope . key_rope` and values from `value_up latent`, so cached keys and values are
    never expanded. The cache is read in blocks, as many as the longest row fills: the cost follows the tokens held, not
    the capacity. Softmax statistics of both parts are merged exactly; everything is summed in float32.

    **Arguments:**

    - `query_latent`: the part of the query without rotation, multiplied into latent space by the key up-projection.
    - `lengths`: tokens held by each row of the cache.
    - `real`: which new tokens are real, by default all; pads are not attended to and their output is 0.
    - `block_size`, `query_block`: cached tokens, and new ones, that are looked at together.

    **Source:** DeepSeek-V2 (arXiv:2405.04434), absorption of the up-projections, section 2.1.
    """
    outputs = []
    for start in range(0, query.shape[1], query_block):
        own, seen = slice(start, start + query_block), slice(0, start + query_block)
        outputs.append(
            _attend_latents(
                query[:, own],
                key[:, seen],
                value[:, seen],
                query_latent[:, own].astype(latent.dtype),
                query_rope[:, own].astype(key_rope.dtype),
                latent,
                key_rope,
                value_up,
                lengths,
                None if real is None else real[:, seen],
                scale,
                min(block_size, latent.shape[1]),
            )
        )
    output = jnp.concatenate(outputs, axis=1) if outputs else value
    return output if real is None else jnp.where(real[..., None, None], output, jnp.zeros((), output.dtype))


def _attend_latents(
    query: Array,
    key: Array,
    value: Array,
    query_latent: Array,
    query_rope: Array,
    latent: Array,
    key_rope: Array,
    value_up: Array,
    lengths: Array,
    real: Array | None,
    scale: float,
    block_size: int,
) -> Array:
    """The last `query.shape[1]` of the new tokens over all of them and the cache."""
    batch, seq, heads, _ = query.shape
    total_new = key.shape[1]
    capacity, rank = latent.shape[1:]
    f32 = jnp.float32
    causal = (total_new - seq + jnp.arange(seq))[:, None] >= jnp.arange(total_new)
    mask = causal[None, None] if real is None else (causal & real[:, None, :])[:, None]
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=f32) * scale
    scores = jnp.where(mask, scores, MASKED)
    peak = jnp.max(scores, axis=-1)  # [batch, heads, seq]
    weights = jnp.where(mask, jnp.exp(scores - peak[..., None]), 0.0)
    total = jnp.sum(weights, axis=-1)
    new = jnp.einsum("bhqk,bkhd->bhqd", weights.astype(value.dtype), value, preferred_element_type=f32)

    def attend(index: Array, carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        peak, total, scaling, cached = carry
        start = jnp.minimum(index * block_size, capacity - block_size)
        block = jax.lax.dynamic_slice_in_dim(latent, start, block_size, axis=1)
        rope = jax.lax.dynamic_slice_in_dim(key_rope, start, block_size, axis=1)
        place = start + jnp.arange(block_size)
        # the last block may overlap the one before: count each place once
        held = (place[None] < lengths[:, None]) & (place >= index * block_size)[None]
        block = jnp.where(held[..., None], block, jnp.zeros((), block.dtype))
        scores = jnp.einsum("bqhr,bkr->bhqk", query_latent, block, preferred_element_type=f32)
        scores = (scores + jnp.einsum("bqhr,bkr->bhqk", query_rope, rope, preferred_element_type=f32)) * scale
        scores = jnp.where(held[:, None, None], scores, MASKED)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1))
        shrink = jnp.exp(peak - new_peak)
        weights = jnp.where(held[:, None, None], jnp.exp(scores - new_peak[..., None]), 0.0)
        update = jnp.einsum("bhqk,bkr->bhqr", weights.astype(block.dtype), block, preferred_element_type=f32)
        return (
            new_peak,
            total * shrink + jnp.sum(weights, axis=-1),
            scaling * shrink,
            cached * shrink[..., None] + update,
        )

    blocks = (jnp.max(lengths, initial=0) + block_size - 1) // block_size
    start = (peak, total, jnp.ones_like(total), jnp.zeros((batch, heads, seq, rank), f32))
    peak, total, scaling, cached = jax.lax.fori_loop(0, blocks, attend, start)
    cached = jnp.einsum("bhqr,hvr->bhqv", cached, value_up.astype(f32))
    output = (new * scaling[..., None] + cached) / jnp.where(total > 0, total, 1.0)[..., None]
    return jnp.swapaxes(output, 1, 2).astype(value.dtype)
