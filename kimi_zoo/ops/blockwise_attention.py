"""Causal attention with latents, block by block: for long rows, and for rows that are split across devices.

Keys and values are expanded from the latents of one block at a time, softmax statistics are merged from block to block,
and blocks that no query may see, future ones and those of other documents, are skipped. The derivative keeps the output
and the log of the softmax sums and computes everything else again, so that memory grows with the length alone.

Where rows are split, every rank gathers the latents of the whole rows, a few hundred numbers per token for all heads
together, and attends with its own queries; the latents' gradients go back to their ranks in one reduce-scatter. Later
queries see more keys: with n ranks the last one would have 2 - 1/n times the mean of the work. So ranks r and n - 1 - r
first trade the later halves of their queries: of the 2n halves of a row each has the ones numbered 2r and 2n - 1 - 2r,
which together are the same work everywhere. Parts of odd length stay where they are.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from kimi_zoo.ops.attention import MASKED
from kimi_zoo.ops.context import AxisNames, axis_size, row_part
from kimi_zoo.ops.packing import segment_runs
from kimi_zoo.ops.varying import vary_alike, zeros_like

NO_DOCUMENT = jnp.iinfo(jnp.int32).max


def blockwise_attention(
    query: Float[Array, "batch seq heads dim"],
    latent: Float[Array, "batch seq rank"],
    key_rope: Float[Array, "batch seq rope_dim"],
    kv_up: Float[Array, "heads expanded rank"],
    *,
    scale: float,
    context_axis: AxisNames | None = None,
    segment_ids: Int[Array, "batch seq"] | None = None,
    block_size: int = 512,
) -> Float[Array, "batch seq heads value_dim"]:
    """`kimi_zoo.ops.attention.causal_attention` on keys and values expanded from latents.

    A head's key is `kv_up[:, :dim - rope_dim] latent` and, behind it, `key_rope`; its value is the rest of
    `kv_up latent`. Scores and sums are float32.

    **Arguments:**

    - `query`, `latent`, `key_rope`, `segment_ids`: of the rows, or of this rank's part of them. Documents 1, 2, ...,
        padding 0 (output 0, and never attended to).
    - `context_axis`: inside `jax.shard_map`, the mesh axis, or axes, over which rows are split into consecutive parts,
        the last one innermost.
    - `block_size`: tokens, of queries and of keys, that are looked at together.

    **Returns:** the attention output in the dtype of the latents.
    """
    if context_axis is not None:
        axis_size(context_axis, "context_axis")
    own_dim = query.shape[-1] - key_rope.shape[-1]
    if query.shape[1] == 0:
        return jnp.zeros((*query.shape[:3], kv_up.shape[1] - own_dim), latent.dtype)
    if segment_ids is None:
        documents = jnp.ones(query.shape[:2], jnp.int32)
    else:
        split = context_axis is not None
        documents = row_part(segment_ids, context_axis).documents if split else segment_runs(segment_ids)
        documents = documents.astype(jnp.int32)
        # 0 * NaN is NaN: what padding holds must not reach the products
        real = (documents > 0)[..., None]
        latent, key_rope = (jnp.where(real, x, jnp.zeros((), x.dtype)) for x in (latent, key_rope))
        query = jnp.where(real[..., None], query, jnp.zeros((), query.dtype))
    operands = _Operands(query, jnp.concatenate([latent, key_rope], axis=-1), kv_up.astype(latent.dtype))
    operands, documents = vary_alike((operands, documents))
    axes = (context_axis,) if isinstance(context_axis, str) else context_axis or ()
    pieces = 2 if axes and query.shape[1] % 2 == 0 else 1
    block = min(block_size, query.shape[1] // pieces)
    static = _Static(scale, axes, pieces, block, latent.shape[-1], own_dim)
    if pieces == 1:
        return _attend(operands, documents, static)
    operands = operands._replace(query=_trade_halves(operands.query, axes))
    return _trade_halves(_attend(operands, documents, static), axes)


def _trade_halves(x: Array, axes: tuple[str, ...]) -> Array:
    """The later halves of rows go to the rank as far from the last one as this is from the first, and back."""
    last = jax.lax.axis_size(axes) - 1
    first, second = jnp.split(x, 2, axis=1)
    second = jax.lax.ppermute(second, axes, [(rank, last - rank) for rank in range(last + 1)])
    return jnp.concatenate([first, second], axis=1)


class _Operands(NamedTuple):
    query: Float[Array, "batch seq heads dim"]
    cached: Float[Array, "batch seq rank_and_rope_dim"]  # latent and shared key
    kv_up: Float[Array, "heads expanded rank"]


@dataclasses.dataclass(frozen=True)
class _Static:
    scale: float
    axes: tuple[str, ...]  # none where rows are whole
    pieces: int  # in which the queries here follow one another
    block: int
    rank: int  # of the latent
    own_dim: int  # channels of a head's key that are its own


class _Keys(NamedTuple):
    """The whole rows, or one block of them."""

    start: Int[Array, "*blocks"]  # place of the first token in the row
    documents: Int[Array, "*blocks batch block"]
    cached: Float[Array, "*blocks batch block rank_and_rope_dim"]


class _Queries(NamedTuple):
    """What belongs to this rank's queries, in blocks."""

    start: Int[Array, "*blocks"]
    documents: Int[Array, "*blocks batch block"]
    query: Float[Array, "*blocks batch block heads dim"]


class _Kept(NamedTuple):
    """What the derivative has of each query beside the query itself."""

    d_output: Float[Array, "*blocks batch block heads value_dim"]
    mean: Float[Array, "*blocks batch block heads"]  # of the weights' cotangents, which is <d_output, output>
    log_total: Float[Array, "*blocks batch heads block"]


class _Sums(NamedTuple):
    """An unfinished softmax."""

    peak: Float[Array, "*blocks batch heads block"]
    total: Float[Array, "*blocks batch heads block"]
    output: Float[Array, "*blocks batch block heads value_dim"]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _attend(operands: _Operands, documents: Array, static: _Static) -> Array:
    return _attend_forward(operands, documents, static)[0]


def _attend_forward(operands: _Operands, documents: Array, static: _Static):
    queries, keys = _blocked(operands, documents, static)

    def with_block(sums: _Sums, keys: _Keys) -> _Sums:
        key, value = _expand(keys.cached, operands.kv_up, static)

        def step(_, both: tuple[_Queries, _Sums]):
            queries, sums = both
            merge = lambda sums: _merge(queries, keys, key, value, sums, static.scale)
            return None, jax.lax.cond(_may_see(queries, keys), merge, lambda sums: sums, sums)

        return jax.lax.scan(step, None, (queries, sums))[1]

    def over_keys(sums: _Sums, keys: _Keys):
        seen = jnp.any(jax.vmap(_may_see, (0, None))(queries, keys))
        return jax.lax.cond(seen, with_block, lambda sums, _: sums, sums, keys), None

    per_query = zeros_like(jnp.swapaxes(queries.query[..., 0], -1, -2).astype(jnp.float32))
    value_dim = operands.kv_up.shape[1] - static.own_dim
    output = jnp.broadcast_to(queries.query[..., :1], (*queries.query.shape[:-1], value_dim))
    sums = _Sums(per_query + MASKED, per_query, zeros_like(output.astype(jnp.float32)))
    sums, _ = jax.lax.scan(over_keys, sums, keys)
    total = jnp.where(sums.total > 0, sums.total, 1.0)
    output = sums.output / jnp.swapaxes(total, -1, -2)[..., None]
    output = _join_queries(output, operands.query.shape[1], static).astype(operands.cached.dtype)
    return output, (operands, documents, output, sums.peak + jnp.log(total))


def _attend_backward(static: _Static, residuals: tuple, d_output: Array):
    operands, documents, output, log_total = residuals
    queries, keys = _blocked(operands, documents, static)
    mean = jnp.sum(d_output.astype(jnp.float32) * output.astype(jnp.float32), axis=-1)
    kept = _Kept(_split_queries(d_output, static), _split_queries(mean, static), log_total)

    def with_block(sums: tuple[Array, ...], keys: _Keys):
        d_query, d_kv_up = sums
        expand = functools.partial(_expand, static=static)
        (key, value), expand_backward = jax.vjp(expand, keys.cached, operands.kv_up)

        def step(sums: tuple[Array, ...], block: tuple[_Queries, _Kept, Array]):
            queries, kept, d_query = block

            def add(sums: tuple[Array, ...]) -> tuple[Array, ...]:
                new = _merge_backward(queries, keys, key, value, kept, static.scale)
                return tuple(x + y for x, y in zip(sums, new, strict=True))

            d_query, *rest = jax.lax.cond(_may_see(queries, keys), add, lambda sums: sums, (d_query, *sums))
            return tuple(rest), d_query

        none = tuple(zeros_like(x.astype(jnp.float32)) for x in (key, value))
        d_expanded, d_query = jax.lax.scan(step, none, (queries, kept, d_query))
        d_cached, d_here = expand_backward(tuple(x.astype(key.dtype) for x in d_expanded))
        return (d_query, d_kv_up + d_here.astype(jnp.float32)), d_cached

    def over_keys(sums: tuple[Array, ...], keys: _Keys):
        seen = jnp.any(jax.vmap(_may_see, (0, None))(queries, keys))
        skip = lambda sums, keys: (sums, jnp.zeros_like(keys.cached))
        return jax.lax.cond(seen, with_block, skip, sums, keys)

    start = tuple(zeros_like(x.astype(jnp.float32)) for x in (queries.query, operands.kv_up))
    (d_query, d_kv_up), d_cached = jax.lax.scan(over_keys, start, keys)
    ranks, _ = _ranks(static)
    d_cached = _join_blocks(d_cached, operands.cached.shape[1] * ranks).astype(jnp.float32)
    if static.axes:
        d_cached = jax.lax.psum_scatter(d_cached, static.axes, scatter_dimension=1, tiled=True)
    d_operands = _Operands(_join_queries(d_query, operands.query.shape[1], static), d_cached, d_kv_up)
    return jax.tree.map(lambda x, like: x.astype(like.dtype), d_operands, operands), None


_attend.defvjp(_attend_forward, _attend_backward)


def _blocked(operands: _Operands, documents: Array, static: _Static) -> tuple[_Queries, _Keys]:
    """The queries here and the keys of the whole rows, cut into blocks."""
    ranks, rank = _ranks(static)
    seq = operands.query.shape[1]
    length = seq // static.pieces
    pieces = [rank * seq, (2 * ranks - 1 - 2 * rank) * length][: static.pieces]
    gather = lambda x: jax.lax.all_gather(x, static.axes, axis=1, tiled=True) if static.axes else x
    documents, cached = gather(documents), gather(operands.cached)
    own = jnp.concatenate([jax.lax.dynamic_slice_in_dim(documents, x, length, axis=1) for x in pieces], axis=1)
    starts = lambda length: jnp.arange(0, length, static.block, dtype=jnp.int32)
    places = jnp.concatenate([x + starts(length) for x in pieces])
    keys = (_split_blocks(x, static.block) for x in (documents, cached))
    queries = (_split_queries(x, static) for x in (own, operands.query))
    return _Queries(places, *queries), _Keys(starts(documents.shape[1]), *keys)


def _ranks(static: _Static) -> tuple[int, Int[Array, ""]]:
    """How many parts rows are split into, and which one is here."""
    if not static.axes:
        return 1, jnp.int32(0)
    return jax.lax.axis_size(static.axes), jax.lax.axis_index(static.axes)


def _split_queries(x: Shaped[Array, "batch seq ..."], static: _Static) -> Array:
    return jnp.concatenate([_split_blocks(piece, static.block) for piece in jnp.split(x, static.pieces, axis=1)])


def _join_queries(x: Shaped[Array, "blocks batch block ..."], seq: int, static: _Static) -> Array:
    pieces = jnp.split(x, static.pieces)
    return jnp.concatenate([_join_blocks(piece, seq // static.pieces) for piece in pieces], axis=1)


def _split_blocks(x: Shaped[Array, "batch seq ..."], size: int) -> Array:
    """As `blocks batch block ...`, zero-filled at the end."""
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % size)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)


def _join_blocks(x: Shaped[Array, "blocks batch block ..."], seq: int) -> Array:
    return jax.lax.collapse(jnp.moveaxis(x, 0, 1), 1, 3)[:, :seq]


def _expand(cached: Array, kv_up: Array, static: _Static) -> tuple[Array, Array]:
    """Keys and values of every head for one block."""
    latent, rope = jnp.split(cached, [static.rank], axis=-1)
    key, value = jnp.split(jnp.einsum("bkr,her->bkhe", latent, kv_up), [static.own_dim], axis=-1)
    shared = jnp.broadcast_to(rope[:, :, None], (*key.shape[:3], rope.shape[-1]))
    return jnp.concatenate([key, shared], axis=-1), value


def _may_see(queries: _Queries, keys: _Keys) -> Bool[Array, "*blocks"]:
    """Whether any query of a block may see any key of the other; documents are numbered in the order of the row."""
    first = jnp.min(jnp.where(queries.documents > 0, queries.documents, NO_DOCUMENT), axis=-1)
    shared = jnp.any(jnp.max(keys.documents, axis=-1) >= first, axis=-1)
    return shared & (keys.start < queries.start + queries.documents.shape[-1])


def _mask(queries: _Queries, keys: _Keys) -> Bool[Array, "batch 1 queries keys"]:
    place = jnp.arange(keys.documents.shape[-1], dtype=jnp.int32)
    causal = (queries.start + place)[:, None] >= keys.start + place
    same = queries.documents[:, :, None] == keys.documents[:, None, :]
    return (causal & same & (keys.documents > 0)[:, None, :])[:, None]


def _scores(queries: _Queries, key: Array, scale: float) -> Float[Array, "batch heads queries keys"]:
    return jnp.einsum("bqhd,bkhd->bhqk", queries.query, key, preferred_element_type=jnp.float32) * scale


def _merge(queries: _Queries, keys: _Keys, key: Array, value: Array, sums: _Sums, scale: float) -> _Sums:
    """The softmax with one more block of keys."""
    mask = _mask(queries, keys)
    scores = jnp.where(mask, _scores(queries, key, scale), MASKED)
    peak = jnp.maximum(sums.peak, jnp.max(scores, axis=-1))
    shrink = jnp.exp(sums.peak - peak)
    weights = jnp.where(mask, jnp.exp(scores - peak[..., None]), 0.0)
    new = jnp.einsum("bhqk,bkhd->bqhd", weights.astype(value.dtype), value, preferred_element_type=jnp.float32)
    total = sums.total * shrink + jnp.sum(weights, axis=-1)
    return _Sums(peak, total, sums.output * jnp.swapaxes(shrink, -1, -2)[..., None] + new)


def _merge_backward(queries: _Queries, keys: _Keys, key: Array, value: Array, kept: _Kept, scale: float):
    """What one block of keys and one of queries add to the cotangents of query, key and value."""
    scores = _scores(queries, key, scale)
    weights = jnp.where(_mask(queries, keys), jnp.exp(scores - kept.log_total[..., None]), 0.0)
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    d_value = product("bhqk,bqhd->bkhd", weights.astype(value.dtype), kept.d_output)
    d_weights = product("bqhd,bkhd->bhqk", kept.d_output, value)
    d_scores = weights * (d_weights - jnp.swapaxes(kept.mean, -1, -2)[..., None]) * scale
    d_scores = d_scores.astype(key.dtype)
    d_query = product("bhqk,bkhd->bqhd", d_scores, key)
    return d_query, product("bhqk,bqhd->bkhd", d_scores, queries.query), d_value
