"""Parameters that are split over devices, inside `jax.shard_map`: marked in the tree, gathered where they are used."""

from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array

# what gives a gathered parameter, or only another view of one
_GATHERED = ("all_gather", "convert_element_type", "transpose", "reshape", "squeeze", "slice", "split", "pvary")


class Split(eqx.Module):
    """This device's part of a parameter that is split along `dim` over the mesh axis `axis`.

    In a stack of layers, `dim` counts without the layer axis.
    """

    part: Array
    axis: str = eqx.field(static=True)
    dim: int = eqx.field(static=True)


def is_split(node: Any) -> bool:
    """Whether a node of a tree is a split parameter."""
    return isinstance(node, Split)


def whole(tree: Any) -> Any:
    """The tree with every split parameter gathered. The derivative sums over the devices and keeps each one's part."""

    def gather(leaf: Any) -> Any:
        if not isinstance(leaf, Split):
            return leaf
        return jax.lax.all_gather(leaf.part, leaf.axis, axis=leaf.dim, tiled=True)

    return jax.tree.map(gather, tree, is_leaf=is_split)


def keep_all_but_gathered(primitive: Any, *_avals: Any, **_parameters: Any) -> bool:
    """A policy for `jax.checkpoint`: derivatives keep everything but gathered parameters, in whatever shape."""
    return primitive.name not in _GATHERED
