"""Kimi Delta Attention over rows that are split across devices equals the one on whole rows."""

import functools

import jax
import jax.numpy as jnp
import pytest
from context_cases import (
    ROWS,
    SEQ,
    TOKENS,
    any_rows,
    collectives,
    hide_padding,
    over_ranks,
    random_like,
    rows_of_ids,
    with_gradients,
)
from hypothesis import given, settings
from jax.sharding import PartitionSpec as P
from kda_inputs import as_arrays, assert_trees_close, kda_inputs, relative_error

from kimi_zoo.ops import kimi_delta_attention

TOLERANCE = 3e-6  # float32 against float32, another order of sums: below 8e-7 measured
NAMES = ("query", "key", "value", "gate", "beta")
SMALL = dict(heads=2, key_dim=4, value_dim=3)


def attend(inputs, ids=None, *, context_axis=None, **options):
    options = dict(implementation="chunked", output_final_state=True) | options
    return kimi_delta_attention(**inputs, segment_ids=ids, context_axis=context_axis, use_qk_l2norm=True, **options)


def specs_of(inputs, packed):
    specs = {name: TOKENS if name in NAMES else P() for name in inputs}
    return (specs, TOKENS) if packed else (specs,)


@functools.cache
def on_one_device(**options):
    return with_gradients(functools.partial(attend, **options))


@functools.cache
def on_ranks(ranks, names, packed, **options):
    function, specs = functools.partial(attend, **options), specs_of(names, packed)
    return with_gradients(over_ranks(function, ranks, specs, (TOKENS, P())))


def check(ranks, inputs, ids=None, tolerance=TOLERANCE, **options):
    """Output, final states and every gradient; whatever stands at padding is NaN."""
    rest = () if ids is None else (ids,)
    if ids is not None:
        inputs = inputs | hide_padding({name: inputs[name] for name in NAMES}, ids)
    cotangents = random_like(jax.eval_shape(functools.partial(attend, **options), inputs, *rest))
    expected = on_one_device(**options)(inputs, *rest, cotangents)
    actual = on_ranks(ranks, tuple(inputs), ids is not None, **options)(inputs, *rest, cotangents)
    assert_trees_close(actual, expected, tolerance)


def inputs_for(rows, seq=SEQ, gate="softplus", **sizes):
    return as_arrays(kda_inputs(3, batch=len(rows), seq=seq, gate=gate, **(SMALL | sizes)))


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_packed_rows(ranks):
    check(ranks, inputs_for(ROWS), rows_of_ids(ROWS), chunk_size=4)


@settings(max_examples=10, deadline=None)
@given(any_rows)
def test_any_documents(rows):
    check(8, inputs_for(ROWS), rows_of_ids(rows), chunk_size=4)


@pytest.mark.parametrize("ranks, states", [(4, 3), (8, None)])
def test_a_state_for_each_segment(ranks, states):
    """In and out; with one initial state, it belongs to the first segment, wherever that begins."""
    rows = ROWS[:-1]
    inputs = inputs_for(rows)
    if states:
        shape = inputs["initial_state"].shape
        inputs["initial_state"] = random_like(jnp.zeros((shape[0], states, *shape[1:])))
    check(ranks, inputs, rows_of_ids(rows), max_num_segments=3, chunk_size=4)


@pytest.mark.parametrize("ranks, implementation", [(4, "recurrent"), (2, None)])
def test_other_implementations(ranks, implementation):
    inputs = inputs_for([1, 2], 8)
    del inputs["initial_state"]
    check(ranks, inputs, implementation=implementation)


def test_any_decay():
    """Documents beside the split; also no decay at all, where all that came before counts."""
    rows = [[(1, 64), (2, 64)], [(1, 63), (2, 65)], [(1, 65), (2, 63)], [(1, 16), (2, 96), (3, 16)], [(1, 128)]]
    inputs = inputs_for(rows, 128, "raw", heads=1)
    for decay in (inputs["gate"], jnp.zeros(()), jnp.full((), -1e-3), jnp.full((), -30.0)):
        gate = jnp.broadcast_to(decay, inputs["gate"].shape)
        check(2, inputs | {"gate": gate}, rows_of_ids(rows, 128), chunk_size=16, tolerance=1e-5)


@pytest.mark.parametrize("seq", [128, 100])
def test_parts_shorter_than_a_chunk(seq):
    """Of 64 tokens."""
    inputs = inputs_for([1, 2], seq, "raw", heads=1)
    split = over_ranks(attend, 4, specs_of(inputs, packed=False), (TOKENS, P()))
    assert_trees_close(jax.jit(split)(inputs), jax.jit(attend)(inputs), TOLERANCE)


def test_bfloat16_and_remat():
    """As close to float32 as bfloat16 on one device is, up to a fifth."""
    exact = {k: v.astype(jnp.bfloat16).astype(jnp.float32) if k in NAMES else v for k, v in inputs_for([1, 2]).items()}
    rounded = {k: v.astype(jnp.bfloat16) if k in NAMES else v for k, v in exact.items()}
    cotangents = random_like(jax.eval_shape(attend, exact))
    alone = on_one_device(chunk_size=4)
    expected = alone(exact, cotangents)
    split = jax.checkpoint(
        over_ranks(functools.partial(attend, chunk_size=4), 2, specs_of(exact, packed=False), (TOKENS, P()))
    )
    low = (cotangents[0].astype(jnp.bfloat16), cotangents[1])
    actual, near = (run(rounded, low) for run in (with_gradients(split), alone))
    assert actual[0][0].dtype == jnp.bfloat16 and actual[0][1].dtype == jnp.float32
    for ours, reference, want in zip(*map(jax.tree.leaves, (actual, near, expected)), strict=True):
        assert relative_error(ours, want) <= 1.2 * relative_error(reference, want) + TOLERANCE


@pytest.mark.parametrize("implementation, packed", [("tokamax_xla", False), ("tokamax_xla_chunked", True)])
def test_tokamax(implementation, packed):
    inputs = inputs_for([1, 2], 32, "bounded", heads=1)
    ids = (rows_of_ids([[(1, 9), (2, 10), (3, 13)], [(0, 9), (1, 5), (2, 10)]], 32),) if packed else ()
    alone = functools.partial(attend, lower_bound=-5.0, max_num_segments=3 if packed else None)
    run = functools.partial(alone, implementation=implementation)
    split = over_ranks(run, 2, specs_of(inputs, packed), (TOKENS, P()), check_vma=False)
    assert_trees_close(jax.jit(split)(inputs, *ids), jax.jit(alone)(inputs, *ids), 5e-6)


def compiled_gradient(seq, ranks, packed):
    inputs = inputs_for([1, 2], seq)
    del inputs["initial_state"]
    ids = (rows_of_ids([[(1, 5), (2, seq - 5)]] * 2, seq),) if packed else ()
    alone = functools.partial(attend, output_final_state=False, chunk_size=4)
    function = lambda *args, **named: alone(*args, **named)[0]
    mapped = jax.checkpoint(over_ranks(function, ranks, specs_of(inputs, packed), TOKENS))
    return jax.jit(jax.grad(lambda inputs, *ids: mapped(inputs, *ids).sum())).lower(inputs, *ids).compile()


def test_what_is_sent_does_not_grow_with_the_rows():
    """One exchange with the neighbour and log2 many more, and as many backward; and sums of parameters' gradients."""
    sent = collectives(compiled_gradient(32, 8, packed=False))
    assert sent == collectives(compiled_gradient(64, 8, packed=False))
    kinds = [kind for kind, _ in sent]
    # each exchange is of an update and a matrix, but for the last one, whose matrix nobody needs
    update, matrix = 2 * 2 * 4 * 3 * 4, 2 * 2 * 4 * 4 * 4
    assert kinds.count("collective-permute") == 2 * (2 * 4 - 1) and set(kinds) == {"collective-permute", "all-reduce"}
    assert sum(size for kind, size in sent if kind == "collective-permute") == 2 * (4 * update + 3 * matrix)


def test_too_few_or_broken_segments_are_found_over_ranks(unchecked):
    inputs = inputs_for([1], 16)
    run = jax.jit(over_ranks(functools.partial(attend, max_num_segments=2), 2, specs_of(inputs, True), (TOKENS, P())))
    run(inputs, rows_of_ids([[(1, 9), (2, 7)]], 16))
    for ids, message in [([(1, 9), (3, 7)], "hold a larger id"), ([(1, 7), (2, 6), (1, 3)], "comes back")]:
        with pytest.raises(Exception, match=message):
            jax.block_until_ready(run(inputs, rows_of_ids([ids], 16)))


def test_tokamax_says_that_it_needs_an_unchecked_mesh():
    inputs = inputs_for([1], 16, "raw")
    function = functools.partial(attend, implementation="tokamax_xla")
    with pytest.raises(ValueError, match="needs `check_vma=False`"):
        over_ranks(function, 2, specs_of(inputs, packed=False), (TOKENS, P()))(inputs)


def test_an_axis_of_one_rank():
    check(1, inputs_for([1, 2], 8), implementation="recurrent")


@pytest.fixture
def interpreted_kernels(monkeypatch):
    """tokamax's TPU kernels, run by Pallas's interpreter with the limits of a TPU v6e."""
    import jax.experimental.pallas.tpu as pltpu
    from jax._src import tpu_info
    from tokamax._src.ops.kda import pallas_mosaic_tpu as mosaic

    limits = tpu_info._get_tpu_info_impl(tpu_info.ChipVersion.TPU_V6E, 1)
    monkeypatch.setenv("PALLAS_INTERPRET", "1")
    monkeypatch.setattr(pltpu, "get_tpu_info", lambda: limits)
    for kernel in (mosaic.PallasMosaicTpuKimiDeltaAttention, mosaic.PallasMosaicTpuKimiDeltaAttentionVjp):
        monkeypatch.setattr(kernel, "supported_on", lambda self, device: True)


def test_tokamaxs_own_kernel(interpreted_kernels):
    """Where it is valid it combines ranks itself, also over one without tokens inside a document."""
    rows = [[(1, 10), (2, 4), (0, 20), (2, 2), (3, 28)]]
    inputs, ids = inputs_for(rows, 64, "bounded", heads=1, key_dim=128, value_dim=128), rows_of_ids(rows, 64)
    del inputs["initial_state"]
    alone = functools.partial(attend, lower_bound=-5.0, max_num_segments=3, output_final_state=False)
    run = functools.partial(alone, implementation="tokamax_mosaic")
    split = over_ranks(run, 4, specs_of(inputs, packed=True), (TOKENS, None), check_vma=False)
    program = jax.jit(split).lower(inputs, ids).compile()
    assert "collective-permute" not in dict(collectives(program))
    assert_trees_close(program(inputs, ids), jax.jit(alone)(inputs, ids), 2e-6)
