"""The short convolution over rows that are split across devices equals the one on whole rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from context_cases import (
    AXIS,
    ROWS,
    SEQ,
    TOKENS,
    any_rows,
    collectives,
    hide_padding,
    mesh_of,
    over_ranks,
    random_like,
    rows_of_ids,
    with_gradients,
)
from helpers import assert_close
from hypothesis import given, settings
from jax.sharding import PartitionSpec as P

from kimi_zoo.ops.short_conv import short_convolution

WIDTH = 4
PARAMETERS = dict(weight=P(), bias=P(), window=P())


def convolve(inputs, ids=None, **options):
    inputs = dict(inputs)
    return short_convolution(inputs.pop("x"), inputs.pop("weight"), segment_ids=ids, **inputs, **options)


@functools.cache
def on_ranks(ranks, packed):
    specs = (dict(x=TOKENS, **PARAMETERS), *([TOKENS] if packed else []))
    return with_gradients(over_ranks(convolve, ranks, specs, (TOKENS, P())))


on_one_device = with_gradients(convolve)


def check(ranks, ids, seq=SEQ, batch=None):
    batch = len(ids) if batch is None else batch
    shapes = dict(x=(batch, seq, 3), weight=(3, WIDTH), bias=(3,), window=(batch, WIDTH - 1, 3))
    inputs = random_like({name: np.empty(shape, np.float32) for name, shape in shapes.items()})
    rest = () if ids is None else (ids,)
    if ids is not None:
        inputs["x"] = hide_padding(inputs["x"], ids)
    cotangents = random_like(jax.eval_shape(convolve, inputs, *rest))
    actual = on_ranks(ranks, ids is not None)(inputs, *rest, cotangents)
    assert_close(actual, on_one_device(inputs, *rest, cotangents), rtol=2e-6)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_packed_rows(ranks):
    check(ranks, rows_of_ids(ROWS))


@pytest.mark.parametrize("seq", [8, 16])
def test_parts_shorter_than_the_window(seq):
    """1 and 2 tokens on a rank; the window reaches over as many ranks as it takes."""
    check(8, rows_of_ids(ROWS, seq), seq)


@pytest.mark.parametrize("ranks, seq", [(4, SEQ), (8, 16)])
def test_whole_documents(ranks, seq):
    check(ranks, None, seq, batch=2)


@settings(max_examples=10, deadline=None)
@given(any_rows)
def test_any_documents(rows):
    check(8, rows_of_ids(rows))


def test_one_exchange():
    """Without segment ids, width - 1 tokens from the neighbour; with them log2 many; no window that nobody reads."""

    def exchanged(ids):
        f = lambda x, *ids: short_convolution(
            x, jnp.ones((3, WIDTH)), None, segment_ids=(*ids, None)[0], context_axis=AXIS
        )[0]
        specs = (TOKENS,) * (2 if ids else 1)
        mapped = jax.shard_map(f, mesh=mesh_of(**{AXIS: 8}), in_specs=specs, out_specs=TOKENS)
        args = (jnp.ones((2, 32, 3)), jnp.ones((2, 32), jnp.int32))[: len(specs)]
        return collectives(jax.jit(mapped).lower(*args).compile())

    assert exchanged(ids=False) == [("collective-permute", 2 * (WIDTH - 1) * 3 * 4)]
    kinds = [kind for kind, _ in exchanged(ids=True)]
    assert kinds.count("all-gather") == 1 and kinds.count("collective-permute") == 2 * 4 and len(kinds) == 9


def test_names_of_axes_are_checked():
    with pytest.raises(ValueError, match=r"`context_axis='context'` names mesh axes .* which are \(\)"):
        short_convolution(jnp.ones((1, 4, 2)), jnp.ones((2, 3)), context_axis="context")
    wrong = lambda x: short_convolution(x, jnp.ones((2, 3)), context_axis="context")[0]
    with pytest.raises(ValueError, match=r"which are \('expert',\)"):
        jax.shard_map(wrong, mesh=mesh_of(**{AXIS: 2}), in_specs=TOKENS, out_specs=TOKENS)(jnp.ones((1, 4, 2)))
