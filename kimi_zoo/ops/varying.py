"""Inside `jax.shard_map`, the type of an array says over which mesh axes it varies; loops want these types to agree."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array


def vary_alike(tree: Any) -> Any:
    """The arrays of a tree, each marked as varying over every mesh axis that one of them varies over.

    Outside of `jax.shard_map` the tree itself. The derivative sums over the axes that were added to an array.
    """
    axes = frozenset().union(*map(varying_axes, jax.tree.leaves(tree)))
    return jax.tree.map(lambda x: _vary(x, axes), tree)


def zeros_like(x: Array) -> Array:
    """Zeros that vary over the same mesh axes as `x`."""
    return _vary(jnp.zeros_like(x), varying_axes(x))


def varying_axes(x: Array) -> frozenset:
    """The mesh axes over which an array varies; none outside of `jax.shard_map`."""
    return jax.typeof(x).manual_axis_type.varying


def _vary(x: Array, axes: frozenset) -> Array:
    missing = tuple(axes - varying_axes(x))
    return jax.lax.pcast(x, missing, to="varying") if missing else x
