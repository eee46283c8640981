"""Stacked layers taken apart for decoding on CPU.

A scan over stacked layers hands every layer its slice of the weights. On CPU, XLA copies that slice, which a step over
one token per row cannot afford: reading the weights is nearly all it does. Taken apart once, without a copy, the layers
have arrays of their own. The price is a program that grows with depth, so small models, whose weights stay in the
processor's caches, are left as they are.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kimi_zoo.layers.stack import LayerStack

Plan = tuple[tuple[int, int], ...]  # per section of a `LayerStack`: layers in its unit, repeats

LARGE_STACK_BYTES = 8 << 20  # about a processor core's share of its caches


def reads_in_place(model: Any) -> bool:
    """Returns whether all of the model's arrays lie whole on one CPU device, so that parts of them need no copy."""
    arrays = [leaf for leaf in jax.tree.leaves(model) if isinstance(leaf, jax.Array)]
    return all([device.platform for device in leaf.devices()] == ["cpu"] for leaf in arrays)


def stack_plan(model: Any) -> Plan | None:
    """Returns how the model's layers are stacked, if they can and should be taken apart; else `None`."""
    stacks = [node for node in jax.tree.leaves(model, is_leaf=_is_stack) if _is_stack(node)]
    if len(stacks) != 1 or not reads_in_place(model):
        return None
    stack = stacks[0]
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(stack) if eqx.is_array(leaf))
    if size < LARGE_STACK_BYTES or set(stack.repeats) == {1}:
        return None
    return tuple((len(unit), count) for unit, count in zip(stack.sections, stack.repeats, strict=True))


def unstack_views(model: Any) -> Any:
    """As `unstack`, for a model that `reads_in_place`: the new arrays are parts of the model's, not copies.

    Parts that are not aligned as the runtime wants them, which are small, are copied.
    """
    host = jax.tree.map(
        lambda node: _map_arrays(np.asarray, node) if _is_stack(node) else node, model, is_leaf=_is_stack
    )
    parts, static = eqx.partition(unstack(host), lambda leaf: isinstance(leaf, np.ndarray))
    return eqx.combine(jax.device_put(parts, may_alias=True), static)


def unstack(tree: Any) -> Any:
    """Returns the tree with every layer of its stack in a section of its own."""
    return jax.tree.map(lambda node: _unstack(node) if _is_stack(node) else node, tree, is_leaf=_is_stack)


def restack(tree: Any, plan: Plan) -> Any:
    """The inverse of `unstack`, for a stack that was made as `plan` says."""
    return jax.tree.map(lambda node: _restack(node, plan) if _is_stack(node) else node, tree, is_leaf=_is_stack)


def _unstack(stack: LayerStack) -> LayerStack:
    sections = tuple(
        (_map_arrays(lambda leaf, at=at: leaf[at : at + 1], layer),)
        for unit, count in zip(stack.sections, stack.repeats, strict=True)
        for at in range(count)
        for layer in unit
    )
    return LayerStack(sections, (1,) * len(sections))


def _restack(stack: LayerStack, plan: Plan) -> LayerStack:
    layers = [layer for (layer,) in stack.sections]
    sections, start = [], 0
    for length, count in plan:
        members = layers[start : start + length * count]
        sections.append(tuple(jax.tree.map(_join, *members[position::length]) for position in range(length)))
        start += length * count
    return LayerStack(tuple(sections), tuple(count for _, count in plan))


def _join(*parts: Array) -> Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _map_arrays(function: Any, tree: Any) -> Any:
    return jax.tree.map(lambda leaf: function(leaf) if eqx.is_array(leaf) else leaf, tree)


def _is_stack(node: Any) -> bool:
    return isinstance(node, LayerStack)
