"""Which parameters train, by the names that checkpoints give them; and which of those decay."""

import fnmatch
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np

from kimi_zoo.checkpoints.rows import EXPERT
from kimi_zoo.checkpoints.tables import kimi_linear as table
from kimi_zoo.models.kimi_linear import KimiLinear

NOT_DECAYED = ("norm.weight", "a_log", "dt_bias", "bias", "conv.weight")
BALANCING_BIAS = "router.score_bias"  # moved by its own rule, never by a gradient
SCALES = (".scales",)  # of quantised weights
WRAPPER = "base"  # the field of a LoRA module that holds the frozen one: not part of a parameter's name

Place = tuple[int | None, int | None, str]  # section and position in the stack (None outside of it), path in the block


def place_of(path: tuple[Any, ...]) -> Place:
    """Where a leaf of a model is, from its path in the tree."""
    fields = [entry.name for entry in path if isinstance(entry, jtu.GetAttrKey) and entry.name != WRAPPER]
    if fields[0] != "layers":
        return None, None, ".".join(fields)
    section, position = (entry.idx for entry in path if isinstance(entry, jtu.SequenceKey))
    return section, position, ".".join(fields[2:])


def published_names(model: KimiLinear) -> dict[Place, list[str]]:
    """The names that checkpoints give the parameter at each place: one, or one per layer of a stack.

    The experts of a layer have one name, with `*` for their number.
    """
    names: dict[Place, list[str]] = {}
    for entry in table.entries(model.config):
        section, position, _ = (None, None, 0) if entry.layer is None else model.layers.locate(entry.layer)
        names.setdefault((section, position, entry.row.leaf), []).append(entry.name(0).replace(EXPERT, "*"))
    return names


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns, as of a shell, fits the whole name or its end behind a dot, with or without the last
    `.weight`."""
    spellings = {name, name.removesuffix(".weight")}
    return any(fnmatch.fnmatchcase(n, p) or fnmatch.fnmatchcase(n, f"*.{p}") for p in patterns for n in spellings)


def select(model: KimiLinear, *, train: Sequence[str] = ("*",), freeze: Sequence[str] = ()) -> Any:
    """A tree like the model that says of every leaf whether it trains: a boolean, or one per layer of a stack.

    **Arguments:** patterns such as `"model.layers.3.*"`, `"A_log"`, `"*norm.weight"`: see `matches`. A parameter trains
    if one of `train` and none of `freeze` fits its published name. The routers' balancing bias never does.

    **Raises:** `ValueError` for a pattern that fits no parameter.
    """
    names = published_names(model)
    every = [name for group in names.values() for name in group]
    for pattern in (*train, *freeze):
        if not any(matches(name, (pattern,)) for name in every):
            raise ValueError(f"The pattern {pattern!r} fits no parameter. Names are like {_samples(every)}.")

    def wanted(path: tuple[Any, ...], leaf: Any) -> bool | np.ndarray:
        place = place_of(path)
        if not eqx.is_inexact_array(leaf) or place[2].endswith(BALANCING_BIAS) or place not in names:
            return False
        chosen = np.asarray([matches(name, train) and not matches(name, freeze) for name in names[place]])
        return bool(chosen[0]) if chosen.all() or not chosen.any() else chosen

    return jtu.tree_map_with_path(wanted, model)


def trains(wanted: Any) -> Any:
    """The same tree with one boolean per leaf: whether any layer of it trains."""
    return jax.tree.map(lambda choice: bool(np.any(choice)), wanted)


def decays(tree: Any) -> Any:
    """A tree of booleans: weight decay for matrices; none for norms, biases, convolutions, `a_log` and `dt_bias`."""
    return jtu.tree_map_with_path(lambda path, _: not place_of(path)[2].endswith(NOT_DECAYED), tree)


def summary(model: Any, wanted: Any) -> Iterator[tuple[str, int, int]]:
    """Rows for a table: name below the layer, number of parameters, how many of them train. The scales of quantised
    weights are no parameters."""
    rows: dict[str, list[int]] = {}
    leaves = jtu.tree_leaves_with_path(model)
    for (path, leaf), choice in zip(leaves, jax.tree.leaves(wanted), strict=True):
        name = place_of(path)[2]
        if eqx.is_array(leaf) and not name.endswith(SCALES):
            row = rows.setdefault(name, [0, 0])
            row[0] += leaf.size
            row[1] += round(leaf.size * float(np.mean(choice)))
    return ((name, total, training) for name, (total, training) in rows.items())


def table_of(model: Any, wanted: Any, limit: int = 11) -> Iterator[str]:
    """Lines that tell what trains: a sum, and the largest `limit` rows of `summary` of which something does."""
    rows = list(summary(model, wanted))
    training = sorted((row for row in rows if row[2]), key=lambda row: -row[2])
    total, trained = sum(row[1] for row in rows), sum(row[2] for row in rows)
    yield f"trains {trained:,} of {total:,} parameters:"
    shown = training if len(training) <= limit else training[: limit - 1]
    for name, size, part in shown:
        yield f"  {part:>14,}  {name}" + (f" (of {size:,})" if part < size else "")
    if rest := training[len(shown) :]:
        yield f"  {sum(row[2] for row in rest):>14,}  in {len(rest)} smaller groups"


def _samples(names: list[str]) -> str:
    return ", ".join(names[:: max(1, len(names) // 5)][:6])
