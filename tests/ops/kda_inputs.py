"""Inputs, references and comparisons that the tests of Kimi Delta Attention share."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

DATA = pathlib.Path(__file__).parents[1] / "data" / "kda_operator"
GOLDEN = json.loads((DATA / "golden.json").read_text())


def kda_inputs(seed, *, batch=2, seq=70, heads=3, key_dim=8, value_dim=5, gate="raw", decay=1.0):
    """Random inputs as NumPy float64 of float32 values; `gate="raw"` is a log-decay, any other one has parameters."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape)

    inputs = dict(
        query=normal(batch, seq, heads, key_dim),
        key=normal(batch, seq, heads, key_dim),
        value=normal(batch, seq, heads, value_dim),
        gate=normal(batch, seq, heads, key_dim),
        beta=1 / (1 + np.exp(-normal(batch, seq, heads))),
        initial_state=normal(batch, heads, key_dim, value_dim),
    )
    # keys of length 1: longer ones make the recurrence itself grow without bound
    inputs["query"] /= np.linalg.norm(inputs["query"], axis=-1, keepdims=True)
    inputs["key"] /= np.linalg.norm(inputs["key"], axis=-1, keepdims=True)
    if gate == "raw":
        inputs["gate"] = -decay * np.abs(inputs["gate"])
    else:
        inputs.update(a_log=rng.uniform(-1, 1, heads), dt_bias=normal(heads * key_dim))
    return {name: x.astype(np.float32).astype(np.float64) for name, x in inputs.items()}


def as_arrays(inputs, dtype=jnp.float32):
    return {name: jnp.asarray(x, dtype) for name, x in inputs.items()}


def naive_kda(query, key, value, gate, beta, initial_state, segment_ids=None, scale=None):
    """The recurrence written out in NumPy, token by token, from log-decays: output and final state."""
    batch, seq, heads, key_dim = query.shape
    output, final = np.zeros(value.shape, value.dtype), np.array(initial_state)
    for row, head in np.ndindex(batch, heads):
        state, last = np.array(initial_state[row, head]), 0
        for t in range(seq):
            segment = 1 if segment_ids is None else segment_ids[row, t]
            if segment == 0:
                continue
            if last not in (0, segment):
                state = np.zeros_like(state)
            last = segment
            q, k, v = query[row, t, head], key[row, t, head], value[row, t, head]
            state = np.exp(gate[row, t, head])[:, None] * state
            state = state + beta[row, t, head] * np.outer(k, v - state.T @ k)
            output[row, t, head] = (key_dim**-0.5 if scale is None else scale) * state.T @ q
        final[row, head] = state
    return output, final


def relative_error(actual, expected):
    """Relative L2 error of an array; what is below 1e-23 counts as zero (float32 underflows, float64 does not)."""
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    assert actual.shape == expected.shape
    return np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), 1e-23)


def assert_trees_close(actual, expected, tolerance):
    errors = jax.tree.map(relative_error, actual, expected)
    worst = max(jax.tree.leaves(errors))
    assert worst <= tolerance, errors


def vjp_of_sum(function, inputs, cotangents):
    """Outputs of `function(inputs)` and the gradients of their inner product with the cotangents, jitted."""

    @jax.jit
    def both(inputs, cotangents):
        outputs, pullback = jax.vjp(function, inputs)
        return outputs, pullback(jax.tree.map(lambda c, o: c.astype(o.dtype), cotangents, outputs))[0]

    return both(inputs, cotangents)


def golden_case(name, dtype):
    """Inputs under our argument names, static options, expected outputs, cotangents and gradients of a stored case."""
    case, tensors = GOLDEN["cases"][name], load_file(DATA / f"{name}.safetensors")
    names = {"q": "query", "k": "key", "v": "value", "g": "gate", "f": "gate", "A_log": "a_log"}
    segment_ids = tensors.pop("segment_ids", tensors.pop("in.segment_ids", None))
    groups = {"in": {}, "grad": {}, "out": {}, "cot": {}}
    for key, x in tensors.items():
        group, short = key.split(".")
        groups[group][names.get(short, short)] = x if group in ("grad", "out") else jnp.asarray(x, dtype)
    options = dict(
        lower_bound=case["lower_bound"] if case["gate"] == "bounded" else None,
        scale=case["scale"],
        segment_ids=None if segment_ids is None else jnp.asarray(segment_ids),
        use_qk_l2norm=case["l2norm"],
    )
    return groups["in"], options, groups["out"], groups["cot"], groups["grad"]
