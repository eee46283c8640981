"""KDA and MLA layers on rows and heads that are split across devices equal the layers on one."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers import assert_close
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import kimi_zoo as kz
from kimi_zoo.ops.attention import causal_attention
from kimi_zoo.ops.blockwise_attention import blockwise_attention

HEADS_FIRST = P("tensor")
OUTPUT = P(None, "tensor")
# segment ids of rows of 16 tokens: documents over several parts, a split at 8 and beside it, padding in all places
IDS = [
    [1] * 16,
    [1] * 8 + [2] * 8,
    [1] * 7 + [2] * 9,
    [0] * 5 + [1] * 2 + [0] * 4 + [1] * 2 + [2] * 3,
    [1] * 3 + [2] * 11 + [0] * 2,
]


def mesh_of(**axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def specs_of(layer):
    """Heads over `tensor`, everything that heads share on all devices."""

    def spec(path, leaf):
        name = jax.tree_util.keystr(path)
        if "output_proj" in name:
            return OUTPUT
        shared = any(part in name for part in (".down.", "kv_down", "norm"))
        return P() if shared else HEADS_FIRST

    return jax.tree_util.tree_map_with_path(spec, layer)


def call(layer, x, ids, positions, **split):
    positions = dict(positions=positions) if isinstance(layer, kz.MultiHeadLatentAttention) else {}
    return layer(x, segment_ids=ids, **positions, **split)


@eqx.filter_jit
def with_gradients(function, parameters, x, ids, positions, d_output):
    output, pullback = jax.vjp(lambda parameters, x: function(parameters, x, ids, positions), parameters, x)
    return output, pullback(d_output)


def check(layer, axes, rows, **split):
    """Output and gradients of all parameters and of the input; rows are split over the mesh axes `rows`."""
    ids = jnp.asarray(IDS, jnp.int32)
    x, d_output = (jr.normal(jr.key(n), (*ids.shape, 16)) for n in (1, 2))
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    parameters, rest = eqx.partition(layer, eqx.is_array)

    def on_ranks(parameters, *inputs):
        output = call(eqx.combine(parameters, rest), *inputs, **split)
        return jax.lax.psum(output, "tensor") if "tensor" in axes else output

    tokens = P(None, rows)
    in_specs = (specs_of(parameters) if "tensor" in axes else P(), tokens, tokens, tokens)
    mapped = jax.shard_map(on_ranks, mesh=mesh_of(**axes), in_specs=in_specs, out_specs=tokens)
    actual, gradients = with_gradients(mapped, parameters, x, ids, positions, d_output)
    expected, wanted = with_gradients(eqx.Partial(on_one_device, rest), parameters, x, ids, positions, d_output)
    assert_close(actual, expected, rtol=2e-6, name="output")
    assert_close(gradients, wanted, rtol=5e-6, name="gradients")


def on_one_device(rest, parameters, *inputs):
    return call(eqx.combine(parameters, rest), *inputs)


KDA_WAYS = {
    "heads": (dict(expert=4), ("expert",), dict(head_axis="expert")),
    "both": (dict(a=2, b=4), ("a", "b"), dict(context_axis="a", head_axis="b")),
    "both, with shares of the heads": (
        dict(tensor=2, expert=2, b=2),
        ("expert", "b"),
        dict(context_axis="expert", head_axis="b"),
    ),
}


@pytest.mark.parametrize("way", KDA_WAYS)
def test_kda(way):
    axes, rows, names = KDA_WAYS[way]
    layer = kz.KimiDeltaAttention(16, 4, 6, conv_bias=True, key=jr.key(0))
    check(layer, axes, rows, **names)


@pytest.mark.parametrize(
    "axes, options",
    [
        (dict(tensor=2, a=2, b=2), dict(output_gate="head_wise", q_lora_rank=5)),
        (dict(expert=4), dict(output_gate="element_wise")),
    ],
)
def test_mla(axes, options):
    sizes = dict(kv_lora_rank=10, qk_nope_head_dim=7, qk_rope_head_dim=4, v_head_dim=6)
    layer = kz.MultiHeadLatentAttention(16, 4, rope=kz.Rope(100.0, interleaved=True), **sizes, **options, key=jr.key(0))
    rows = tuple(name for name in axes if name != "tensor")
    check(layer, axes, rows, context_axis=rows if len(rows) > 1 else rows[0])


@pytest.mark.parametrize("packed", [True, False])
def test_attention_in_blocks(packed):
    """Several blocks on each rank, the last one not full; NaN at padding; parts of even and of odd length."""
    rng = np.random.default_rng(0)
    batch, seq, heads, rank, rope_dim = 5, 32 if packed else 20, 3, 6, 2
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    inputs = (
        normal(batch, seq, heads, 7),
        normal(batch, seq, rank),
        normal(batch, seq, rope_dim),
        normal(heads, 9, rank),
    )
    ids = jnp.repeat(jnp.asarray(IDS, jnp.int32), 2, axis=1) if packed else None
    d_output = normal(batch, seq, heads, 4)

    def alone(query, latent, key_rope, kv_up, ids):
        own, value = jnp.split(jnp.einsum("bkr,her->bkhe", latent, kv_up), [5], axis=-1)
        shared = jnp.broadcast_to(key_rope[:, :, None], (batch, seq, heads, rope_dim))
        return causal_attention(query, jnp.concatenate([own, shared], axis=-1), value, scale=0.4, segment_ids=ids)

    def split(query, latent, key_rope, kv_up, ids):
        options = dict(scale=0.4, context_axis="expert", block_size=3)
        return blockwise_attention(query, latent, key_rope, kv_up, segment_ids=ids, **options)

    tokens = P(None, "expert")
    specs = (tokens, tokens, tokens, P(), tokens)
    mapped = jax.shard_map(split, mesh=mesh_of(expert=4), in_specs=specs, out_specs=tokens)

    def with_gradients(function, inputs):
        @jax.jit
        def both(inputs, ids):
            output, pullback = jax.vjp(lambda *inputs: function(*inputs, ids), *inputs)
            return output, pullback(d_output)

        return both(inputs, ids)

    expected = with_gradients(alone, inputs)
    if packed:
        hide = lambda x: jnp.where((ids > 0).reshape(batch, seq, *[1] * (x.ndim - 2)), x, jnp.nan)
        inputs = (*map(hide, inputs[:3]), inputs[3])
    assert_close(with_gradients(mapped, inputs), expected, rtol=5e-6)


def test_heads_that_cannot_be_divided():
    layer = kz.KimiDeltaAttention(16, 3, 4, key=jr.key(0))
    call = functools.partial(layer, head_axis="expert")
    mapped = jax.shard_map(call, mesh=mesh_of(expert=2), in_specs=P(None, "expert"), out_specs=P(None, "expert"))
    with pytest.raises(
        ValueError, match="3 heads of a KDA layer cannot be divided over the 2 ranks of `head_axis='expert'`"
    ):
        mapped(jnp.ones((1, 4, 16)))
