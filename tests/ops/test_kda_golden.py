"""The operator against stored references: a float64 recurrence in another framework, forward and gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kda_inputs import GOLDEN, golden_case, vjp_of_sum

from kimi_zoo.ops import kimi_delta_attention


def check_case(name, implementation, dtype, output_tolerance, gradient_tolerance):
    inputs, options, outputs, cotangents, gradients = golden_case(name, dtype)

    def run(inputs):
        output, state = kimi_delta_attention(
            **inputs, **options, output_final_state=True, implementation=implementation
        )
        return {"o": output, "final_state": state}

    cotangents.setdefault("final_state", jnp.zeros(inputs_state_shape(inputs), dtype))
    actual, actual_gradients = vjp_of_sum(run, inputs, cotangents)
    for expected, result, tolerance in (
        (outputs, actual, output_tolerance),
        (gradients, actual_gradients, gradient_tolerance),
    ):
        for key, want in expected.items():
            got = np.asarray(result[key], np.float64).reshape(want.shape)
            # the references' own rule: relative to the tensor's largest entry, plus 1e-6
            assert np.abs(got - want).max() <= tolerance * np.abs(want).max() + 1e-6, key


def inputs_state_shape(inputs):
    batch, _, heads, key_dim = inputs["query"].shape
    return batch, heads, key_dim, inputs["value"].shape[-1]


@pytest.mark.parametrize("implementation", ["recurrent", "chunked"])
@pytest.mark.parametrize("name", GOLDEN["cases"])
def test_matches_reference(name, implementation):
    hard = GOLDEN["cases"][name]["kind"] in ("extreme", "alog6")
    # tolerances that come with the references; we stay below a tenth of them, also in the hard cases
    tolerance = GOLDEN["tolerance"]["float32, kinds extreme and alog6" if hard else "float32"]
    check_case(name, implementation, jnp.float32, 0.1 * tolerance["out"], 0.1 * tolerance["grad"])


@pytest.mark.parametrize("implementation", ["recurrent", "chunked"])
@pytest.mark.parametrize("name", ["extreme_gates_packed", "alog_6_softplus"])
def test_matches_reference_in_float64(name, implementation):
    tolerance = GOLDEN["tolerance"]["float64"]
    with jax.enable_x64(True):
        check_case(name, implementation, jnp.float64, tolerance["out"], tolerance["grad"])
