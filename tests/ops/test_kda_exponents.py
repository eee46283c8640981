"""No exponent of the chunked form is positive, nothing is divided by a decay: shown on the traced program itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from kda_inputs import as_arrays, kda_inputs

from kimi_zoo.ops import kimi_delta_attention
from kimi_zoo.ops.kda_chunk import Tiling, chunk_backward, chunk_forward

FORBIDDEN = {"exp2", "expm1", "pow", "integer_pow", "div", "rsqrt", "sqrt", "log", "log1p", "logistic", "tanh"}


def forward_and_gradient(function, inputs):
    result, pullback = jax.vjp(function, inputs)
    return result, pullback(jax.tree.map(jnp.ones_like, result))


def inner_jaxprs(equation):
    parts = jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: isinstance(x, tuple))
    parts = [y for x in parts for y in (x if isinstance(x, tuple) else (x,))]  # the branches of a choice
    found = [x for x in parts if isinstance(x, core.Jaxpr | core.ClosedJaxpr)]
    return [x if isinstance(x, core.ClosedJaxpr) else core.ClosedJaxpr(x, ()) for x in found]


def primitives(closed):
    for equation in closed.jaxpr.eqns:
        yield equation.primitive.name
        for inner in inner_jaxprs(equation):
            yield from primitives(inner)


def evaluate(closed, args, exponents):
    """Runs a program without loops one equation after the other, noting the largest argument of every `exp`."""
    jaxpr = closed.jaxpr
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *args), strict=True))

    def read(x):
        return x.val if isinstance(x, core.Literal) else values[x]

    for equation in jaxpr.eqns:
        inputs = [read(x) for x in equation.invars]
        if equation.primitive.name == "exp":
            exponents.append(jnp.max(inputs[0]))
        if inner := inner_jaxprs(equation):
            outputs = evaluate(inner[0], inputs, exponents)
        else:
            outputs = equation.primitive.bind(*inputs, **equation.params)
            outputs = outputs if equation.primitive.multiple_results else [outputs]
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(x) for x in jaxpr.outvars]


@pytest.mark.parametrize("strong", [False, True])
@pytest.mark.parametrize("block", [8, 64])  # as on a CPU, and as elsewhere
def test_no_exponent_is_positive(block, strong):
    inputs = kda_inputs(0, batch=1, seq=64, heads=2, key_dim=4, value_dim=3)
    if strong:
        inputs["gate"] = -np.exp(np.random.default_rng(0).uniform(-20, 9, inputs["gate"].shape))
    state = inputs.pop("initial_state")
    inputs = as_arrays({name: np.moveaxis(x, 2, 1) for name, x in inputs.items()} | {"state": state})
    tiling = Tiling(64, block, jax.lax.Precision.HIGHEST)

    def both(inputs):
        inputs = dict(inputs)
        state, output, forward = chunk_forward(log_decay=inputs.pop("gate"), **inputs, segment=None, tiling=tiling)
        del inputs["value"]
        gradients = chunk_backward(
            **inputs,
            segment=None,
            forward=forward,
            state_cotangent=jnp.ones_like(state),
            output_cotangent=jnp.ones_like(output),
            tiling=tiling,
        )
        return state, output, gradients

    traced = jax.make_jaxpr(both)(inputs)

    @jax.jit
    def interpreted(inputs):
        exponents = []
        return evaluate(traced, jax.tree.leaves(inputs), exponents), exponents

    result, exponents = interpreted(inputs)
    expected = jax.tree.leaves(jax.jit(both)(inputs))
    assert all(np.allclose(x, y, atol=1e-5) for x, y in zip(result, expected, strict=True))  # it was that program
    assert len(exponents) == (1 if block < 64 else 8) and max(exponents) <= 0.0
    assert not FORBIDDEN & set(primitives(traced))


def test_nothing_around_the_chunks_takes_exponents_or_divides():
    """The whole operator, forward and backward, has no exponentials besides those of its chunks."""
    inputs = as_arrays(kda_inputs(0, batch=1, seq=100, heads=2))
    ids = jnp.ones((1, 100), jnp.int32)

    def outputs(inputs):
        return kimi_delta_attention(**inputs, segment_ids=ids, output_final_state=True, implementation="chunked")

    both = jax.make_jaxpr(functools.partial(forward_and_gradient, outputs))(inputs)
    scans = [equation for equation in all_equations(both) if equation.primitive.name == "scan"]
    assert len(scans) == 4  # forward and backward, for a CPU and for others
    inside = sum(name == "exp" for scan in scans for inner in inner_jaxprs(scan) for name in primitives(inner))
    assert inside == sum(name == "exp" for name in primitives(both)) > 0
    assert not FORBIDDEN & set(primitives(both))


def all_equations(closed):
    for equation in closed.jaxpr.eqns:
        yield equation
        for inner in inner_jaxprs(equation):
            yield from all_equations(inner)
