"""How the parameters of a model are spread over a mesh: a table of rules, read for every leaf of a tree."""

import fnmatch
import functools
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
from jax.sharding import NamedSharding, PartitionSpec

from kimi_zoo.parallel.axes import Axes, Parallelism
from kimi_zoo.parallel.split import Split

Rules = Mapping[str, tuple[str | None, ...]]  # pattern of names: the role that splits each dimension


def name_of(path: tuple[Any, ...]) -> tuple[str, bool]:
    """The dotted name of a leaf, below its layer if it is in a stack, and whether it is. Wrappers (`base`) are left
    out."""
    fields = [entry.name for entry in path if isinstance(entry, jtu.GetAttrKey)]
    stacked = fields[:2] == ["layers", "sections"]
    return ".".join(field for field in fields[2 if stacked else 0 :] if field != "base"), stacked


def roles_of(name: str, rules: Rules) -> tuple[str | None, ...]:
    """The role that splits each dimension of the parameter `name`, a layer axis aside; empty if it is whole.

    The thin matrices of LoRA, `B A`, are split as what they are added to, `B` by its outputs, `A` by its inputs; the
    integers and scales of a quantised matrix as the matrix.
    """
    *parents, last = name.split(".")
    if last in ("values", "scales") and parents:
        kind = parents.pop()
        return _find(".".join([*parents, "weight" if kind == "quantized" else f"{kind}_proj"]), rules)
    if last in ("a", "b") and parents and parents[-1].endswith("delta"):
        kind = parents.pop().removesuffix("delta")  # `gate_` of experts, nothing of a linear layer
        roles = _find(".".join([*parents, f"{kind}proj" if kind else "weight"]), rules)
        return (*roles[:-2], None, roles[-1]) if last == "a" and roles else (*roles[:-1], None) if roles else ()
    return _find(name, rules)


def _find(name: str, rules: Rules) -> tuple[str | None, ...]:
    return next((roles for pattern, roles in rules.items() if fnmatch.fnmatchcase(name, pattern)), ())


def partition_specs(tree: Any, parallelism: Parallelism, rules: Rules) -> Any:
    """A tree of `PartitionSpec`, one per array of `tree` (a model, a part of one, or shapes in their place).

    A dimension that `fsdp` does not divide is left whole, and so is a vocabulary that `tensor` does not divide.

    **Raises:** `ValueError` for another dimension that its axis does not divide, naming the parameter.
    """

    def spec(path: tuple[Any, ...], leaf: Any) -> PartitionSpec | None:
        if not eqx.is_array(leaf) and not isinstance(leaf, jax.ShapeDtypeStruct):
            return None
        name, stacked = name_of(path)
        roles = roles_of(name, rules)
        entries = []
        for size, role in zip(leaf.shape[int(stacked) :], roles, strict=False):
            parts = 1 if role is None else parallelism.size(role)
            optional = role == "fsdp" or name in ("embedding.weight", "head.weight")
            if size % parts and not optional:
                what = "blocks of rounded weights" if name.endswith(".scales") else "numbers"
                raise ValueError(
                    f"{name} has {size} {what} along what {role}={parts} splits, which cannot be cut into {parts} "
                    f"equal parts: use a size of the axis {role} that divides it, or another axis."
                )
            entries.append(getattr(parallelism, role) if role and parts > 1 and size % parts == 0 else None)
        while entries and entries[-1] is None:
            entries.pop()
        return PartitionSpec(*([None] if stacked and entries else []), *entries)

    return jtu.tree_map_with_path(spec, tree)


def shardings(tree: Any, parallelism: Parallelism, rules: Rules) -> Any:
    """As `partition_specs`, but a `NamedSharding` for every array."""
    specs = partition_specs(tree, parallelism, rules)
    return jax.tree.map(functools.partial(NamedSharding, parallelism.mesh), specs)


def place(tree: Any, parallelism: Parallelism, rules: Rules) -> Any:
    """The arrays of a tree, spread over the mesh. Each process must hold the same values."""
    arrays, static = eqx.partition(tree, eqx.is_array)
    return eqx.combine(jax.tree.map(put, arrays, shardings(arrays, parallelism, rules)), static)


def put(array: Any, sharding: NamedSharding) -> jax.Array:
    """A value that every process holds, as one array spread over the mesh."""
    if sharding.is_fully_addressable or (isinstance(array, jax.Array) and not array.is_fully_addressable):
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def mark_split(tree: Any, specs: Any, axes: Axes) -> Any:
    """Inside `jax.shard_map`: the tree with `Split` around every parameter that is split over `fsdp`."""

    def mark(path: tuple[Any, ...], leaf: Any, spec: PartitionSpec) -> Any:
        if axes.fsdp is None or axes.fsdp not in spec:
            return leaf
        return Split(leaf, axes.fsdp, spec.index(axes.fsdp) - int(name_of(path)[1]))

    return jtu.tree_map_with_path(mark, tree, specs)


def shardings_like(tree: Any, parameters: Any, parallelism: Parallelism, rules: Rules) -> Any:
    """Shardings for a tree that holds copies of parameters in some of its places, such as an optimizer's state.

    A leaf is spread as the parameter whose path its own path ends with, if it has that shape; otherwise it is whole.
    """
    known = {
        jtu.keystr(path): (leaf.shape, sharding)
        for (path, leaf), sharding in zip(
            jtu.tree_leaves_with_path(parameters),
            jax.tree.leaves(shardings(parameters, parallelism, rules)),
            strict=True,
        )
    }
    copy = NamedSharding(parallelism.mesh, PartitionSpec())

    def find(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        ends = (known.get(jtu.keystr(path[start:])) for start in range(len(path)))
        return next((sharding for end in ends if end for shape, sharding in [end] if shape == leaf.shape), copy)

    return jtu.tree_map_with_path(find, tree)
