"""What trained beside LoRA's deltas (norms, `A_log`, whole layers, the balancing bias), in the file of the adapter."""

from collections.abc import Iterable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from kimi_zoo.checkpoints.files import CheckpointError
from kimi_zoo.checkpoints.rows import Entry, get_leaf
from kimi_zoo.checkpoints.safetensors import AbstractCheckpoint
from kimi_zoo.checkpoints.tables import kimi_linear as table
from kimi_zoo.models.kimi_linear import KimiLinear
from kimi_zoo.training.quantization import QuantizedExperts, QuantizedLinear, dequantized
from kimi_zoo.training.trainable import Place, place_of


def beside_tensors(model: KimiLinear, chosen: Any) -> dict[str, Any]:
    """The chosen parameters by published name, in published shapes.

    **Arguments:** `chosen`: a tree like the model, as of `trainable.select`. Deltas in it are passed over.
    """
    places: dict[Place, tuple[Any, Any]] = {}
    for (path, leaf), choice in zip(jtu.tree_leaves_with_path(model), jax.tree.leaves(chosen), strict=True):
        if np.any(choice):
            places[place_of(path)] = leaf, choice
    tensors: dict[str, Any] = {}
    for entry in table.entries(model.config):
        *place, repeat = (None, None, None) if entry.layer is None else model.layers.locate(entry.layer)
        leaf, choice = places.get((place[0], place[1], entry.row.leaf), (None, False))
        if leaf is None or not np.broadcast_to(choice, leaf.shape[:1])[repeat or 0]:
            continue
        for name, index in _parts(entry, repeat, leaf.shape):
            part = leaf[index]
            tensors[name] = part.reshape(entry.row.shapes[0]) if entry.row.shapes else part
    return tensors


def with_beside(model: KimiLinear, checkpoint: AbstractCheckpoint, prefix: str) -> tuple[KimiLinear, set[str]]:
    """The model with the parameters that a file holds whole, as `prefix` and a published name; and the file's names
    that were used. Quantised layers among them become plain ones.

    **Raises:** `CheckpointError` for a tensor of another size than the parameter.
    """
    used: set[str] = set()
    for entry in table.entries(model.config):
        repeat = None if entry.layer is None else model.layers.locate(entry.layer)[2]
        experts = model.config.num_experts if entry.per_expert else 0
        for name, index in _parts(entry, repeat, (0, experts)):
            if f"{prefix}{name}" not in checkpoint:
                continue
            model = _plain(model, entry)
            leaf = _parameter(model, entry)
            if leaf is None:
                raise CheckpointError(f"{prefix}{name} is of the adapter, but not of this model.")
            value = checkpoint.read(f"{prefix}{name}")
            if value.size != leaf[index].size:
                raise CheckpointError(
                    f"{prefix}{name} of the adapter has shape {list(value.shape)}; the model has "
                    f"{list(leaf[index].shape)}."
                )
            value = jnp.asarray(value, jnp.float32).reshape(leaf[index].shape)
            new = leaf.astype(jnp.float32).at[index].set(value)
            model = eqx.tree_at(lambda m, entry=entry: _parameter(m, entry), model, new)
            used.add(f"{prefix}{name}")
    return model, used


def modules(names: Iterable[str]) -> set[str]:
    """The tensors that are whole modules, as PEFT's `modules_to_save` wants them: neither single parameters of a larger
    module nor experts, which transformers holds together."""
    return {name.removesuffix(".weight") for name in names if name.endswith(".weight") and ".experts." not in name}


def _parts(entry: Entry, repeat: int | None, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names of an entry's tensors, and where they are in its parameter."""
    start = () if repeat is None else (repeat,)
    for expert in range(shape[1]) if entry.per_expert else (None,):
        yield entry.name(0, expert), start if expert is None else (*start, expert)


def _block(model: KimiLinear, entry: Entry) -> Any:
    if entry.layer is None:
        return model
    section, position, _ = model.layers.locate(entry.layer)
    return model.layers.sections[section][position]


def _parameter(model: KimiLinear, entry: Entry) -> Any:
    return get_leaf(_block(model, entry), entry.row.leaf)


def _plain(model: KimiLinear, entry: Entry) -> KimiLinear:
    """The model, the layer of a parameter no longer quantised."""
    parent = lambda m: get_leaf(_block(m, entry), entry.row.leaf.rpartition(".")[0])
    if isinstance(parent(model), QuantizedLinear | QuantizedExperts):
        return eqx.tree_at(parent, model, dequantized(parent(model)))
    return model
