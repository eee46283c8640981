"""One iteration of a Megatron run: finding it, and reading what it says about itself."""

import math
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kimi_zoo.checkpoints.blocks import Blocks
from kimi_zoo.checkpoints.files import CheckpointError, list_some
from kimi_zoo.checkpoints.megatron_args import PARALLEL
from kimi_zoo.checkpoints.megatron_legacy import Legacy, is_legacy, open_legacy
from kimi_zoo.checkpoints.megatron_names import OUTER, STACKED, Key, is_ignored, parse_name
from kimi_zoo.checkpoints.pickles import StandIn
from kimi_zoo.checkpoints.tables.megatron import INSIDE, OUTSIDE, PREDICTION
from kimi_zoo.checkpoints.torch_dist import DistCheckpoint, is_dist_checkpoint, open_dist_checkpoint
from kimi_zoo.checkpoints.torch_files import open_torch_file, plain

TRACKER = "latest_checkpointed_iteration.txt"
COMMON = "common.pt"
ITERATION = re.compile(r"iter_\d{7,}")
# beside the model in a distributed checkpoint
BESIDE = re.compile(
    r"(optimizer|optimizer_state|chained_\d+|opt_param_scheduler|rng_state|rerun_state_machine|grad_scaler|"
    r"common_state|args|iteration|checkpoint_version|num_floating_point_operations_so_far|content_metadata)([./].*)?",
    re.DOTALL,
)
OPTIMIZER = re.compile(r"(optimizer|optimizer_state|chained_\d+)[./].*", re.DOTALL)

SINGLETON = re.compile(r"\.experts\.experts\.\d+\.")

SPLIT_AXES = {row.name: row for row in (*OUTSIDE, *INSIDE, *PREDICTION)}


@dataclass
class Run:
    """What lies in a checkpoint folder.

    - `kind`: `"torch_dist"`, `"fsdp_dtensor"` or `"legacy"`. `files`: bytes by file.
    - `args`: the arguments of the run as plain values, `None` if there are none. `iteration`: of training.
    - `parallel`: what it was split over: `{"TP": 2, ...}`.
    - `source`: the parameters, whole (by key) or by rank. `keys`: of all of them. `shapes`: over the whole model.
    - `experts`: how experts are named: `"te_grouped"`, `"sequential"`, `"grouped"` in the legacy format, `"singleton"`
        where a distributed one has them and the halves of SwiGLU by themselves, else empty.
    - `unknown`: names that are not those of a parameter. `left_out`: what -> how many entries are not of the model.
    """

    folder: Path
    kind: str
    args: dict[str, Any] | None
    iteration: int | None
    parallel: dict[str, int]
    source: dict[Key, Blocks] | Legacy
    keys: set[Key]
    shapes: dict[Key, tuple[int, ...]]
    unknown: list[str]
    left_out: dict[str, int]
    optimizer: dict[str, Blocks] = field(default_factory=dict)
    experts: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def files(self) -> dict[str, int]:
        """Every file of the iteration, and its bytes."""
        found = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return {path.relative_to(self.folder).as_posix(): path.stat().st_size for path in found}

    @property
    def shown(self) -> dict[str, Blocks]:
        """The parameters under Megatron's own names; of a legacy checkpoint, each rank's piece by itself."""
        if not isinstance(self.source, Legacy):
            return {str(key): tensor for key, tensor in self.source.items()}
        return {
            f"{part.file.parent.name}/{key}": part.tensor for key, parts in self.source.parts.items() for part in parts
        }

    @property
    def nbytes(self) -> int:
        """Bytes of the model's parameters as stored, copies included."""
        if isinstance(self.source, Legacy):
            return self.source.nbytes
        return sum(tensor.nbytes for tensor in self.source.values())


def find_iteration(path: Path) -> Path:
    """The folder of the iteration to read: `path` itself, or the one that the tracker file in it names.

    **Raises:** `CheckpointError` that lists what is there if that is not it.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder; a Megatron checkpoint is one.")
    if is_dist_checkpoint(path) or is_legacy(path):
        return path
    present = sorted(
        e.name for e in path.iterdir() if e.is_dir() and (ITERATION.fullmatch(e.name) or e.name == "release")
    )
    tracker = path / TRACKER
    if tracker.is_file():
        text = tracker.read_bytes()[:100].decode("utf-8", "replace").strip()
        if text != "release" and not re.fullmatch(r"\d{1,18}", text):
            raise CheckpointError(f"{tracker} must hold the number of an iteration, or 'release'; it holds {text!r}.")
        name = text if text == "release" else f"iter_{int(text):07d}"
        if name not in present:
            raise CheckpointError(f"{tracker} names {name}, which is not there; present: {list_some(present)}.")
        return path / name
    if len(present) == 1:
        return path / present[0]
    if present:
        raise CheckpointError(
            f"{path} has no {TRACKER} and several iterations: {list_some(present)}. Give one of them."
        )
    raise CheckpointError(f"{path} holds no Megatron checkpoint: no {TRACKER}, iter_*, .metadata or mp_rank_*.")


def open_run(path: Path) -> Run:
    """Opens the files of an iteration and sorts what is in them."""
    folder = find_iteration(path)
    if is_legacy(folder):
        return _legacy_run(folder)
    if not is_dist_checkpoint(folder):
        present = list_some(sorted(entry.name for entry in folder.iterdir()))
        raise CheckpointError(f"{folder} holds no checkpoint: no .metadata, no mp_rank_*. It holds {present}.")
    return _dist_run(folder)


def _legacy_run(folder: Path) -> Run:
    legacy = open_legacy(folder)
    layout = legacy.layout
    parallel = {"TP": layout.tp, "PP": layout.pp, "VPP": layout.vpp, "EP": layout.ep, "ETP": layout.etp}
    shapes = {}
    for key, parts in legacy.parts.items():
        shape = parts[0].tensor.shape
        row = SPLIT_AXES.get(key.name)
        if row is not None and row.axis is not None and len(shape) > row.axis and not row.replicable:
            ranks = layout.etp if row.expert else layout.tp
            shape = (*shape[: row.axis], shape[row.axis] * ranks, *shape[row.axis + 1 :])
        shapes[key] = shape
    run = Run(
        folder, "legacy", legacy.args, legacy.iteration, parallel, legacy, set(legacy.parts), shapes,
        legacy.unknown, dict(legacy.left_out), experts=legacy.experts,
    )  # fmt: skip
    _check_iteration(run)
    return run


def _dist_run(folder: Path) -> Run:
    stored = open_dist_checkpoint(folder)
    common = _common(folder, stored)
    args = common.get("args")
    args = args.fields if isinstance(args, StandIn) else args
    args = {str(name): plain(value) for name, value in args.items()} if isinstance(args, dict) else None
    iteration = common.get("iteration")
    left_out: dict[str, int] = defaultdict(int)
    tensors: dict[Key, Blocks] = {}
    names: dict[Key, str] = {}
    unknown: list[str] = []
    optimizer: dict[str, Blocks] = {}
    for name in stored.objects:
        kind = "entries of the optimizer" if OPTIMIZER.fullmatch(name) else "other entries"
        left_out["state of fp8 scaling and the like" if is_ignored(name) else kind] += 1
    for name, tensor in stored.tensors.items():
        if OPTIMIZER.fullmatch(name):
            optimizer[name] = tensor
            left_out["entries of the optimizer"] += 1
        elif BESIDE.fullmatch(name) or is_ignored(name):
            left_out["other entries"] += 1
        elif (key := parse_name(name)) is None:
            unknown.append(name)
        elif key in tensors:
            raise CheckpointError(f"{folder} holds {key} twice, as {names[key]:.100} and as {name:.100}.")
        else:
            tensors[key], names[key] = tensor, name
    tensors = unstacked(tensors, folder)
    parallel = {short: (args or {}).get(name) for name, short in PARALLEL.items()}
    sharded = any(name.startswith("model.module.") for name in names.values())
    run = Run(
        folder, "fsdp_dtensor" if sharded else "torch_dist", args, iteration if type(iteration) is int else None,
        {name: size for name, size in parallel.items() if type(size) is int}, tensors, set(tensors),
        {key: tensor.shape for key, tensor in tensors.items()}, unknown, dict(left_out), optimizer,
        "singleton" if any(SINGLETON.search(name) for name in names.values()) else "",
    )  # fmt: skip
    _check_iteration(run)
    return run


def _common(folder: Path, stored: DistCheckpoint) -> dict[str, Any]:
    """What is common to all ranks: a file of its own, an object, or entries by name."""
    if (folder / COMMON).is_file():
        value = open_torch_file(folder / COMMON).value
        if not isinstance(value, dict):
            raise CheckpointError(f"{folder / COMMON} holds no dictionary.")
        return value
    for name in stored.objects:
        if name.split("/")[0] == "common_state":
            value = stored.read_object(name)
            value = value[0] if isinstance(value, list) and value else value  # objects are stored in a list
            return value if isinstance(value, dict) else {}
    return {name: stored.read_object(name) for name in ("args", "iteration") if name in stored.objects}


def unstacked(tensors: dict[Key, Blocks], folder: Path) -> dict[Key, Blocks]:
    """Layers and experts one by one, where one tensor holds all of them."""
    out: dict[Key, Blocks] = {}

    def put(key: Key, tensor: Blocks) -> None:
        if key in out:
            raise CheckpointError(f"{folder} holds {key} twice: by itself and in a tensor for all layers or experts.")
        out[key] = tensor

    for key, tensor in tensors.items():
        layers = [(key, tensor)]
        if key.place.kind == "layer" and key.place.number == STACKED:
            if not tensor.shape:
                raise CheckpointError(f"{folder}: {key} has no axis for the layers.")
            layers = [
                (key._replace(place=key.place._replace(number=layer)), item)
                for layer, item in enumerate(tensor.items())
            ]
        for layer_key, layer in layers:
            if layer_key.expert == STACKED and not key.name.endswith(("weight1", "weight2")):
                if not layer.shape:
                    raise CheckpointError(f"{folder}: {key} has no axis for the experts.")
                for expert, item in enumerate(layer.items()):
                    put(layer_key._replace(expert=expert), item)
            else:
                put(layer_key, layer)
    return out


def _check_iteration(run: Run) -> None:
    match = re.fullmatch(r"iter_(\d+)", run.folder.name)
    if match and run.iteration is not None and int(match[1]) != run.iteration:
        run.notes.append(f"The folder is named {run.folder.name}, but iteration {run.iteration} is stored in it.")


def embedding_rows(run: Run) -> int | None:
    """Rows of the embedding, padding included."""
    shape = run.shapes.get(Key(OUTER, "embedding.word_embeddings.weight"))
    return shape[0] if shape and math.prod(shape) else None
