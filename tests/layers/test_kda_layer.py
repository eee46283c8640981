"""The KDA layer: against Megatron's module, its initialisation, its options, its cache."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers import DATA, assert_close
from safetensors.numpy import load_file

import kimi_zoo as kz
from kimi_zoo.checkpoints.blocks import Computed, whole
from kimi_zoo.checkpoints.megatron_sections import cut_rank
from kimi_zoo.checkpoints.rows import get_leaf
from kimi_zoo.checkpoints.tables import kimi_linear, megatron

CASES = json.loads((DATA / "kda_module" / "cases.json").read_text())


def from_megatron(case, state):
    """A layer with the weights of Megatron's module, as a conversion takes them: by the rows of both tables."""
    rank = "low_rank" if case["two_stage_gates"] else "direct"
    layer = kz.KimiDeltaAttention(
        case["hidden"],
        case["heads"],
        case["head_dim"],
        conv_size=case["conv"],
        decay_gate=rank,
        output_gate=rank,
        safe_gate=case["safe_gate"],
        lower_bound=case["lower_bound"],
        norm_eps=case["eps"],
        key=jr.key(0),
    )
    config = kz.KimiLinearConfig(
        hidden_size=case["hidden"],
        linear_num_heads=case["heads"],
        linear_head_dim=case["head_dim"],
        linear_conv_kernel_dim=case["conv"],
        kda_decay_gate=rank,
        kda_output_gate=rank,
    )
    leaves = {row.names[0]: row.leaf.removeprefix("mixer.") for row in kimi_linear.kda_rows(config)}

    def spread(layer, tensors):
        left = dict(tensors)
        for row in megatron.attention_rows(config, "kda")[1:]:  # the first is the norm before the layer
            array = left.pop(row.name.removeprefix("self_attention."))
            source = whole(Computed(array.shape, array.dtype, lambda array=array: array))
            sections, _ = cut_rank(source, row, megatron.dimensions(config), 1)
            for section, part in zip(row.sections, sections, strict=True):
                where = lambda m, path=leaves[section.published]: get_leaf(m, path)
                layer = eqx.tree_at(where, layer, jnp.asarray(part.read()).reshape(where(layer).shape))
        assert set(left) <= {"x"}  # gradients have that of the input too
        return layer

    return spread(layer, state), spread


@pytest.mark.parametrize("name", CASES)
def test_equals_megatrons_module(name):
    """Within the 1e-4 of max |y| that the data's README states for float32; gradients within 5e-4 of theirs."""
    data = load_file(DATA / "kda_module" / f"{name}.safetensors")
    part = lambda prefix: {key[len(prefix) :]: value for key, value in data.items() if key.startswith(prefix)}
    layer, spread = from_megatron(CASES[name], part("state."))
    x, dy = (jnp.swapaxes(jnp.asarray(data[key]), 0, 1) for key in ("x", "dy"))

    @eqx.filter_jit
    def run(layer, x):
        output, vjp = eqx.filter_vjp(lambda layer, x: layer(x), layer, x)
        return output, vjp(dy)

    output, (grads, grad_x) = run(layer, x)
    assert_close(output, np.swapaxes(data["y"], 0, 1), rtol=1e-4, name="output")
    assert_close(grad_x, np.swapaxes(data["grad.x"], 0, 1), rtol=5e-4, name="x")
    expected = spread(jax.tree.map(jnp.zeros_like, grads), part("grad."))
    for (path, want), got in zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(grads), strict=True):
        assert_close(got, want, rtol=5e-4, atol=1e-5, name=jax.tree_util.keystr(path))


def test_initial_distributions(getkey):
    """Against the quantiles of Megatron's own draws; the spread between two draws of this size is below 0.1."""
    reference = json.loads((DATA / "kda_module" / "init_statistics.json").read_text())
    layer = kz.KimiDeltaAttention(4, 2048, 16, conv_size=0, key=getkey())
    for name, values in (("A_log", layer.a_log), ("dt_bias", layer.dt_bias)):
        values = np.asarray(values, np.float64).reshape(-1)
        assert np.isfinite(values).all()
        for quantile, want in reference[name]["quantiles"].items():
            assert abs(np.quantile(values, float(quantile)) - want) < 0.1, (name, quantile)
    low, high = float(jnp.exp(layer.a_log).min()), float(jnp.exp(layer.a_log).max())
    assert low >= 1 and high <= 16
    step = jax.nn.softplus(layer.dt_bias)
    assert float(step.min()) >= 1e-3 * 0.999 and float(step.max()) <= 0.1 * 1.001


def test_initial_decay_is_finite_for_many_heads(getkey):
    layer = kz.KimiDeltaAttention(1, 100_000, 1, conv_size=0, key=getkey())
    assert layer.a_log.dtype == jnp.float32 and bool(jnp.isfinite(layer.a_log).all())


@pytest.mark.parametrize("width", [0, 1, 2, 6])
@pytest.mark.parametrize("bias", [False, True])
def test_cache_continues_for_any_convolution(getkey, width, bias):
    options = dict(conv_bias=bias, conv_init=0.3) if width else {}
    layer = kz.KimiDeltaAttention(6, 2, 3, conv_size=width, bias=bias, **options, key=getkey())
    x = jr.normal(getkey(), (2, 9, 6))
    real = jnp.ones((2, 9), bool)
    extend = eqx.filter_jit(lambda x, cache, real: layer.extend(x, cache, real=real))
    first, cache = extend(x[:, :2], layer.init_cache(2, jnp.float32), real[:, :2])
    rest, cache = extend(x[:, 2:8], cache, real[:, 2:8])
    last, cache = extend(x[:, 8:], cache, real[:, 8:])
    assert_close(jnp.concatenate([first, rest, last], axis=1), layer(x), atol=1e-5)
    assert (layer.query_conv is None) == (width == 0)


def test_initial_convolution_range(getkey):
    layer = kz.KimiDeltaAttention(8, 4, 16, conv_size=4, conv_init=0.01, key=getkey())
    assert float(jnp.abs(layer.key_conv.weight).max()) <= 0.01
    default = kz.ShortConvolution(512, 4, key=getkey())
    assert 0.45 < float(jnp.abs(default.weight).max()) <= 0.5


def test_l2_normalisation_makes_the_keys_scale_irrelevant(getkey):
    key = getkey()
    x = jr.normal(getkey(), (1, 5, 6))
    for normalised in (True, False):
        layer = kz.KimiDeltaAttention(6, 2, 3, conv_size=0, use_qk_l2norm=normalised, key=key)
        scaled = eqx.tree_at(lambda m: m.key_proj.weight, layer, 50 * layer.key_proj.weight)
        assert np.allclose(layer(x), scaled(x), atol=1e-2) == normalised


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"safe_gate": True}, r"needs a `lower_bound` in \[-5, 0\); got None"),
        ({"safe_gate": True, "lower_bound": -5.5}, "got -5.5"),
        ({"safe_gate": True, "lower_bound": 0.0}, "got 0.0"),
        ({"safe_gate": True, "lower_bound": float("nan")}, "got nan"),
        ({"conv_size": -1}, "`conv_size` must be at least 0; got -1"),
        ({"conv_size": 2.5}, "`conv_size` must be a whole number; got 2.5"),
        ({"conv_size": 0, "conv_bias": True}, "`conv_size=0` leaves the convolutions out"),
        ({"conv_size": 0, "conv_init": 0.1}, r"`conv_init=0\.1` would have no effect"),
        ({"norm_eps": float("nan")}, "`eps` of a norm must be a finite number above 0; got nan"),
        ({"std": float("nan")}, "`std` must be a finite number >= 0 or None; got nan"),
        ({"A_init_range": (0.0, 16.0)}, "`A_init_range` must be finite"),
        ({"A_init_range": (1.0, float("inf"))}, "`A_init_range` must be finite"),
        ({"conv_init": float("nan")}, "`conv_init` must be a finite number"),
        ({"decay_gate": "medium"}, "`decay_gate` is"),
    ],
)
def test_bad_options_are_errors(unchecked, getkey, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        kz.KimiDeltaAttention(8, 2, 4, key=getkey(), **options)


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        (0, "must be at least 1; got 0"),
        (2.0, r"must be a whole number; got 2\.0"),
        ("2", "must be a whole number; got '2'"),
    ],
)
def test_bad_sizes_are_errors(unchecked, getkey, heads, message):
    with pytest.raises((ValueError, TypeError), match=f"`num_heads` {message}"):
        kz.KimiDeltaAttention(8, heads, 4, key=getkey())


def test_inputs_without_a_batch_axis_are_named(unchecked, getkey):
    layer = kz.KimiDeltaAttention(8, 2, 4, key=getkey())
    for call in (layer, lambda x: layer.extend(x, layer.init_cache(1, jnp.float32))):
        with pytest.raises(ValueError, match=r"axes \[batch, seq, hidden_size\], also for one row .*\(5, 8\)"):
            call(jnp.ones((5, 8)))


@pytest.mark.parametrize("shape", [(0, 5, 8), (2, 0, 8)])
def test_nothing_in_nothing_out(getkey, shape):
    layer = kz.KimiDeltaAttention(8, 2, 4, key=getkey())
    cache = layer.init_cache(shape[0], jnp.float32)
    for ids in (None, jnp.ones(shape[:2], jnp.int32)):
        assert layer(jnp.ones(shape), segment_ids=ids).shape == shape
        output, after = layer.extend(jnp.ones(shape), cache, real=None if ids is None else ids > 0)
        assert output.shape == shape and all(map(np.array_equal, jax.tree.leaves(after), jax.tree.leaves(cache)))


def test_a_bound_without_the_safe_gate_warns(getkey):
    with pytest.warns(UserWarning, match="has no effect while the safe gate is off"):
        layer = kz.KimiDeltaAttention(8, 2, 4, lower_bound=-5.0, key=getkey())
    assert layer.lower_bound is None
