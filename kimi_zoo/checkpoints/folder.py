"""Checkpoint folders <-> models: `from_pretrained`, `save_pretrained`, `to_tensors`."""

import dataclasses
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from tqdm import tqdm

from kimi_zoo.bundled import find_weights
from kimi_zoo.checkpoints.configs import prediction_layers, read_config, write_config
from kimi_zoo.checkpoints.files import (
    CARRIED,
    CheckpointError,
    aligned_empty,
    atomic_folder,
    join_problems,
    list_some,
    write_json,
)
from kimi_zoo.checkpoints.quantized import dequantize
from kimi_zoo.checkpoints.rows import Entry, get_leaf, shape_text
from kimi_zoo.checkpoints.safetensors import AbstractCheckpoint, LazyTensor, open_checkpoint, save_tensors
from kimi_zoo.checkpoints.safetensors_saving import file_order, plan_files
from kimi_zoo.checkpoints.skeleton import differences, model_skeleton, with_dtypes
from kimi_zoo.checkpoints.sources import (
    PublishedTensors,
    open_source,
    published_config,
    read_given_config,
    recognise_other,
)
from kimi_zoo.checkpoints.tables import kimi_linear as table
from kimi_zoo.models.kimi_linear import KimiLinear, KimiLinearConfig, Published, with_published
from kimi_zoo.models.kimi_linear_partition import RULES, check_mesh
from kimi_zoo.parallel.axes import Parallelism, as_parallelism
from kimi_zoo.parallel.partition import shardings
from kimi_zoo.parallel.processes import is_first, wait_for_all, whole_value

logger = logging.getLogger("kimi_zoo")


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a parameter comes from: its row, the spelling and shape found, and the tensors, one per expert if there are
    several."""

    entry: Entry
    spelling: tuple[int, int]
    names: tuple[str, ...]


def from_pretrained(
    path: str | Path,
    *,
    config: str | Path | Mapping[str, Any] | None = None,
    dtype: Any = None,
    mesh: Parallelism | Mesh | str | None = None,
    progress: bool = False,
) -> KimiLinear:
    """Loads a model from a checkpoint folder: in published layout, or of Megatron or torch (see `kimi_zoo.convert`).

    Every tensor is copied once, from the memory-mapped file to its place; nothing is initialised first.

    **Arguments:**

    - `path`: a folder with `config.json` and safetensors files, a Megatron checkpoint, torch files with published
        names, or the name of bundled weights.
    - `config`: a `config.json`, its folder or its fields: what the checkpoint itself does not state.
    - `dtype`: floating-point dtype to convert to while reading; `None` keeps the stored dtypes. `a_log`, `dt_bias` and
        the router's balancing bias are float32 always.
    - `mesh`: devices to spread the parameters over, such as `"fsdp=4,tensor=2"`, as `kimi_linear_partition` says; each
        process reads its own slices only. `None` places them on the default device.
    - `progress`: whether to show a progress bar.

    **Raises:** `CheckpointError` (a `ValueError`) that lists everything which does not fit: the configuration,
    unreadable files, missing, unexpected and wrongly shaped tensors; another `dtype` than float32, bfloat16 or float16.
    """
    target = weight_dtype(dtype)
    folder = find_weights(path)
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not a folder. Give the folder that holds config.json and the safetensors files."
        )
    with _open(folder, config) as (settled, raw, checkpoint):
        root = _find_root(checkpoint, folder)
        _check_depth(checkpoint, settled.num_hidden_layers, prediction_layers(raw), root)
        settled = table.adapt_config(settled, checkpoint)
        skeleton = model_skeleton(settled)
        sources, problems = _match(checkpoint, skeleton, settled, root)
        tied_head, more = _leftovers(checkpoint, sources, settled, root)
        problems += more
        if problems:
            raise CheckpointError(
                f"{folder} does not hold the model that its config.json describes:\n" + join_problems(problems)
            )
        spellings = tuple((source.entry.name(0), source.spelling) for source in sources if source.spelling != (0, 0))
        published = Published(root, spellings, tied_head, str(folder.resolve()), json.dumps(raw))
        skeleton = with_dtypes(with_published(skeleton, published), _dtypes(checkpoint, sources, target))
        parallelism = as_parallelism(mesh)
        if parallelism is not None:
            check_mesh(settled, parallelism)
        return _fill(skeleton, checkpoint, sources, parallelism, progress)


def weight_dtype(dtype: Any) -> np.dtype | None:
    """The dtype that weights are asked for in; `None` stays `None`.

    **Raises:** `CheckpointError` for another one than float32, bfloat16 or float16.
    """
    if dtype is None:
        return None
    try:
        wanted = jnp.dtype(dtype)
    except TypeError:
        wanted = None
    if wanted not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise CheckpointError(f"`dtype` of weights is float32, bfloat16, float16 or None (as stored); got {dtype!r}.")
    return wanted


@contextmanager
def _open(
    folder: Path, given: str | Path | Mapping[str, Any] | None
) -> Iterator[tuple[KimiLinearConfig, dict[str, Any], AbstractCheckpoint]]:
    """The configuration, its fields, and the tensors of a folder in any format."""
    if given is None and recognise_other(folder) is None:
        config, raw = read_config(folder)
        with open_checkpoint(folder) as stored:
            yield config, raw, dequantize(stored, raw)
        return
    with open_source(folder, config=read_given_config(given)) as opened:
        if opened.config is None:
            raise CheckpointError(f"{folder} holds no config.json of a family this package has, 'kimi_linear'.")
        for note in opened.notes:
            logger.info("%s", note)
        yield opened.config, published_config(opened), PublishedTensors(opened)


def to_tensors(model: KimiLinear) -> dict[str, jax.Array]:
    """Published tensor name -> array, for a model or for anything of its shape, such as a gradient or an optimizer's
    moments.

    Leaves that are `None` are left out. Names and shapes are those of the checkpoint that the model was loaded from.
    """
    return {name: take() for name, (_, _, take) in _outgoing(model).items()}


def save_pretrained(
    model: KimiLinear,
    path: str | Path,
    *,
    dtype: Any = None,
    max_shard_size: int | str = "5GB",
    keep_left_out: bool = False,
    overwrite: bool = False,
) -> None:
    """Writes a checkpoint folder in published layout, which transformers and mlx-lm read: weights, `config.json`, and
    the tokenizer and generation files of the folder that the model was loaded from.

    The folder appears at once and whole, or not at all. Parameters that are spread over devices are gathered one tensor
    at a time. With several processes, all call this, and the first one writes.

    **Arguments:**

    - `dtype`: floating-point dtype to store; `None` keeps that of each parameter. `a_log`, `dt_bias` and the router's
        balancing bias are stored in float32 always.
    - `max_shard_size`: bytes of tensors per file, or text such as `"200MB"`.
    - `keep_left_out`: whether the tensors that loading left out (a vision part, prediction layers) are copied, as they
        are, from the folder the model was loaded from.
    - `overwrite`: whether an existing checkpoint folder may be replaced.

    A model built with tied embeddings is written with its output head all the same, since not every reader ties it; a
    loaded one as it came.

    **Raises:** `CheckpointError` for an existing folder, a model that is no longer the one its `config` describes
    (another structure, setting or shape, LoRA deltas), another `dtype` than float32, bfloat16 or float16, or
    `keep_left_out` without that folder.
    """
    target = weight_dtype(dtype)
    if found := list(differences(model)):
        raise CheckpointError(
            "This model is not the one that its configuration describes, and what is written would be read as that "
            f"one:\n{join_problems(found)}\nMerge LoRA deltas with `merge_lora`, or write them alone with "
            "`save_adapter`; write any other model with equinox.tree_serialise_leaves."
        )
    outgoing = _outgoing(model)
    tensors = {}
    for name, (entry, shape, take) in outgoing.items():
        kept = np.float32 if entry.row.leaf in table.FLOAT32_LEAVES else target or _leaf(model, entry).dtype
        tensors[name] = LazyTensor(shape, np.dtype(kept), _cast(take, kept))
    if not is_first():
        for names in plan_files(tensors, max_shard_size).values():
            for name in file_order(names, tensors):  # takes part in gathering each
                tensors[name].load()
        wait_for_all("model saved")
        return
    if keep_left_out:
        tensors |= _left_out(model, set(tensors))
    sizes: dict[str, int] = {}
    for tensor in tensors.values():
        sizes[str(tensor.dtype)] = sizes.get(str(tensor.dtype), 0) + int(np.prod(tensor.shape))
    raw = None if model.published.config is None else json.loads(model.published.config)
    source = Path(model.published.source) if model.published.source else None
    with atomic_folder(path, overwrite=overwrite) as folder:
        save_tensors(tensors, folder, max_shard_size=max_shard_size)
        write_json(folder / "config.json", write_config(model.config, raw, max(sizes, key=sizes.__getitem__)))
        for name in CARRIED:
            if source is not None and (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
    wait_for_all("model saved")


def _left_out(model: KimiLinear, written: set[str]) -> dict[str, LazyTensor]:
    """The tensors of the folder that the model was loaded from which are not its parameters, read when written."""
    source = model.published.source
    if source is None or not Path(source).is_dir():
        where = "was not loaded from a folder" if source is None else f"was loaded from {source}, which is gone"
        raise CheckpointError(f"`keep_left_out` copies tensors from where the model came from, but this one {where}.")
    checkpoint = dequantize(open_checkpoint(source), json.loads(model.published.config or "{}"))
    return {
        name: LazyTensor(info.shape, info.dtype, lambda name=name: checkpoint.read(name))
        for name, info in checkpoint.tensors.items()
        if name not in written
    }


def _cast(take: Callable[[], jax.Array], dtype: Any) -> Callable[[], np.ndarray]:
    return lambda: whole_value(take()).astype(dtype, copy=False)


def _find_root(checkpoint: AbstractCheckpoint, folder: Path) -> str:
    """What all names of the language model begin with."""
    roots = [root for root in table.ROOTS if f"{root}model.embed_tokens.weight" in checkpoint]
    if len(roots) != 1:
        expected = " or ".join(f"{root}model.embed_tokens.weight" for root in table.ROOTS)
        found = (
            "both"
            if roots
            else f"neither among its {len(checkpoint)} tensors, such as {list_some(list(checkpoint)[:5])}"
        )
        raise CheckpointError(f"{folder} should hold one tensor {expected}; it has {found}.")
    return roots[0]


def _layer_number(name: str, root: str) -> int | None:
    match = re.match(rf"{re.escape(root)}model\.layers\.(\d+)\.", name)
    return None if match is None else int(match[1])


def _check_depth(checkpoint: AbstractCheckpoint, layers: int, prediction: int, root: str) -> None:
    """Checks the number of layers before any is built; `prediction` more may be there, which are left out."""
    numbers = [number for name in checkpoint if (number := _layer_number(name, root)) is not None]
    stored = 1 + max(numbers, default=-1)
    if not layers <= stored <= layers + prediction:
        beyond = f" and num_nextn_predict_layers {prediction}" if prediction else ""
        raise CheckpointError(
            f"tensors of {stored} layers are here, but in config.json num_hidden_layers is {layers}{beyond}."
        )


def _match(
    checkpoint: AbstractCheckpoint, skeleton: KimiLinear, config: KimiLinearConfig, root: str
) -> tuple[list[Source], list[str]]:
    """The tensors that fill each parameter, and what is wrong with them."""
    sources, problems = [], []
    for entry in table.entries(config, root):
        leaf = _leaf(skeleton, entry)
        shape = leaf.shape[1:] if entry.layer is not None else leaf.shape
        experts: tuple[int | None, ...] = tuple(range(shape[0])) if entry.per_expert else (None,)
        shapes = entry.row.shapes or (shape[1:] if entry.per_expert else shape,)
        spelling = next((i for i in range(len(entry.row.names)) if entry.name(i, experts[0]) in checkpoint), 0)
        names = tuple(entry.name(spelling, expert) for expert in experts)
        missing = [name for name in names if name not in checkpoint]
        problems += [f"{name} is missing; expected shape {shape_text(shapes)}" for name in missing]
        present = [checkpoint.tensors[name] for name in names if name not in missing]
        wrong = [info for info in present if info.shape not in shapes]
        problems += [f"{i.name} has shape {list(i.shape)}; expected {shape_text(shapes)}" for i in wrong]
        problems += [
            f"{i.name} is stored as {i.dtype}; expected floating point" for i in present if not _floating(i.dtype)
        ]
        if not missing and not wrong:
            sources.append(Source(entry, (spelling, shapes.index(present[0].shape)), names))
    return sources, problems


def _floating(dtype: np.dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def _leftovers(
    checkpoint: AbstractCheckpoint, sources: list[Source], config: KimiLinearConfig, root: str
) -> tuple[bool, list[str]]:
    """Whether a tied model stores its head all the same, and the tensors that no row wants."""
    used = {name for source in sources for name in source.names}
    left = [name for name in checkpoint if name not in used]
    head, tied_head = f"{root}lm_head.weight", False
    if config.tie_word_embeddings and head in left:
        tied_head = True
        left.remove(head)
        embedding = f"{root}model.embed_tokens.weight"
        if not np.array_equal(checkpoint.read(head), checkpoint.read(embedding)):
            logger.warning(
                "%s differs from %s though the config ties them: the embedding is used for both, as the config says.",
                head,
                embedding,
            )
        for name in (head, embedding):
            checkpoint.release(name)
    predicted = [name for name in left if (_layer_number(name, root) or 0) >= config.num_hidden_layers]
    vision = [name for name in left if root and any(re.fullmatch(pattern, name) for pattern in table.VISION)]
    for names, what in (
        (predicted, "layers past num_hidden_layers (multi-token prediction)"),
        (vision, "the vision part"),
    ):
        if names:
            logger.info("Left out %d tensors of %s, such as %s.", len(names), what, names[0])
    known = {*predicted, *vision}
    unexpected = [n for n in left if n not in known and not any(re.fullmatch(p, n) for p in table.IGNORED)]
    return tied_head, [f"{name} {list(checkpoint.tensors[name].shape)} is not expected" for name in unexpected]


def _leaf(model: KimiLinear, entry: Entry) -> Any:
    """The parameter of an entry, with the stack's axis if it belongs to a layer."""
    if entry.layer is None:
        return get_leaf(model, entry.row.leaf)
    section, position, _ = model.layers.locate(entry.layer)
    return get_leaf(model.layers.sections[section][position], entry.row.leaf)


def _outgoing(model: KimiLinear) -> dict[str, tuple[Entry, tuple[int, ...], Callable[[], jax.Array]]]:
    """Tensor name -> entry, published shape, and a function that takes the array out of the model."""
    spellings = dict(model.published.spellings)
    out: dict[str, tuple[Entry, tuple[int, ...], Callable[[], jax.Array]]] = {}
    for entry in table.entries(model.config, model.published.root):
        leaf = _leaf(model, entry)
        if leaf is None:
            continue
        name, shape = spellings.get(entry.name(0), (0, 0))
        index = () if entry.layer is None else (model.layers.locate(entry.layer)[2],)
        for expert in range(leaf.shape[1]) if entry.per_expert else (None,):
            place = index if expert is None else (*index, expert)
            published = entry.row.shapes[shape] if entry.row.shapes else leaf.shape[len(place) :]
            out[entry.name(name, expert)] = (entry, published, _taker(leaf, place, published))
    if model.published.tied_head_stored:
        entry, shape, take = out[f"{model.published.root}model.embed_tokens.weight"]
        out[f"{model.published.root}lm_head.weight"] = (entry, shape, take)
    return out


def _taker(leaf: Any, place: tuple[int, ...], shape: tuple[int, ...]) -> Callable[[], jax.Array]:
    return lambda: leaf[place].reshape(shape)


def _dtypes(
    checkpoint: AbstractCheckpoint, sources: list[Source], target: np.dtype | None
) -> dict[tuple[int | None, str], np.dtype]:
    """The dtype to hold each parameter in: the one asked for, or the stored one, if all its tensors have it and JAX
    does."""
    out, changed = {}, []
    for source in sources:
        stored = {checkpoint.tensors[name].dtype for name in source.names}
        kept = target or next(iter(stored))
        if target is None and (len(stored) > 1 or kept == np.float64):
            kept = np.float32
            changed.append(source.names[0])
        leaf = source.entry.row.leaf
        out[source.entry.layer, leaf] = np.dtype(np.float32 if leaf in table.FLOAT32_LEAVES else kept)
    if changed:
        logger.warning(
            "%d parameters are stored as float64, or some of their experts in another dtype than others, such as %s: "
            "they are held, and would be saved, in float32.",
            len(changed),
            changed[0],
        )
    return out


def _fill(
    model: KimiLinear,
    checkpoint: AbstractCheckpoint,
    sources: list[Source],
    parallelism: Parallelism | None,
    progress: bool,
) -> KimiLinear:
    """Puts arrays in the place of the skeleton's leaves."""
    spread = None if parallelism is None else shardings(model, parallelism, RULES)
    parts: dict[tuple, dict[int, Source]] = {}
    for source in sources:
        layer = source.entry.layer
        section, position, repeat = (None, None, 0) if layer is None else model.layers.locate(layer)
        parts.setdefault((section, position, source.entry.row.leaf), {})[repeat] = source
    total = sum(checkpoint.tensors[name].nbytes for source in sources for name in source.names)
    with tqdm(total=total, unit="B", unit_scale=True, desc="loading", disable=not progress, leave=False) as bar:
        paths, arrays = [], []
        for (section, position, leaf), layers in parts.items():
            paths.append((section, position, leaf))
            sharding = None if spread is None else _find(spread, paths[-1])
            arrays.append(_read(checkpoint, layers, _find(model, paths[-1]), section is not None, sharding))
            bar.update(sum(checkpoint.tensors[name].nbytes for source in layers.values() for name in source.names))
    return eqx.tree_at(lambda m: [_find(m, path) for path in paths], model, arrays)


def _find(model: KimiLinear, path: tuple) -> Any:
    section, position, leaf = path
    return get_leaf(model if section is None else model.layers.sections[section][position], leaf)


def _read(
    checkpoint: AbstractCheckpoint,
    layers: Mapping[int, Source],
    leaf: jax.ShapeDtypeStruct,
    stacked: bool,
    sharding: NamedSharding | None,
) -> jax.Array:
    """One parameter: of the model, or of a stack of layers."""
    shape, wanted = leaf.shape, np.dtype(leaf.dtype)

    def read(index: tuple[slice, ...]) -> np.ndarray:
        ranges = [range(size)[part] for size, part in zip(shape, index, strict=True)]
        out = aligned_empty(tuple(len(r) for r in ranges), wanted)
        for row, layer in enumerate(ranges[0] if stacked else (0,)):
            place = out[row] if stacked else out
            inner, below = index[int(stacked) :], ranges[int(stacked) :]
            if not layers[layer].entry.per_expert:
                _copy(checkpoint, layers[layer].names[0], shape[int(stacked) :], inner, place)
                continue
            for number, expert in enumerate(below[0]):
                _copy(checkpoint, layers[layer].names[expert], shape[int(stacked) + 1 :], inner[1:], place[number])
        return out

    if sharding is None:
        return jax.device_put(read(tuple(slice(None) for _ in shape)))
    return jax.make_array_from_callback(shape, sharding, lambda index: read(index or ()))


def _copy(checkpoint: AbstractCheckpoint, name: str, shape: tuple, index: tuple[slice, ...], out: np.ndarray) -> None:
    """Copies `tensor.reshape(shape)[index]` into `out`."""
    if out.shape == shape:
        checkpoint.read_into(name, out.reshape(checkpoint.tensors[name].shape))
    else:
        out[...] = checkpoint.read(name).reshape(shape)[index]
        checkpoint.release(name)
