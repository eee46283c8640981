import functools
import itertools
import logging

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kda_inputs import as_arrays, assert_trees_close, kda_inputs, naive_kda, relative_error, vjp_of_sum

import kimi_zoo.ops.kda
from kimi_zoo.ops import kda_implementation, kda_step, kimi_delta_attention, segment_ids_from_cu_seqlens

# float32 against float64, relative L2: ours stay below 2e-7 (output) and 1e-6 (gradients) in every case here
OUTPUT_TOLERANCE = 5e-7
GRADIENT_TOLERANCE = 3e-6


def run(inputs, **options):
    output, state = kimi_delta_attention(**inputs, **options, output_final_state=True)
    return {"output": output, "final_state": state}


def cotangents(inputs, seed=1):
    rng = np.random.default_rng(seed)
    value, state = inputs["value"], inputs["initial_state"]
    return {"output": rng.standard_normal(value.shape), "final_state": rng.standard_normal(state.shape)}


@functools.cache
def both_passes(implementation, dtype, use_segments, static=()):
    """Jitted once per kind of call: outputs and gradients of all inputs."""

    @jax.jit
    def passes(inputs, cotangents, segment_ids):
        inputs, cotangents = (jax.tree.map(lambda x: x.astype(dtype), tree) for tree in (inputs, cotangents))
        options = dict(static, segment_ids=segment_ids if use_segments else None, implementation=implementation)
        return vjp_of_sum(lambda inputs: run(inputs, **options), inputs, cotangents)

    return passes


def passes(implementation, inputs, segment_ids=None, dtype=jnp.float32, **static):
    function = both_passes(implementation, dtype, segment_ids is not None, tuple(sorted(static.items())))
    ids = np.zeros((1, 1), np.int32) if segment_ids is None else np.asarray(segment_ids, np.int32)
    return function(inputs, cotangents(inputs), ids)


def assert_as_in_float64(
    inputs, segment_ids=None, implementations=("chunked",), gradient_tolerance=GRADIENT_TOLERANCE, **static
):
    """Outputs and gradients of float32 against the recurrence in float64."""
    with jax.enable_x64(True):
        expected, expected_gradients = passes("recurrent", inputs, segment_ids, jnp.float64, **static)
    inputs = as_arrays(inputs)
    for implementation in implementations:
        actual, gradients = passes(implementation, inputs, segment_ids, **static)
        assert_trees_close(actual, expected, OUTPUT_TOLERANCE)
        assert_trees_close(gradients, expected_gradients, gradient_tolerance)


# -- what it computes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["recurrent", "chunked"])
def test_is_the_recurrence(implementation):
    inputs = kda_inputs(0, seq=21)
    ids = np.array([[0, 1, 1, 0, 1] + [2] * 9 + [0, 0] + [3] * 5, [7] * 3 + [1] * 18])
    expected = dict(zip(("output", "final_state"), naive_kda(**inputs, segment_ids=ids), strict=True))
    with jax.enable_x64(True):
        actual, _ = passes(implementation, inputs, ids, jnp.float64)
    assert actual["output"].dtype == jnp.float64
    assert_trees_close(actual, expected, 1e-13)


# around the edges of blocks of 8 and chunks of 64; one head and more, keys shorter and longer than values
@pytest.mark.parametrize(
    "seq, heads, key_dim, value_dim", [(1, 2, 8, 5), (9, 1, 1, 3), (63, 3, 4, 9), (64, 1, 16, 4), (65, 2, 5, 1)]
)
def test_chunked_equals_recurrence_at_any_length(seq, heads, key_dim, value_dim):
    inputs = kda_inputs(seq, batch=1, seq=seq, heads=heads, key_dim=key_dim, value_dim=value_dim, decay=0.3)
    assert_as_in_float64(inputs)


def test_long_sequence():
    inputs = kda_inputs(3, batch=1, seq=4097, heads=1, decay=0.01)
    actual, expected = (
        jax.jit(functools.partial(run, implementation=name))(as_arrays(inputs)) for name in ("chunked", "recurrent")
    )
    assert_trees_close(actual, expected, OUTPUT_TOLERANCE)


@pytest.mark.parametrize("implementation", ["recurrent", "chunked", None])
def test_no_token_leaves_the_state(implementation):
    inputs = as_arrays(kda_inputs(0, seq=0))
    result = run(inputs, implementation=implementation)
    assert result["output"].shape == (2, 0, 3, 5)
    assert np.array_equal(result["final_state"], inputs["initial_state"])


def strong_gates():
    """Log-decays that overflow or lose all digits when a chunk's decays are summed up and subtracted."""
    rng, shape = np.random.default_rng(8), (2, 70, 3, 8)
    mild = -0.05 * np.ones(shape)
    for strength in (0.0, 1e-8, 20.0, 100.0, 200.0, 1e4):
        yield f"all {strength:g}", np.full(shape, -strength)
        yield f"spikes {strength:g}", np.where(np.arange(70)[:, None, None] % 16 == 5, -strength, mild)
        yield f"mixed {strength:g}", np.where(rng.random(shape) < 0.25, -strength, mild)
        yield f"channels {strength:g}", np.where(np.arange(8) < 4, -strength, mild)


@pytest.mark.parametrize("gate", [pytest.param(gate, id=name) for name, gate in strong_gates()])
def test_any_strength_of_decay(gate):
    inputs = kda_inputs(4) | {"gate": gate.astype(np.float32).astype(np.float64)}
    assert_as_in_float64(inputs, implementations=["chunked", "recurrent"])


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_any_rate_of_decay(lower_bound):
    inputs = kda_inputs(4, gate="softplus")
    inputs["a_log"] = np.array([-10.0, 0.0, 10.0])
    # a rate of 22026 inside the sigmoid multiplies the rounding of its argument: 1e-5 in the gradients
    tolerance = GRADIENT_TOLERANCE if lower_bound is None else 3e-5
    assert_as_in_float64(inputs, gradient_tolerance=tolerance, lower_bound=lower_bound, use_qk_l2norm=True)


def test_infinite_decay_forgets_everything():
    inputs = kda_inputs(4)
    inputs["gate"] = np.where(np.arange(70)[:, None, None] % 7 == 3, -np.inf, inputs["gate"])
    assert_as_in_float64(inputs, implementations=["chunked", "recurrent"])


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_identical_keys(beta):
    """The hardest triangular system: all ones below the diagonal when nothing decays and beta is 1."""
    inputs = kda_inputs(5)
    key = np.zeros_like(inputs["key"])
    key[..., 0] = 1.0
    inputs |= {"key": key, "gate": np.zeros_like(key), "beta": np.full_like(inputs["beta"], beta)}
    assert_as_in_float64(inputs)


ids_of_a_row = st.lists(st.integers(0, 2), min_size=70, max_size=70) | st.lists(
    st.integers(0, 40), min_size=5, max_size=5
).map(lambda lengths: ([i % 3 for i, n in enumerate(lengths, 1) for _ in range(n)] + [0] * 70)[:70])


@settings(max_examples=15, deadline=None)
@given(ids_of_a_row, ids_of_a_row, st.sampled_from([0.0, 0.1, 1.0, 50.0]), st.integers(0, 99))
def test_any_segmentation(first, second, decay, seed):
    inputs = kda_inputs(seed, decay=decay)
    assert_as_in_float64(inputs, [first, second], implementations=["chunked", "recurrent"])


# -- packing and states ----------------------------------------------------------------------------------------------


def test_packed_row_equals_its_documents_one_by_one():
    inputs = as_arrays(kda_inputs(6, batch=1, heads=2))
    bounds = [0, 1, 40, 70]
    packed = run(inputs, segment_ids=segment_ids_from_cu_seqlens(bounds, 70)[None], implementation="chunked")
    for i, (start, stop) in enumerate(itertools.pairwise(bounds)):
        state = inputs["initial_state"] if i == 0 else jnp.zeros_like(inputs["initial_state"])
        alone = {name: x[:, start:stop] for name, x in inputs.items() if name != "initial_state"}
        alone = run(alone | {"initial_state": state}, implementation="recurrent")
        assert relative_error(packed["output"][:, start:stop], alone["output"]) < OUTPUT_TOLERANCE
    assert relative_error(packed["final_state"], alone["final_state"]) < OUTPUT_TOLERANCE


@pytest.mark.parametrize("per_segment", [False, True])
def test_a_state_for_every_segment(per_segment):
    ids = np.array([[0, 0] + [4] * 30 + [0] + [4] * 3 + [1] * 20 + [2] + [0] * 3, [2] * 16 + [1] * 44])
    inputs = kda_inputs(7, seq=60, heads=2)
    single = inputs["initial_state"]
    if per_segment:
        inputs["initial_state"] = np.random.default_rng(0).standard_normal((2, 4, *single.shape[1:]))
    states = np.zeros((2, 4, *single.shape[1:])) if not per_segment else inputs["initial_state"]
    if not per_segment:
        states[0, 3], states[1, 1] = single  # the first segment of each row
    expected = np.array(states)
    for row, segment in ((0, 4), (0, 1), (0, 2), (1, 2), (1, 1)):
        mine = ids[row] == segment
        tokens = {name: x[row : row + 1, mine] for name, x in inputs.items() if name != "initial_state"}
        expected[row, segment - 1] = naive_kda(**tokens, initial_state=states[row, segment - 1][None])[1][0]
    inputs = as_arrays(inputs)
    with jax.enable_x64(False):
        weights = {"output": np.ones(inputs["value"].shape), "final_state": np.ones(expected.shape)}
        results = [
            vjp_of_sum(
                functools.partial(
                    run, segment_ids=jnp.asarray(ids, jnp.int32), max_num_segments=4, implementation=implementation
                ),
                inputs,
                weights,
            )
            for implementation in ("chunked", "recurrent")
        ]
    assert relative_error(results[0][0]["final_state"], expected) < OUTPUT_TOLERANCE
    assert np.array_equal(results[0][0]["final_state"][1, 2:], states[1, 2:].astype(np.float32))  # ids without tokens
    assert_trees_close(results[0][0], results[1][0], OUTPUT_TOLERANCE)
    assert_trees_close(results[0][1], results[1][1], GRADIENT_TOLERANCE)


@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("implementation", ["recurrent", "chunked"])
def test_what_stands_at_padding_changes_no_bit(implementation, junk):
    inputs = kda_inputs(9, gate="bounded")
    ids = np.array([[0] * 5 + [1] * 30 + [0] * 3 + [1] * 10 + [2] * 22, [1] * 64 + [0] * 6])
    pads = ids == 0
    static = dict(lower_bound=-5.0, use_qk_l2norm=True)
    clean = passes(implementation, inputs, ids, **static)
    dirty = {
        name: np.where(pads.reshape(pads.shape + (1,) * (x.ndim - 2)), junk, x) if x.shape[:2] == pads.shape else x
        for name, x in inputs.items()
    }
    dirty = passes(implementation, dirty, ids, **static)
    assert jax.tree.all(jax.tree.map(np.array_equal, clean, dirty))
    output, gradients = np.asarray(dirty[0]["output"]), dirty[1]
    assert not output[pads].any() and output[~pads].all()
    assert not any(np.asarray(gradients[name])[pads].any() for name in ("query", "key", "value", "gate", "beta"))


# -- numerics --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["recurrent", "chunked"])
def test_later_tokens_change_no_earlier_bit(implementation):
    first, other = (kda_inputs(seed, batch=1, seq=48, heads=2, key_dim=16, value_dim=16, gate="b") for seed in (1, 2))
    tokens = ("query", "key", "value", "gate", "beta")
    changed = first | {name: np.concatenate([first[name][:, :32], other[name][:, 32:]], axis=1) for name in tokens}
    weights = np.zeros(first["value"].shape)
    weights[:, :32] = 1.0

    @jax.jit
    def prefix(inputs):
        inputs = as_arrays(inputs, jnp.bfloat16)
        options = dict(lower_bound=-5.0, use_qk_l2norm=True, implementation=implementation)
        if implementation == "chunked":
            options["chunk_size"] = 64
        return jax.value_and_grad(
            lambda inputs: jnp.sum(kimi_delta_attention(**inputs, **options)[0].astype(jnp.float32) * weights)
        )(inputs), kimi_delta_attention(**inputs, **options)[0][:, :32]

    ((_, gradients), output), ((_, changed_gradients), changed_output) = prefix(first), prefix(changed)
    assert np.array_equal(output, changed_output)
    for name in tokens:
        assert not gradients[name][:, 32:].astype(jnp.float32).any()
        assert np.array_equal(gradients[name], changed_gradients[name])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_are_finite_when_the_bounded_gate_saturates(dtype):
    inputs = kda_inputs(3, gate="bounded")
    inputs["gate"] = np.full_like(inputs["gate"], 50.0)
    _, gradients = passes("chunked", inputs, dtype=dtype, lower_bound=-5.0, use_qk_l2norm=True)
    assert jax.tree.all(jax.tree.map(lambda x: bool(jnp.isfinite(x).all()), gradients))
    assert jnp.abs(gradients["a_log"]).max() < 1e-12 and jnp.abs(gradients["dt_bias"]).max() < 1e-12


def test_zero_keys_have_finite_gradients():
    inputs = kda_inputs(3, gate="bounded")
    inputs["key"][:, 3:7] = inputs["query"][:, 5:9] = 0.0
    _, gradients = passes("chunked", inputs, lower_bound=-5.0, use_qk_l2norm=True)
    assert jax.tree.all(jax.tree.map(lambda x: bool(jnp.isfinite(x).all()), gradients))


def test_bfloat16_costs_only_the_rounding_of_the_output():
    inputs = as_arrays(kda_inputs(2, batch=1, seq=100, heads=2, decay=0.1), jnp.bfloat16)
    expected = naive_kda(**{name: np.asarray(x, np.float64) for name, x in inputs.items()})
    naive = naive_kda(**{name: np.asarray(x) for name, x in inputs.items()})  # all of it in bfloat16
    actual = kimi_delta_attention(**inputs, output_final_state=True, implementation="chunked")
    assert actual[0].dtype == jnp.bfloat16 and actual[1].dtype == jnp.float32
    errors, naive_errors = ([relative_error(x, y) for x, y in zip(z, expected, strict=True)] for z in (actual, naive))
    assert errors[0] < 0.6 * naive_errors[0] and errors[0] < 2**-9  # half a unit in the last place of bfloat16
    assert errors[1] < OUTPUT_TOLERANCE < 1e-3 < naive_errors[1]


def test_orthonormal_keys_accumulate_and_strong_decay_forgets():
    eye = jnp.eye(8)[None, :, None]  # eight tokens, one head, key i is the i-th unit vector
    value = jr.normal(jr.PRNGKey(0), (1, 8, 1, 5))
    ones = jnp.ones((1, 8, 1))
    call = functools.partial(kimi_delta_attention, eye, eye, value, beta=ones, scale=1.0, output_final_state=True)
    _, state = call(gate=jnp.zeros_like(eye))
    assert np.array_equal(state[0, 0], value[0, :, 0])
    output, state = call(gate=jnp.full_like(eye, -1e4))
    assert np.array_equal(output, value)
    assert np.array_equal(state[0, 0, 7], value[0, 7, 0]) and not state[0, 0, :7].any()


def test_rows_do_not_influence_one_another_and_runs_repeat():
    inputs = kda_inputs(5)
    other = {name: np.concatenate([x[:1], kda_inputs(6)[name][1:]]) for name, x in inputs.items()}
    first, again, third = (passes("chunked", x) for x in (inputs, inputs, other))
    assert jax.tree.all(jax.tree.map(np.array_equal, first, again))  # two runs, forward and gradients
    assert jax.tree.all(jax.tree.map(lambda x, y: np.array_equal(x[0], y[0]), first, third))
    assert not any(jax.tree.leaves(jax.tree.map(lambda x, y: np.array_equal(x[1], y[1]), first, third)))


# -- transformations -------------------------------------------------------------------------------------------------


def test_vmap_and_remat():
    inputs = as_arrays(kda_inputs(5, batch=4, seq=20, heads=2))
    expected = passes("chunked", inputs)
    split = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), inputs)
    mapped = jax.jit(jax.vmap(functools.partial(run, implementation="chunked")))(split)
    merged = jax.tree.map(lambda x: x.reshape(4, *x.shape[2:]), mapped)
    assert_trees_close(merged, expected[0], OUTPUT_TOLERANCE)
    remat = jax.checkpoint(functools.partial(run, implementation=None))
    assert_trees_close(vjp_of_sum(remat, inputs, cotangents(inputs)), expected, GRADIENT_TOLERANCE)


@pytest.mark.parametrize("implementation", ["chunked", None])
def test_second_derivatives(implementation):
    inputs, direction = (as_arrays(kda_inputs(seed, batch=1, seq=5, heads=1, key_dim=3)) for seed in (5, 6))

    def loss(inputs, implementation):
        return sum(jnp.sum(x**2) for x in run(inputs, implementation=implementation).values())

    def gradient(implementation):
        return jax.grad(functools.partial(loss, implementation=implementation))

    def along(inputs):
        return sum(jax.tree.leaves(jax.tree.map(jnp.vdot, gradient(implementation)(inputs), direction)))

    actual = jax.jit(jax.grad(along))(inputs)
    expected = jax.jit(lambda inputs: jax.jvp(gradient("recurrent"), (inputs,), (direction,))[1])(inputs)
    assert_trees_close(actual, expected, 1e-5)  # measured: 6e-7
    forward_over_reverse = jax.jit(lambda inputs: jax.jvp(gradient(implementation), (inputs,), (direction,))[1])
    assert_trees_close(forward_over_reverse(inputs), expected, 1e-5)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(functools.partial(loss, implementation=implementation), (inputs,), (direction,))


# -- one token -------------------------------------------------------------------------------------------------------


def test_steps_equal_the_sequence():
    inputs = as_arrays(kda_inputs(5, seq=9, gate="softplus"))
    expected = run(inputs, use_qk_l2norm=True, scale=0.7, implementation="recurrent")
    state = inputs.pop("initial_state")
    parameters = {name: inputs.pop(name) for name in ("a_log", "dt_bias")}
    step = jax.jit(functools.partial(kda_step, **parameters, use_qk_l2norm=True, scale=0.7))
    for t in range(9):
        output, state = step(**{name: x[:, t] for name, x in inputs.items()}, state=state)
        assert relative_error(output, expected["output"][:, t]) < OUTPUT_TOLERANCE
    assert relative_error(state, expected["final_state"]) < OUTPUT_TOLERANCE


def test_step_updates_the_state_in_place():
    state = jnp.zeros((2, 3, 8, 5))
    token = {name: x[:, 0] for name, x in as_arrays(kda_inputs(5, seq=1)).items() if name != "initial_state"}
    compiled = (
        jax.jit(lambda state, token: kda_step(**token, state=state), donate_argnums=0).lower(state, token).compile()
    )
    text = compiled.as_text()
    assert " transpose(" not in text and "input_output_alias={ {1}: (0, {}" in text
    assert compiled(state, token)[1].shape == (2, 3, 8, 5) and state.is_deleted()


@pytest.mark.parametrize("seq", [2, 5, 16])  # a continued prompt, tokens proposed by a smaller model
def test_short_blocks_continue_from_a_state(seq):
    inputs = as_arrays(kda_inputs(seq, seq=seq, gate="softplus"))
    results = [run(inputs, use_qk_l2norm=True, implementation=name) for name in ("recurrent", "chunked", None)]
    assert_trees_close(results[1], results[0], OUTPUT_TOLERANCE)
    assert_trees_close(results[2], results[0], OUTPUT_TOLERANCE)


def test_step_keeps_a_float32_state_and_names_a_wrong_one():
    token = {k: jnp.asarray(x[:, 0], jnp.bfloat16) for k, x in kda_inputs(5, seq=1).items() if k != "initial_state"}
    output, state = kda_step(**token, state=jnp.zeros((2, 3, 8, 5)))
    assert output.dtype == jnp.bfloat16 and state.dtype == jnp.float32


# -- choice and errors -----------------------------------------------------------------------------------------------


def test_choice_is_logged_once(caplog, monkeypatch):
    inputs = as_arrays(kda_inputs(5, seq=3))
    monkeypatch.setattr(kimi_zoo.ops.kda, "_log_choice", functools.cache(kimi_zoo.ops.kda._log_choice.__wrapped__))
    with caplog.at_level(logging.INFO, logger="kimi_zoo"):
        for _ in range(2):
            jax.eval_shape(run, inputs)
        jax.eval_shape(functools.partial(run, chunk_size=16), inputs)
    first, second = (record.getMessage() for record in caplog.records)
    assert '"recurrent" where it is lowered to a CPU' in first
    assert 'runs as "chunked"' in second


def test_the_platform_of_the_lowering_decides():
    inputs = as_arrays(kda_inputs(5, seq=128))
    traced = jax.jit(run).trace(inputs)
    assert "64x64xf32" not in traced.lower(lowering_platforms=("cpu",)).as_text()  # no chunk's scores
    assert "64x64xf32" in traced.lower(lowering_platforms=("tpu",)).as_text()
    asked = functools.partial(kda_implementation, 64, 64)
    assert asked(platform="cpu") == "recurrent"
    assert asked(platform="cpu", derivative=True) == asked(platform="tpu") == asked(platform="gpu") == "chunked"
    assert asked(platform="cpu", max_num_segments=3) == asked(platform="cpu", chunk_size=32) == "chunked"
    assert kda_implementation(128, 128, platform="cpu") == "chunked"


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(implementation="pallas_tpu"), 'no `implementation="pallas_tpu"`; available are "recurrent", "chunked"'),
        (dict(implementation="chunked", chunk_size=48), "power of two, got 48"),
        (dict(implementation="recurrent", chunk_size=64), 'implementation="recurrent"` has none'),
        (dict(max_num_segments=0), "at least 1, got 0"),
        (dict(lower_bound=-5.0), "`a_log` is given"),
        (dict(a_log=jnp.zeros(3), lower_bound=-6.0), r"in \[-5, 0\), got -6.0"),
        (dict(a_log=jnp.zeros(3), lower_bound=float("nan")), r"in \[-5, 0\), got nan"),
        (dict(a_log=jnp.zeros(3), dt_bias=jnp.zeros(8)), r"3 \* 8 = 24 values.*got shape \(8,\) with 8 values"),
    ],
)
def test_wrong_options_are_refused(options, message):
    inputs = as_arrays(kda_inputs(5, seq=9))
    with pytest.raises(ValueError, match=message):
        run(inputs, **options)


@pytest.mark.parametrize(
    "name, shape, message",
    [
        ("query", (2, 9, 8), r"axes \[batch, seq, heads, dim\], got \(2, 9, 8\)"),
        ("key", (2, 9, 3, 7), r"`key` must have shape \(2, 9, 3, 8\) .*, got \(2, 9, 3, 7\)"),
        ("value", (2, 9, 6, 5), "equally many heads .* got 3 in `query` and 6 in `value`"),
        ("value", (2, 8, 3, 5), r"`value` must have \(2, 9, 3\) .*, got \(2, 8, 3, 5\)"),
        ("gate", (2, 9, 3, 1), r"`gate` must have shape \(2, 9, 3, 8\) .*, got \(2, 9, 3, 1\)"),
        ("beta", (2, 9, 3, 8), r"`beta` must have shape \(2, 9, 3\) .*, got \(2, 9, 3, 8\)"),
        ("initial_state", (2, 3, 5, 8), r"`initial_state` must have shape \(2, 3, 8, 5\), got \(2, 3, 5, 8\)"),
        ("segment_ids", (2, 8), r"`segment_ids` must have shape .* \(2, 9\), got \(2, 8\)"),
    ],
)
def test_wrong_shapes_are_named(name, shape, message):
    inputs = as_arrays(kda_inputs(5, seq=9)) | {name: jnp.zeros(shape, jnp.int32 if "ids" in name else jnp.float32)}
    unchecked = kimi_delta_attention.__wrapped__  # without the annotations' own check, as users run it
    with pytest.raises(ValueError, match=message):
        unchecked(**inputs)
