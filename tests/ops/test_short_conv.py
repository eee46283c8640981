"""The short convolution: against goldens, a plain loop, and itself in pieces."""

import json

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers import DATA, assert_close
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from kimi_zoo.ops.short_conv import short_convolution

CASES = json.loads((DATA / "goldens" / "short_conv" / "golden.json").read_text())["cases"]


@pytest.mark.parametrize("name", CASES)
def test_goldens(name):
    data = load_file(DATA / "goldens" / "short_conv" / f"{name}.safetensors")
    inputs = {key[3:]: jnp.asarray(value) for key, value in data.items() if key.startswith("in.")}
    ids = inputs.pop("segment_ids", None)

    def run(x):
        return short_convolution(x["x"], x["weight"][:, 0], x.get("bias"), window=x.get("cache"), segment_ids=ids)

    (y, window), vjp = jax.vjp(run, inputs)
    assert_close(y, data["out.y"], rtol=1e-5, name="output")
    if "out.cache" in data:
        assert_close(window, data["out.cache"], rtol=1e-6, name="window")
    (grads,) = vjp((jnp.asarray(data["cot.y"]), jnp.zeros_like(window)))
    for key, value in grads.items():
        if f"grad.{key}" in data:
            assert_close(value, data[f"grad.{key}"], rtol=1e-5, atol=1e-6, name=key)


def naive(x, weight, window, ids):
    """Token by token: the last `width - 1` real tokens of the same document, in float64."""
    batch, seq, channels = x.shape
    width = weight.shape[1]
    y, tails = np.zeros(x.shape), np.zeros((batch, width - 1, channels))
    for row in range(batch):
        past, document = list(window[row]), None
        for t in range(seq):
            if ids[row, t] == 0:
                continue
            if document is not None and ids[row, t] != document:
                past = [np.zeros(channels)] * (width - 1)
            document = ids[row, t]
            past = [*past, x[row, t]]
            y[row, t] = sum(weight[:, j] * past[len(past) - width + j] for j in range(width))
            past = past[len(past) - width + 1 :]
        tails[row] = np.asarray(past).reshape(width - 1, channels)
    return y, tails


@jax.jit
def both(x, weight, window, ids, cotangents):
    """Output and window without activation, and the gradients."""

    def run(x, weight, window):
        return short_convolution(x, weight, window=window, segment_ids=ids, activation=None)

    outputs, pullback = jax.vjp(run, x, weight, window)
    return outputs, pullback(cotangents)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 8), st.lists(st.integers(0, 3), min_size=9, max_size=9), st.integers(0, 99))
def test_any_padding_and_any_documents(width, ids, seed):
    random = np.random.default_rng(seed)
    ids = np.stack([np.asarray(ids), random.permutation(ids)]).astype(np.int32)
    x, window = random.standard_normal((2, 9, 3)), random.standard_normal((2, width - 1, 3))
    weight = random.standard_normal((3, width))
    want, tails = naive(x, weight, window, ids)
    x = np.where((ids > 0)[..., None], x, np.nan)  # whatever padding holds
    low = [jnp.asarray(a, jnp.float32) for a in (x, weight, window)]
    d_y, d_tail = random.standard_normal(x.shape), random.standard_normal(window.shape)
    cotangents = tuple(jnp.asarray(a, jnp.float32) for a in (d_y, d_tail))
    (y, tail), (d_x, d_weight, d_window) = both(*low, jnp.asarray(ids), cotangents)
    assert_close(y, want, atol=1e-5)
    assert_close(tail, tails, atol=1e-6)

    # linear in (x, window) and in the weight: a gradient times a direction is the cotangent times the image of it
    x_way, window_way, weight_way = (random.standard_normal(a.shape) for a in (x, window, weight))
    moved, moved_tails = naive(x_way, weight, window_way, ids)
    assert_close(
        np.vdot(d_x, x_way) + np.vdot(d_window, window_way),
        np.vdot(d_y, moved) + np.vdot(d_tail, moved_tails),
        atol=1e-4,
    )
    assert_close(np.vdot(d_weight, weight_way), np.vdot(d_y, naive(x, weight_way, window, ids)[0]), atol=1e-4)


def test_padding_takes_no_gradient():
    x = jnp.ones((1, 6, 2)).at[0, 2].set(jnp.nan)
    ids = jnp.asarray([[1, 1, 0, 1, 2, 0]])
    grad = jax.grad(lambda x: short_convolution(x, jnp.ones((2, 3)), segment_ids=ids)[0].sum())(x)
    assert bool(jnp.isfinite(grad).all()) and not jnp.any(grad[0, 2]) and not jnp.any(grad[0, 5])


def test_bfloat16_sums_in_float32():
    x = jnp.ones((1, 4, 1), jnp.bfloat16)
    weight = jnp.asarray([[2.0**-9, 2.0**-9, 2.0**-9, 1.0]], jnp.bfloat16)
    y, _ = short_convolution(x, weight, activation=None)
    assert y.dtype == jnp.bfloat16 and float(y[0, 3, 0]) == 1.0078125


def test_empty_rows_and_bad_arguments():
    y, window = short_convolution(jnp.ones((2, 0, 3)), jnp.ones((3, 4)))
    assert y.shape == (2, 0, 3) and not jnp.any(window)
    with pytest.raises(ValueError, match=r"expected \(2, 3, 3\), got \(2, 2, 3\)"):
        short_convolution(jnp.ones((2, 5, 3)), jnp.ones((3, 4)), window=jnp.ones((2, 2, 3)))
    with pytest.raises(ValueError, match="'gelu'"):
        short_convolution(jnp.ones((2, 5, 3)), jnp.ones((3, 4)), activation="gelu")


def _everything(x, weight, bias, window, ids):
    y, tail = short_convolution(x, weight, bias, window=window, segment_ids=ids)
    return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(tail))


def _plain(x, weight, bias, window, ids):
    """The same, differentiated by JAX alone."""
    y, tail = short_convolution(x, weight, window=window, segment_ids=ids, activation=None)
    y = jnp.where((ids > 0)[..., None], jax.nn.silu(y + bias), 0.0)
    return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(tail))


def _inputs(getkey, batch=4, seq=11, channels=3, width=4):
    shapes = ((batch, seq, channels), (channels, width), (channels,), (batch, width - 1, channels))
    ids = np.tile([1, 1, 0, 1, 2, 2, 0, 0, 3, 3, 0], (batch, 1)).astype(np.int32)
    ids[0] = 1 + (np.arange(seq) > 5)
    return [jr.normal(getkey(), shape) for shape in shapes], jnp.asarray(ids)


def test_transformations_give_the_same_gradient(getkey):
    args, ids = _inputs(getkey)
    grad = jax.jit(jax.grad(_everything, (0, 1, 2, 3)))
    want = grad(*args, ids)
    assert_close(want, jax.jit(jax.grad(_plain, (0, 1, 2, 3)))(*args, ids), rtol=1e-5, atol=1e-5)
    assert_close(jax.jit(jax.grad(jax.checkpoint(_everything), (0, 1, 2, 3)))(*args, ids), want, rtol=1e-6, atol=1e-6)

    rows = jax.jit(jax.vmap(lambda x, window, ids: grad(x[None], *args[1:3], window[None], ids[None])))
    d_x, d_weight, d_bias, d_window = rows(args[0], args[3], ids)
    summed = (d_x[:, 0], d_weight.sum(0), d_bias.sum(0), d_window[:, 0])
    assert_close(summed, want, rtol=1e-5, atol=1e-5)

    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded, whole = jax.P("data"), jax.P()
    specs = (sharded, whole, whole, sharded)
    mapped = jax.shard_map(grad, mesh=mesh, in_specs=(*specs, sharded), out_specs=specs, check_vma=True)
    assert_close(jax.jit(mapped)(*args, ids), want, rtol=1e-5, atol=1e-5)


def test_gradient_of_a_gradient(getkey):
    args, ids = _inputs(getkey)

    def twice(function):
        penalty = lambda args: sum(jnp.sum(g**2) for g in jax.grad(lambda args: function(*args, ids))(args))
        return jax.jit(jax.grad(penalty))(args)

    assert_close(twice(_everything), twice(_plain), rtol=1e-4, atol=1e-4)


def test_only_the_inputs_are_kept():
    x, weight = jnp.ones((2, 64, 32)), jnp.ones((32, 4))
    _, pullback = jax.vjp(lambda x, weight: short_convolution(x, weight)[0], x, weight)
    assert sum(leaf.size for leaf in jax.tree.leaves(pullback)) <= 1.1 * x.size


@pytest.mark.parametrize("ids", [None, [1, 1, 1, 2, 2, 2], [1, 1, 0, 1, 2, 2]])
def test_forward_mode_over_reverse(getkey, ids):
    """A product of Hessian and vector: the gradient's derivative along a direction, by difference quotients."""
    x, direction = jr.normal(getkey(), (1, 6, 3)), jr.normal(getkey(), (1, 6, 3))
    weight = jr.normal(getkey(), (3, 4))
    ids = None if ids is None else jnp.asarray([ids])
    gradient = jax.grad(lambda x: jnp.sum(jnp.sin(short_convolution(x, weight, segment_ids=ids)[0])))
    _, product = jax.jvp(gradient, (x,), (direction,))
    step = 1e-2
    expected = (gradient(x + step * direction) - gradient(x - step * direction)) / (2 * step)
    assert_close(product, expected, atol=1e-2, rtol=1e-2)
