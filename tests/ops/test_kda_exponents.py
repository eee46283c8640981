"""No exponent of the chunked form is positive, nothing is divided by a decay: shown on the traced program itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from kda_inputs import as_arrays, kda_inputs

from kimi_zoo.ops import kimi_delta_attention
from kimi_zoo.ops.kda_chunked import _chunk_step

FORBIDDEN = {"exp2", "expm1", "pow", "integer_pow", "div", "rsqrt", "sqrt", "log", "log1p", "logistic", "tanh"}


def forward_and_gradient(function, inputs):
    result, pullback = jax.vjp(function, inputs)
    return result, pullback(jax.tree.map(jnp.ones_like, result))


def inner_jaxprs(equation):
    found = [x for x in equation.params.values() if isinstance(x, core.Jaxpr | core.ClosedJaxpr)]
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
def test_no_exponent_is_positive(strong):
    inputs = kda_inputs(0, batch=1, seq=64, heads=2, key_dim=4, value_dim=3)
    if strong:
        inputs["gate"] = -np.exp(np.random.default_rng(0).uniform(-20, 9, inputs["gate"].shape))
    state = inputs.pop("initial_state")
    inputs = as_arrays({name: np.moveaxis(x, 2, 1) for name, x in inputs.items()} | {"state": state})

    def step(inputs):
        inputs = dict(inputs)
        return _chunk_step(log_decay=inputs.pop("gate"), **inputs, segment=None)

    both = functools.partial(forward_and_gradient, step)
    traced = jax.make_jaxpr(both)(inputs)

    @jax.jit
    def interpreted(inputs):
        exponents = []
        return evaluate(traced, jax.tree.leaves(inputs), exponents), exponents

    result, exponents = interpreted(inputs)
    expected = jax.tree.leaves(jax.jit(both)(inputs))
    assert all(np.allclose(x, y, atol=1e-5) for x, y in zip(result, expected, strict=True))  # it was that program
    assert len(exponents) >= 5 and max(exponents) == 0.0
    assert not FORBIDDEN & set(primitives(traced))


def test_nothing_around_the_chunks_takes_exponents_or_divides():
    """The whole operator has no exponentials besides those of its chunks."""
    inputs = as_arrays(kda_inputs(0, batch=1, seq=100, heads=2))
    ids = jnp.ones((1, 100), jnp.int32)

    def outputs(inputs):
        return kimi_delta_attention(**inputs, segment_ids=ids, output_final_state=True, implementation="chunked")

    forward = jax.make_jaxpr(outputs)(inputs)
    assert [name for name in primitives(forward) if name == "scan"] == ["scan"]
    (scan,) = (equation for equation in all_equations(forward) if equation.primitive.name == "scan")
    inside = sum(name == "exp" for inner in inner_jaxprs(scan) for name in primitives(inner))
    assert inside == sum(name == "exp" for name in primitives(forward)) > 0
    both = jax.make_jaxpr(functools.partial(forward_and_gradient, outputs))(inputs)
    assert not FORBIDDEN & set(primitives(both))


def all_equations(closed):
    for equation in closed.jaxpr.eqns:
        yield equation
        for inner in inner_jaxprs(equation):
            yield from all_equations(inner)
