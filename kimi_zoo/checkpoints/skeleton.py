"""The model that a configuration makes, without values, and how another one differs from it."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

from kimi_zoo.models.kimi_linear import KimiLinear, KimiLinearConfig


def model_skeleton(config: KimiLinearConfig) -> KimiLinear:
    """The model with shapes and dtypes in the place of arrays."""
    return eqx.filter_eval_shape(lambda: KimiLinear(config, key=jr.key(0)))


def differences(model: KimiLinear) -> Iterator[str]:
    """What makes a model another one than its configuration describes, apart from the values and floating-point dtypes
    of its parameters: modules, settings, shapes, layer by layer."""
    expected = model_skeleton(model.config)
    for name in ("embedding", "norm", "head"):
        yield from _compare(getattr(model, name), getattr(expected, name), name, axes=0)
    if len(model.layers) != len(expected.layers):
        yield f"there are {len(model.layers)} layers; the configuration says {len(expected.layers)}"
        return
    for layer in range(len(expected.layers)):
        blocks = []
        for stack in (model.layers, expected.layers):
            section, position, _ = stack.locate(layer)
            blocks.append(stack.sections[section][position])
        yield from _compare(*blocks, f"layers[{layer}]", axes=1)


def _compare(actual: Any, expected: Any, path: str, *, axes: int) -> Iterator[str]:
    """The differences below one place of the tree. `axes`: leading axes of arrays that are not compared."""
    if isinstance(expected, eqx.Module) and type(actual) is type(expected):
        for field in fields(expected):
            name = field.name
            yield from _compare(getattr(actual, name), getattr(expected, name), f"{path}.{name}", axes=axes)
        return
    arrays = _is_array(actual), _is_array(expected)
    if all(arrays):
        if actual.shape[axes:] != expected.shape[axes:] or not jnp.issubdtype(actual.dtype, jnp.floating):
            yield f"{path} is {_text(actual, axes)}; the configuration makes it {_text(expected, axes)}"
    elif any(arrays) or actual != expected:
        yield f"{path} is {_text(actual, axes)}; the configuration makes it {_text(expected, axes)}"


def _is_array(value: Any) -> bool:
    return eqx.is_array(value) or isinstance(value, jax.ShapeDtypeStruct)


def _text(value: Any, axes: int) -> str:
    if _is_array(value):
        return f"{value.dtype} {list(value.shape[axes:])}"
    return f"a {type(value).__name__}" if isinstance(value, eqx.Module) else repr(value)
