"""The operator under vmap, scan, remat and every kind of sharding gives what it gives alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from kda_inputs import as_arrays, assert_trees_close, kda_inputs, vjp_of_sum

from kimi_zoo.ops import kimi_delta_attention

TOLERANCE = 3e-6  # float32 against float32, another order of sums: below 5e-7 measured
SPECS = {name: P("data", None, "tensor") for name in ("query", "key", "value", "gate", "beta")}
SPECS |= dict(initial_state=P("data", "tensor"), a_log=P("tensor"), dt_bias=P("tensor"))
OUTPUT_SPECS = {"output": P("data", None, "tensor"), "final_state": P("data", "tensor")}
IDS = np.array([[1] * 20 + [2] * 13 + [0] * 7, [0] * 3 + [1] * 37], np.int32)


def run(inputs, ids=None, implementation="chunked", initial_state=True):
    inputs = inputs if initial_state else {k: v for k, v in inputs.items() if k != "initial_state"}
    output, state = kimi_delta_attention(
        **inputs,
        segment_ids=ids,
        use_qk_l2norm=True,
        output_final_state=True,
        chunk_size=16 if implementation == "chunked" else None,
        implementation=implementation,
    )
    return {"output": output, "final_state": state}


def small_inputs():
    inputs = kda_inputs(5, seq=40, heads=4, gate="softplus")
    rng = np.random.default_rng(1)
    weights = {"output": rng.standard_normal(inputs["value"].shape)}
    weights["final_state"] = rng.standard_normal(inputs["initial_state"].shape)
    inputs["dt_bias"] = inputs["dt_bias"].reshape(4, 8)
    return as_arrays(inputs), as_arrays(weights)


def mesh_of(axis_type):
    return jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(axis_type,) * 2)


@pytest.mark.parametrize("implementation, initial_state", [("chunked", False), ("recurrent", False), (None, True)])
def test_shard_map_over_batch_and_heads(implementation, initial_state):
    inputs, weights = small_inputs()
    function = functools.partial(run, implementation=implementation, initial_state=initial_state)
    mapped = jax.shard_map(
        function, mesh=mesh_of(AxisType.Auto), in_specs=(SPECS, P("data")), out_specs=OUTPUT_SPECS, check_vma=True
    )
    expected = vjp_of_sum(lambda inputs: function(inputs, jnp.asarray(IDS)), inputs, weights)
    assert_trees_close(
        vjp_of_sum(lambda inputs: mapped(inputs, jnp.asarray(IDS)), inputs, weights), expected, TOLERANCE
    )


@pytest.mark.parametrize("axis_type, initial_state", [(AxisType.Auto, True), (AxisType.Explicit, False)])
def test_sharded_arrays(axis_type, initial_state):
    inputs, weights = small_inputs()
    function = functools.partial(run, ids=jnp.asarray(IDS), initial_state=initial_state)
    expected = vjp_of_sum(function, inputs, weights)
    mesh = mesh_of(axis_type)
    with jax.set_mesh(mesh):
        inputs = {name: jax.device_put(x, NamedSharding(mesh, SPECS[name])) for name, x in inputs.items()}
        weights = {name: jax.device_put(x, NamedSharding(mesh, OUTPUT_SPECS[name])) for name, x in weights.items()}
        both = jax.jit(lambda inputs, weights: vjp_of_sum(function, inputs, weights))
        compiled = both.lower(inputs, weights).compile()
        actual = compiled(inputs, weights)
    text = compiled.as_text()
    assert "all-gather" not in text and "all-to-all" not in text and "collective-permute" not in text
    assert_trees_close(actual, expected, TOLERANCE)
