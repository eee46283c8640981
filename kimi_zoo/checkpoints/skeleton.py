"""The model that a configuration makes, without values, and how another one differs from it."""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, TypeGuard

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

from kimi_zoo.checkpoints.rows import get_leaf
from kimi_zoo.layers.stack import stack_layers
from kimi_zoo.models.kimi_linear import KimiLinear, KimiLinearConfig


def model_skeleton(config: KimiLinearConfig) -> KimiLinear:
    """The model with shapes and dtypes in the place of arrays."""
    return eqx.filter_eval_shape(lambda: KimiLinear(config, key=jr.key(0)))


def with_dtypes(skeleton: KimiLinear, dtypes: Mapping[tuple[int | None, str], Any]) -> KimiLinear:
    """The skeleton with other dtypes, stacked anew: layers share arrays only where the dtypes of all parameters agree.

    **Arguments:** `dtypes`: of every parameter, by layer (`None`: outside the layers) and path.
    """

    def retyped(tree: Any, layer: int | None) -> Any:
        paths = [path for number, path in dtypes if number == layer]
        leaves: list[Any] = [get_leaf(tree, path) for path in paths]
        shapes = [
            jax.ShapeDtypeStruct(leaf.shape, dtypes[layer, path]) for leaf, path in zip(leaves, paths, strict=True)
        ]
        return eqx.tree_at(lambda t: [get_leaf(t, path) for path in paths], tree, shapes)

    layers = [retyped(layer_skeleton(skeleton, number), number) for number in range(len(skeleton.layers))]
    return eqx.tree_at(lambda m: m.layers, retyped(skeleton, None), stack_layers(layers))


def layer_skeleton(model: KimiLinear, layer: int) -> Any:
    """One layer with shapes and dtypes in the place of arrays."""
    section, position, _ = model.layers.locate(layer)
    block = model.layers.sections[section][position]
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) if _is_array(leaf) else leaf, block
    )


def differences(model: KimiLinear) -> Iterator[str]:
    """What makes a model another one than its configuration describes, apart from the values and floating-point dtypes
    of its parameters: modules, settings, shapes, layer by layer."""
    expected = model_skeleton(model.config)
    for name in ("embedding", "norm", "head"):
        yield from _compare(getattr(model, name), getattr(expected, name), name)
    if len(model.layers) != len(expected.layers):
        yield f"there are {len(model.layers)} layers; the configuration says {len(expected.layers)}"
        return
    for layer in range(len(expected.layers)):
        yield from _compare(layer_skeleton(model, layer), layer_skeleton(expected, layer), f"layers[{layer}]")


def _compare(actual: Any, expected: Any, path: str) -> Iterator[str]:
    """The differences below one place of the tree."""
    if isinstance(expected, eqx.Module) and type(actual) is type(expected):
        for field in fields(expected):
            yield from _compare(getattr(actual, field.name), getattr(expected, field.name), f"{path}.{field.name}")
        return
    if _is_array(actual) and _is_array(expected):
        same = actual.shape == expected.shape and jnp.issubdtype(actual.dtype, jnp.floating)
    else:
        same = type(actual) is type(expected) and actual == expected
    if not same:
        yield f"{path} is {_text(actual)}; the configuration makes it {_text(expected)}"


def _is_array(value: Any) -> TypeGuard[jax.Array | jax.ShapeDtypeStruct]:
    return eqx.is_array(value) or isinstance(value, jax.ShapeDtypeStruct)


def _text(value: Any) -> str:
    if _is_array(value):
        return f"{value.dtype} {list(value.shape)}"
    return f"a {type(value).__name__}" if isinstance(value, eqx.Module) else repr(value)
