"""The adapters to tokamax: same results where they run, clear refusals where they do not."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kda_inputs import as_arrays, assert_trees_close, kda_inputs, vjp_of_sum

from kimi_zoo.ops import kimi_delta_attention

# tokamax's chunked form loses digits in differences of sums: 1e-5 measured here; its recurrence is as exact as ours
TOLERANCES = {"tokamax_xla": 2e-6, "tokamax_xla_chunked": 5e-5}


def run(inputs, **options):
    output, state = kimi_delta_attention(**inputs, **options, output_final_state=True)
    return {"output": output, "final_state": state}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("implementation", TOLERANCES)
def test_equals_the_recurrence(implementation, packed):
    inputs = as_arrays(kda_inputs(0, batch=2, seq=64, heads=2, gate="bounded"))
    options = dict(lower_bound=-5.0, use_qk_l2norm=True)
    state = inputs["initial_state"].shape
    if packed:  # segments out of order, padding in front, inside and behind
        ids = np.array([[0] * 2 + [3] * 30 + [0] * 3 + [3] * 2 + [1] * 20 + [0] * 7, [1] * 10 + [2] * 54])
        options |= dict(segment_ids=jnp.asarray(ids, jnp.int32), max_num_segments=3)
        state = (state[0], 3, *state[1:])
    rng = np.random.default_rng(1)
    weights = dict(output=rng.standard_normal(inputs["value"].shape), final_state=rng.standard_normal(state))
    expected, actual = (
        vjp_of_sum(functools.partial(run, **options, implementation=name), inputs, weights)
        for name in ("recurrent", implementation)
    )
    assert_trees_close(actual, expected, TOLERANCES[implementation])


def test_kernel_says_where_it_runs():
    inputs = as_arrays(kda_inputs(0, batch=1, seq=64, heads=1, gate="bounded"))
    with pytest.raises(ValueError, match='"tokamax_mosaic"` cannot run here: Not supported on cpu'):
        run(inputs, lower_bound=-5.0, implementation="tokamax_mosaic")


@pytest.mark.parametrize(
    "implementation, shape, options, message",
    [
        ("tokamax_xla", {}, dict(segment_ids=jnp.ones((2, 70), jnp.int32)), "needs `max_num_segments`"),
        ("tokamax_xla", dict(seq=0), {}, "at least one token, got seq = 0"),
        ("tokamax_xla_chunked", dict(seq=64), {}, "not a log-decay"),
        ("tokamax_xla_chunked", dict(seq=64, gate="softplus"), {}, "needs `lower_bound` in .*, got None"),
        ("tokamax_xla_chunked", dict(gate="bounded"), dict(lower_bound=-5.0), "divisible by 64, got 70"),
        ("tokamax_mosaic", dict(), {}, "divisible by 64, got 70"),
        ("tokamax_mosaic", dict(seq=64, key_dim=257), {}, "up to 256, got 257"),
    ],
)
def test_constraints_are_named_before_the_call(implementation, shape, options, message):
    with pytest.raises(ValueError, match=f'`implementation="{implementation}"` .*{message}'):
        run(as_arrays(kda_inputs(0, **shape)), **options, implementation=implementation)


def test_is_imported_only_when_used():
    code = "import sys, kimi_zoo.ops; sys.exit('tokamax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_no_warnings_of_the_autotuner(caplog):
    inputs = as_arrays(kda_inputs(2, batch=1, seq=64, heads=1, gate="bounded"))
    jax.eval_shape(functools.partial(run, lower_bound=-5.0, implementation="tokamax_xla_chunked"), inputs)
    assert not caplog.records
