"""The short convolution: against goldens, a plain loop, and itself in pieces."""

import json

import jax
import jax.numpy as jnp
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
    y, tail = short_convolution(low[0], low[1], window=low[2], segment_ids=jnp.asarray(ids), activation=None)
    assert_close(y, want, atol=1e-5)
    assert_close(tail, tails, atol=1e-6)


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
