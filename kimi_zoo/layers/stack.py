"""A stack of layers: equal ones held together along a leading axis and scanned, each still readable and replaceable."""

import math
import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu


class LayerStack(eqx.Module):
    """Layers in order, stored as sections: a section is a unit of layers repeated `repeats` times.

    `sections[s][u]` is the `u`-th layer of the unit, every array of it with a leading axis of length `repeats[s]`.
    Running the stack traces and compiles each unit once. `stack[i]` is layer `i` without that axis.
    """

    sections: tuple[tuple[Any, ...], ...]
    repeats: tuple[int, ...] = eqx.field(static=True)

    def __len__(self) -> int:
        return sum(len(unit) * count for unit, count in zip(self.sections, self.repeats, strict=True))

    def __getitem__(self, index: int) -> Any:
        section, position, repeat = self.locate(index)
        return _slice(self.sections[section][position], repeat)

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def locate(self, index: int) -> tuple[int, int, int]:
        """Where layer `index` is stored: section, position in its unit, place along the leading axis.

        **Raises:** `IndexError` for a layer that does not exist, `TypeError` for anything but a whole number.
        """
        size = len(self)
        try:
            index = operator.index(index)
        except TypeError:
            raise TypeError(
                f"Layers are read one at a time, by a whole number: `[stack[i] for i in range(1, 3)]`; got {index!r}."
            ) from None
        if not -size <= index < size:
            raise IndexError(f"Layer {index} of a stack of {size} layers does not exist.")
        index %= size
        for section, (unit, count) in enumerate(zip(self.sections, self.repeats, strict=True)):
            if index < len(unit) * count:
                return section, index % len(unit), index // len(unit)
            index -= len(unit) * count
        raise IndexError(index)

    def replace(self, index: int, layer: Any) -> "LayerStack":
        """A stack with `layer` in the place of layer `index`.

        A layer of the same structure, shapes and dtypes is written into the arrays of its section; another one splits
        the section.
        """
        section, position, repeat = self.locate(index)
        unit, count = self.sections[section], self.repeats[section]
        if signature(_slice(unit[position], repeat)) == signature(layer):
            write = lambda old, new: old.at[repeat].set(new) if eqx.is_array(old) else old
            written = jtu.tree_map(write, unit[position], layer)
            return eqx.tree_at(lambda stack: stack.sections[section][position], self, written)
        pieces: list[tuple[tuple[Any, ...], int]] = []
        if repeat > 0:
            pieces.append((_slice(unit, slice(0, repeat)), repeat))
        single = [_slice(block, slice(repeat, repeat + 1)) for block in unit]
        single[position] = _lead(layer)
        pieces.append((tuple(single), 1))
        if repeat + 1 < count:
            pieces.append((_slice(unit, slice(repeat + 1, count)), count - repeat - 1))
        sections = (*self.sections[:section], *(unit for unit, _ in pieces), *self.sections[section + 1 :])
        repeats = (*self.repeats[:section], *(count for _, count in pieces), *self.repeats[section + 1 :])
        return LayerStack(sections, repeats)

    def map(self, function: Callable[[Any], Any]) -> "LayerStack":
        """A stack of the same sections, holding `function(layer)` for every layer; called on a stacked layer at a time
        under `jax.vmap`."""
        return LayerStack(
            tuple(tuple(eqx.filter_vmap(function)(block) for block in unit) for unit in self.sections), self.repeats
        )

    def scan(
        self,
        function: Callable[..., tuple[Any, Any]],
        carry: Any,
        *others: "LayerStack",
        remat: bool | Callable[..., bool] = False,
    ) -> tuple[Any, "LayerStack"]:
        """`carry, out = function(carry, layer, *others)` over the layers in order, one trace per unit.

        **Arguments:**

        - `others`: stacks with the same sections, handed along layer by layer.
        - `remat`: whether gradients compute each layer anew instead of keeping what it computed; or a policy of
            `jax.checkpoint_policies`, which says what is kept. With `True` the repeats of a section run in about
            `sqrt(repeats)` groups, each computed anew as well: kept are only the carries between groups, and those
            within one group at a time.

        **Returns:** the last carry, and the outputs as a stack of the same sections.
        """
        policy = remat if callable(remat) else None
        sections = []
        for index, count in enumerate(self.repeats):
            units = tuple(stack.sections[index] for stack in (self, *others))
            arrays, static = eqx.partition(units, eqx.is_array)

            def body(carry: Any, arrays: Any, static: Any = static) -> tuple[Any, Any]:
                outs = []
                for layer, *rest in zip(*eqx.combine(arrays, static), strict=True):
                    carry, out = function(carry, layer, *rest)
                    outs.append(out)
                return carry, tuple(outs)

            body = jax.checkpoint(body, policy=policy) if remat else body
            group = math.isqrt(count) if remat is True else 1
            if count == 1:
                carry, outs = body(carry, jtu.tree_map(lambda x: x[0], arrays))
                outs = jtu.tree_map(lambda x: x[None], outs)
            elif group > 1:
                carry, outs = _scan_groups(body, carry, arrays, count, group)
            else:
                carry, outs = jax.lax.scan(body, carry, arrays)
            sections.append(outs)
        return carry, LayerStack(tuple(sections), self.repeats)


def _scan_groups(body: Callable, carry: Any, arrays: Any, count: int, group: int) -> tuple[Any, Any]:
    """`jax.lax.scan` whose gradient keeps the carries between groups of `group` steps only; the rest is one more."""
    whole = count // group * group
    inner = jax.checkpoint(lambda carry, arrays: jax.lax.scan(body, carry, arrays))
    first = jtu.tree_map(lambda x: x[:whole].reshape(whole // group, group, *x.shape[1:]), arrays)
    carry, outs = jax.lax.scan(inner, carry, first)
    outs = jtu.tree_map(lambda x: x.reshape(whole, *x.shape[2:]), outs)
    if whole < count:
        carry, last = inner(carry, jtu.tree_map(lambda x: x[whole:], arrays))
        outs = jtu.tree_map(lambda *parts: jnp.concatenate(parts), outs, last)
    return carry, outs


def stack_layers(layers: Sequence[Any]) -> LayerStack:
    """Stacks layers, equal units of them along a leading axis. Shapes may stand in the place of arrays."""
    sections, repeats, start = [], [], 0
    for length, count in plan_sections([signature(layer) for layer in layers]):
        members = layers[start : start + length * count]
        sections.append(tuple(_join(members[position::length]) for position in range(length)))
        repeats.append(count)
        start += length * count
    return LayerStack(tuple(sections), tuple(repeats))


def plan_sections(signatures: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Cuts a sequence into `(unit length, repeats)` so that the units, which are what is compiled, are fewest in
    sum."""
    size = len(signatures)
    best: list[tuple[int, list[tuple[int, int]]]] = [(0, [])] * (size + 1)
    for start in range(size - 1, -1, -1):
        options = []
        for length in range(1, size - start + 1):
            unit = list(signatures[start : start + length])
            count = 1
            while list(signatures[start + count * length : start + (count + 1) * length]) == unit:
                count += 1
            cost, rest = best[start + length * count]
            options.append((length + cost, [(length, count), *rest]))
        best[start] = min(options, key=lambda option: (option[0], len(option[1])))
    return best[0][1]


def signature(layer: Any) -> Hashable:
    """What two layers must share to be stacked: structure, static parts, shapes and dtypes."""
    leaves, structure = jtu.tree_flatten(layer)
    return structure, tuple(
        (leaf.shape, str(leaf.dtype)) if eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct) else leaf
        for leaf in leaves
    )


def _slice(layer: Any, index: int | slice) -> Any:
    return jtu.tree_map(lambda leaf: leaf[index] if eqx.is_array(leaf) else leaf, layer)


def _lead(layer: Any) -> Any:
    return jtu.tree_map(lambda leaf: leaf[None] if eqx.is_array(leaf) else leaf, layer)


def _join(layers: Sequence[Any]) -> Any:
    def join(first: Any, *others: Any) -> Any:
        if isinstance(first, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct((1 + len(others), *first.shape), first.dtype)
        return jnp.stack((first, *others)) if eqx.is_array(first) else first

    return jtu.tree_map(join, *layers)
