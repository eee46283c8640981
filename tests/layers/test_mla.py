"""Latent attention: decoding against whole rows, options, rotary embeddings."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers import assert_close

import kimi_zoo as kz

YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 2.0,
    "beta_slow": 0.5,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
ROPES = {
    "none": None,
    "interleaved": kz.Rope(100.0, interleaved=True),
    "half_split": kz.Rope(100.0, interleaved=False),
    "yarn": kz.Rope(100.0, interleaved=True, scaling=YARN),
}


def make(key, **options):
    sizes = dict(kv_lora_rank=10, qk_nope_head_dim=7, qk_rope_head_dim=4, v_head_dim=6)
    return kz.MultiHeadLatentAttention(16, 3, **sizes | options, key=key)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize(
    "options", [{}, {"q_lora_rank": 5, "output_gate": "head_wise"}, {"output_gate": "element_wise"}]
)
def test_decoding_on_latents_equals_whole_rows(getkey, rope, options):
    layer = make(getkey(), rope=ROPES[rope], **options)
    x = jr.normal(getkey(), (2, 10, 16))
    positions = jnp.broadcast_to(jnp.arange(10), (2, 10))
    cache, outputs, start = layer.init_cache(2, 12, jnp.float32), [], 0
    for piece in (6, 1, 3):
        part = slice(start, start + piece)
        y, cache = layer.extend(
            x[:, part],
            cache,
            lengths=jnp.full(2, start),
            positions=positions[:, part],
            real=jnp.ones((2, piece), bool),
        )
        outputs.append(y)
        start += piece
    assert_close(jnp.concatenate(outputs, axis=1), layer(x, positions=positions), atol=1e-5)
    assert cache.latent.shape == (2, 12, 10) and cache.key_rope.shape == (2, 12, 4)
    assert not jnp.any(cache.latent[:, 10:])


@pytest.mark.parametrize("rope", ["interleaved", "half_split", "yarn"])
def test_rotation_makes_scores_depend_on_distance_alone(getkey, rope):
    layer = make(getkey(), rope=ROPES[rope])
    x = jr.normal(getkey(), (1, 6, 16))
    positions = jnp.arange(6)[None]
    assert_close(layer(x, positions=positions + 5), layer(x, positions=positions), atol=1e-5)
    assert float(jnp.abs(layer(x, positions=positions * 2) - layer(x, positions=positions)).max()) > 1e-3


def test_segments_and_padding(getkey):
    layer = make(getkey())
    x = jr.normal(getkey(), (1, 9, 16)).at[:, 4].set(jnp.nan)
    ids = jnp.asarray([[1, 1, 1, 1, 0, 2, 2, 2, 2]])
    positions = jnp.zeros((1, 9), jnp.int32)
    run = eqx.filter_jit(lambda x, ids: layer(x, positions=positions[:, : x.shape[1]], segment_ids=ids))
    y = run(x, ids)
    for part in (slice(0, 4), slice(5, 9)):
        assert_close(y[:, part], run(x[:, part], None), atol=1e-5)
    assert not jnp.any(y[:, 4])


def test_long_rows_in_blocks_equal_one_block(getkey):
    from kimi_zoo.ops.attention import causal_attention

    q, k = (jr.normal(getkey(), (2, 40, 3, 5)) for _ in range(2))
    v = jr.normal(getkey(), (2, 40, 3, 4))
    ids = jnp.asarray([[1] * 11 + [2] * 20 + [0] * 9, [1] * 40])
    whole = lambda *args: causal_attention(*args, scale=0.3, segment_ids=ids, block_size=64)
    for block_size in (16, 4, 2):
        parts = lambda *args: causal_attention(*args, scale=0.3, segment_ids=ids, block_size=block_size)
        expected, expected_vjp = jax.vjp(whole, q, k, v)
        actual, actual_vjp = jax.vjp(parts, q, k, v)
        assert_close(actual, expected, atol=1e-6)
        assert_close(actual_vjp(expected), expected_vjp(expected), atol=1e-5)


@pytest.mark.parametrize("block_size", [64, 16, 5])
def test_keys_expanded_block_by_block(getkey, block_size):
    """Long rows on one device: output and every gradient, with documents and padding, blocks that divide or do not."""
    from kimi_zoo.ops.attention import causal_attention
    from kimi_zoo.ops.blockwise_attention import blockwise_attention

    shapes = {"query": (2, 40, 3, 7), "latent": (2, 40, 6), "key_rope": (2, 40, 2), "kv_up": (3, 9, 6)}
    arrays = {name: jr.normal(getkey(), shape) for name, shape in shapes.items()}
    ids = jnp.asarray([[1] * 11 + [0] * 3 + [2] * 17 + [0] * 9, [1] * 40])

    def whole(query, latent, key_rope, kv_up):
        key, value = jnp.split(jnp.einsum("btr,her->bthe", latent, kv_up), [5], axis=-1)
        shared = jnp.broadcast_to(key_rope[:, :, None], (2, 40, 3, 2))
        return causal_attention(query, jnp.concatenate([key, shared], -1), value, scale=0.3, segment_ids=ids)

    blocks = lambda **arrays: blockwise_attention(**arrays, scale=0.3, segment_ids=ids, block_size=block_size)
    expected, expected_vjp = jax.vjp(lambda arrays: whole(**arrays), arrays)
    actual, actual_vjp = jax.vjp(lambda arrays: blocks(**arrays), arrays)
    assert_close(actual, expected, rtol=2e-6)
    assert_close(actual_vjp(expected), expected_vjp(expected), rtol=5e-6)


def test_long_rows_take_the_form_for_them(getkey, monkeypatch):
    layer, x = make(getkey()), jr.normal(getkey(), (1, 9, 16))
    run = lambda x: layer(x, positions=jnp.arange(9)[None], segment_ids=jnp.asarray([[1] * 4 + [2] * 5]))
    expected = run(x)
    monkeypatch.setattr("kimi_zoo.layers.mla.SHORT_ROW", 8)
    assert "while" in str(jax.make_jaxpr(run)(x)) or "scan" in str(jax.make_jaxpr(run)(x))
    assert_close(run(x), expected, rtol=2e-6)


def test_cache_read_in_blocks(getkey):
    """More cached tokens than a block holds, rows of different length, a capacity that blocks do not divide."""
    from kimi_zoo.ops.attention import latent_attention

    layer = make(getkey())
    x = jr.normal(getkey(), (2, 20, 16))
    positions = jnp.zeros((2, 20), jnp.int32)
    lengths = jnp.asarray([17, 9])
    cache = layer.init_cache(2, 19, jnp.float32)
    real = jnp.arange(17) < lengths[:, None]
    _, cache = layer.extend(x[:, :17], cache, lengths=jnp.zeros(2, jnp.int32), positions=positions[:, :17], real=real)
    one = lambda size: latent_attention(
        *(jr.normal(jr.key(i), (2, 1, 3, d)) for i, d in enumerate((11, 11, 6, 10, 4))),
        cache.latent,
        cache.key_rope,
        jr.normal(jr.key(9), (3, 6, 10)),
        lengths=lengths,
        real=jnp.ones((2, 1), bool),
        scale=0.3,
        block_size=size,
    )
    for size in (1, 4, 7, 18):
        assert_close(one(size), one(64), atol=1e-5, name=str(size))


def test_pads_do_not_enter_the_cache(getkey):
    layer = make(getkey())
    x = jr.normal(getkey(), (1, 5, 16)).at[:, 3:].set(jnp.nan)
    real = jnp.asarray([[True, True, True, False, False]])
    y, cache = layer.extend(
        x,
        layer.init_cache(1, 4, jnp.float32),
        lengths=jnp.zeros(1, jnp.int32),
        positions=jnp.zeros((1, 5), jnp.int32),
        real=real,
    )
    assert bool(jnp.isfinite(cache.latent).all()) and not jnp.any(cache.latent[:, 3])
    assert_close(y[:, :3], layer(x[:, :3], positions=jnp.zeros((1, 3), jnp.int32)), atol=1e-5)


def test_yarn_at_its_ends():
    """Fast rotations keep their frequency, slow ones are slowed `factor` times (arXiv:2309.00071)."""
    from kimi_zoo.ops.rope import rope_frequencies, yarn_mscale

    scaling = {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
    plain, one = rope_frequencies(64, 10000.0)
    scaled, concentration = rope_frequencies(64, 10000.0, scaling)
    assert one == 1.0 and concentration == pytest.approx(0.1 * np.log(40.0) + 1.0)
    assert scaled[0] == plain[0] and scaled[-1] == pytest.approx(plain[-1] / 40)
    assert (np.diff(scaled / plain) <= 1e-7).all()
    assert yarn_mscale(1.0, 1.0) == 1.0
    for bad, message in (
        ({"type": "linear", "factor": 2.0}, "type 'linear' is not known"),
        ({"type": "yarn", "factor": 2.0}, "needs original_max_position_embeddings"),
    ):
        with pytest.raises(ValueError, match=message):
            rope_frequencies(64, 10000.0, bad)
    with pytest.raises(ValueError, match="must be even, got 7"):
        rope_frequencies(7, 10000.0)


def test_bad_options(getkey):
    with pytest.raises(ValueError, match="`kv_lora_rank` must be at least 1; got 0"):
        make(getkey(), kv_lora_rank=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"qk_rope_head_dim": -1}, "`qk_rope_head_dim` must be at least 0; got -1"),
        ({"q_lora_rank": 0}, "`q_lora_rank` must be at least 1; got 0"),
        ({"kv_lora_rank": 2.0}, r"`kv_lora_rank` must be a whole number; got 2\.0"),
        ({"std": -1.0}, "`std` must be a finite number >= 0"),
        ({"latent_norm_eps": float("inf")}, "`eps` of a norm must be a finite number"),
    ],
)
def test_sizes_that_make_no_layer(unchecked, getkey, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make(getkey(), **options)


def test_inputs_without_a_batch_axis(unchecked, getkey):
    with pytest.raises(ValueError, match=r"The input needs the axes .*got shape \(5, 16\)"):
        make(getkey())(jnp.ones((5, 16)), positions=jnp.zeros((1, 5), jnp.int32))


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
def test_empty_batches_and_rows(getkey, shape):
    layer, x, positions = (
        make(getkey(), output_gate="element_wise"),
        jnp.ones((*shape, 16)),
        jnp.zeros(shape, jnp.int32),
    )
    cache = layer.init_cache(shape[0], 8, jnp.float32)
    assert layer(x, positions=positions, segment_ids=positions).shape == x.shape
    lengths, real = jnp.full(shape[0], 3), positions > 0
    output, after = layer.extend(x, cache, lengths=lengths, positions=positions, real=real)
    assert output.shape == x.shape and after.latent.shape == cache.latent.shape
