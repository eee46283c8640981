"""Checkpoints of any format, recognised by looking, as named tensors in published layout."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kimi_zoo.checkpoints.blocks import Blocks, Source, whole
from kimi_zoo.checkpoints.configs import parse_config, write_config
from kimi_zoo.checkpoints.files import CheckpointError, list_some, read_json
from kimi_zoo.checkpoints.megatron import Megatron, open_megatron
from kimi_zoo.checkpoints.megatron_names import parse_name
from kimi_zoo.checkpoints.megatron_run import TRACKER
from kimi_zoo.checkpoints.pickles import StandIn
from kimi_zoo.checkpoints.quantized import dequantize
from kimi_zoo.checkpoints.safetensors import AbstractCheckpoint, TensorInfo, check_copy, open_checkpoint
from kimi_zoo.checkpoints.torch_dist import is_dist_checkpoint, open_dist_checkpoint
from kimi_zoo.checkpoints.torch_files import open_torch_file
from kimi_zoo.checkpoints.torch_storage import StoredTensor
from kimi_zoo.models.kimi_linear_config import KimiLinearConfig

KINDS = {
    "safetensors": "safetensors in published layout",
    "torch .bin": "torch files in published layout",
    "distributed": "torch distributed checkpoint",
    "megatron": "Megatron",
}
TORCH_ENDINGS = (".bin", ".pt", ".pth")
EMBEDDING = "model.embed_tokens.weight"
WRAPPERS = re.compile(r"(_fsdp_wrapped_module|_orig_mod|_checkpoint_wrapped_module)\.")


@dataclass
class Opened:
    """A checkpoint, understood.

    - `kind`: one of `KINDS`. `detail`: that, in words for people.
    - `tensors`: published name -> where its values are. `files`: weight files and their bytes.
    - `config`: the model, if it is one that is known; `raw`: the `config.json` it came with.
    - `left_out`, `notes`: what is not among `tensors`, and what a user should know.
    - `megatron`: more about a Megatron checkpoint.
    - `folder`: where files that belong beside the weights lie.
    """

    path: Path
    kind: str
    detail: str
    tensors: dict[str, Blocks]
    files: dict[str, int]
    config: KimiLinearConfig | None
    raw: dict[str, Any] | None
    folder: Path
    left_out: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    megatron: Megatron | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def recognise(path: Path) -> str:
    """Which of `KINDS` lies at a path; nothing but names is looked at, and `.metadata`.

    **Raises:** `CheckpointError` that says what is there if it is none.
    """
    if not path.exists():
        raise CheckpointError(f"{path} does not exist.")
    if path.is_file():
        if path.name.endswith(TORCH_ENDINGS) or path.name.endswith(".bin.index.json"):
            return "torch .bin"
        return "safetensors"
    names = sorted(entry.name for entry in path.iterdir())
    if is_dist_checkpoint(path):
        return "megatron" if _is_megatron(path) else "distributed"
    if TRACKER in names or any(re.fullmatch(r"iter_\d+|release|mp_rank_.*", name) for name in names):
        return "megatron"
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return "safetensors"
    if any(name.endswith((*TORCH_ENDINGS, ".bin.index.json")) for name in names):
        return "torch .bin"
    raise CheckpointError(
        f"{path} is no checkpoint of a kind that is known: no safetensors files, no Megatron folders (iter_*, "
        f"mp_rank_*, {TRACKER}), no .metadata, no *.bin. It holds {list_some(names)}."
    )


def _is_megatron(path: Path) -> bool:
    names = [*open_dist_checkpoint(path).tensors]
    return any(parse_name(name) is not None for name in names) or not names


@contextmanager
def open_source(path: str | Path, *, config: Mapping[str, Any] | None = None) -> Iterator[Opened]:
    """Opens a checkpoint of any kind; no values are read.

    **Arguments:** `config`: fields in published style that the checkpoint does not state.

    **Raises:** `CheckpointError`, see the readers of each format.
    """
    path = Path(path)
    kind = recognise(path)
    if kind == "safetensors":
        with open_checkpoint(path) as stored:
            yield _published(path, stored, config)
    elif kind == "megatron":
        yield _megatron(path, config)
    else:
        yield _torch_files(path, config) if kind == "torch .bin" else _distributed(path, config)


def _megatron(path: Path, config: Mapping[str, Any] | None) -> Opened:
    found = open_megatron(path, config=config)
    run = found.run
    raw = dict(config) if config is not None and "model_type" in config else None
    return Opened(
        path, "megatron", f"Megatron {run.kind}", found.tensors, run.files, found.config, raw, run.folder, run.left_out,
        found.notes, found,
    )  # fmt: skip


def read_folder_config(folder: Path, given: Mapping[str, Any] | None) -> tuple[KimiLinearConfig | None, dict | None]:
    """The `config.json` of a folder, with what is given besides.

    **Raises:** `CheckpointError` if both state a field differently, or it is one of Kimi Linear that cannot be used.
    """
    path = folder / "config.json"
    raw = read_json(path) if path.is_file() else {}
    for name, value in (given or {}).items():
        if raw.get(name, value) != value:
            raise CheckpointError(f"{name} is {raw[name]!r} in {path}, and {value!r} in the configuration given.")
    raw = {**raw, **(given or {})}
    if raw.get("model_type") != "kimi_linear":
        return None, raw or None
    try:
        return parse_config(raw, complete=True), raw
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None


@dataclass(frozen=True)
class _Published:
    """A tensor of a safetensors checkpoint as a source."""

    checkpoint: AbstractCheckpoint
    info: TensorInfo

    @property
    def shape(self) -> tuple[int, ...]:
        return self.info.shape

    @property
    def dtype(self) -> np.dtype:
        return self.info.dtype

    @property
    def where(self) -> str:
        return str(self.info.file)

    def array(self) -> np.ndarray:
        return self.checkpoint.read(self.info.name)

    def unchecked(self) -> tuple[np.ndarray, int | None]:
        return self.array(), None

    def release(self) -> None:
        self.checkpoint.release(self.info.name)

    def same_bytes(self, other: Source) -> bool:
        return self.array().tobytes() == other.array().tobytes()


def published_blocks(checkpoint: AbstractCheckpoint) -> dict[str, Blocks]:
    """The tensors of a safetensors checkpoint."""
    return {name: whole(_Published(checkpoint, info)) for name, info in checkpoint.tensors.items()}


def _published(path: Path, stored: AbstractCheckpoint, given: Mapping[str, Any] | None) -> Opened:
    folder = path if path.is_dir() else path.parent
    config, raw = read_folder_config(folder, given)
    plain = dequantize(stored, raw or {})
    tensors = published_blocks(plain)
    files = {file.name: file.stat().st_size for file in stored.files}
    notes = [] if plain is stored else ["Quantised weights are dequantised."]
    return Opened(path, "safetensors", KINDS["safetensors"], tensors, files, config, raw, folder, notes=notes)


def _torch_files(path: Path, given: Mapping[str, Any] | None) -> Opened:
    folder = path if path.is_dir() else path.parent
    files, weight_map = _find_torch_files(path)
    tensors: dict[str, StoredTensor] = {}
    owner: dict[str, Path] = {}
    left_out: dict[str, int] = {}
    for file in files:
        for name, value in _state(open_torch_file(file).value, str(file)):
            if not isinstance(value, StoredTensor):
                left_out["other entries"] = left_out.get("other entries", 0) + 1
                if isinstance(value, StandIn) and "rebuild" in str(value.kind):
                    raise CheckpointError(f"{file}: {name} is a tensor of a kind that is not read ({value.kind}).")
            elif name in tensors:
                raise CheckpointError(f"{name!r} is stored twice, in {owner[name]} and in {file}.")
            else:
                tensors[name], owner[name] = value, file
    misplaced = [name for name, file in weight_map.items() if owner.get(name) != file]
    if misplaced:
        raise CheckpointError(f"{path}: tensors are not where the index places them: {list_some(misplaced)}.")
    config, raw = read_folder_config(folder, given)
    named, beside = _without_prefix({name: whole(tensor) for name, tensor in tensors.items()}, path, strict=False)
    left_out |= {"tensors beside the model's": beside} if beside else {}
    sizes = {file.name: file.stat().st_size for file in files}
    return Opened(path, "torch .bin", KINDS["torch .bin"], named, sizes, config, raw, folder, left_out)


def _find_torch_files(path: Path) -> tuple[list[Path], dict[str, Path]]:
    if path.is_file() and not path.name.endswith(".index.json"):
        return [path], {}
    folder = path if path.is_dir() else path.parent
    indexes = sorted(folder.glob("*.bin.index.json")) if path.is_dir() else [path]
    if len(indexes) == 1:
        weight_map = read_json(indexes[0]).get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(v, str) and Path(v).name == v for v in weight_map.values()
        ):
            raise CheckpointError(f"{indexes[0]} has no usable weight_map.")
        located = {name: folder / file for name, file in weight_map.items()}
        files = sorted(set(located.values()))
        if missing := [file.name for file in files if not file.is_file()]:
            raise CheckpointError(f"{folder}: weight files are missing: {list_some(missing)}.")
        return files, located
    names = sorted(entry for entry in folder.iterdir() if entry.name.endswith(TORCH_ENDINGS))
    preferred = [entry for entry in names if entry.name == "pytorch_model.bin"] or [
        entry for entry in names if entry.name not in ("training_args.bin", "optimizer.pt", "scheduler.pt")
    ]
    if len(preferred) != 1:
        raise CheckpointError(f"{folder} holds several torch files and no index: {list_some([e.name for e in names])}.")
    return preferred, {}


def _state(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Entries of a state dict, which may lie under a name of its own."""
    for name in ("state_dict", "model_state_dict", "model", "module"):
        if isinstance(value, dict) and isinstance(value.get(name), dict):
            value = value[name]
            break
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} holds no dictionary of tensors.")
    for name, item in value.items():
        yield str(name), item


def _without_prefix(tensors: dict[str, Blocks], path: Path, *, strict: bool) -> tuple[dict[str, Blocks], int]:
    """Tensors of the model by their published names, and how many others there are.

    **Raises:** `CheckpointError` if there is no embedding by which to know the model, or two names become one.
    """
    clean = {name: WRAPPERS.sub("", name) for name in tensors}
    prefixes = {n.removesuffix(EMBEDDING) for n in clean.values() if n.endswith(EMBEDDING) and "optim" not in n}
    if len(prefixes) != 1:
        if strict:
            raise CheckpointError(
                f"{path} holds no model that is known: {len(prefixes)} tensors are named ...{EMBEDDING}; it holds "
                f"{list_some(sorted(tensors), 8)}."
            )
        return tensors, 0
    prefix = prefixes.pop()
    out: dict[str, Blocks] = {}
    for name, tensor in tensors.items():
        if not clean[name].startswith(prefix):
            continue
        short = clean[name].removeprefix(prefix)
        if short.startswith(("optim.", "optimizer.")):
            continue
        if short in out:
            raise CheckpointError(f"{path} holds {short} twice.")
        out[short] = tensor
    return out, len(tensors) - len(out)


def _distributed(path: Path, given: Mapping[str, Any] | None) -> Opened:
    stored = open_dist_checkpoint(path)
    tensors, beside = _without_prefix(stored.tensors, path, strict=True)
    config, raw = read_folder_config(path, given)
    files = {file.name: file.stat().st_size for file in sorted(path.glob("*.distcp"))}
    left_out = {"tensors beside the model's": beside, "other entries": len(stored.objects)}
    left_out = {what: count for what, count in left_out.items() if count}
    return Opened(path, "distributed", KINDS["distributed"], tensors, files, config, raw, path, left_out)


def recognise_other(folder: Path) -> str | None:
    """Which of `KINDS` a folder is, if that is another than published layout."""
    try:
        kind = recognise(folder)
    except CheckpointError:
        return None
    return None if kind == "safetensors" else kind


def read_given_config(config: str | Path | Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The fields of a configuration that is given as a file, a folder with `config.json`, or fields."""
    if config is None or isinstance(config, Mapping):
        return None if config is None else dict(config)
    path = Path(config)
    return read_json(path / "config.json" if path.is_dir() else path)


def dtype_of(tensors: Mapping[str, Blocks]) -> np.dtype:
    """The dtype of most bytes."""
    sizes: dict[np.dtype, int] = {}
    for tensor in tensors.values():
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    return max(sizes, key=sizes.__getitem__)


def published_config(opened: Opened, *, prediction: bool = False) -> dict[str, Any]:
    """The fields of `config.json` for a checkpoint. `prediction`: with the layers that predict one more token.

    **Raises:** `CheckpointError` if it is not known what model the weights make.
    """
    if opened.config is None:
        if opened.raw is None:
            raise CheckpointError(
                f"There is no config.json beside {opened.path}, so what model its weights make is not known. "
                "Give one with --config."
            )
        return {name: value for name, value in opened.raw.items() if name != "quantization_config"}
    out = write_config(opened.config, opened.raw, str(dtype_of(opened.tensors)))
    if opened.megatron is not None:
        args = opened.megatron.run.args or {}
        if opened.raw is None:
            out["head_dim"] = opened.config.qk_nope_head_dim + opened.config.qk_rope_head_dim
        if "kda_disable_fp8" in args:
            out["kda_disable_fp8"] = bool(args["kda_disable_fp8"])
        layers = {key.place.number for key in opened.megatron.run.keys if key.place.kind == "mtp"}
        out["num_nextn_predict_layers"] = len(layers) if prediction else 0
    return out


class PublishedTensors(AbstractCheckpoint):
    """Any opened checkpoint through the interface that models are loaded with."""

    def __init__(self, opened: Opened):
        self.files = tuple(opened.folder / name for name in opened.files)
        self.metadata = {}
        self._blocks = opened.tensors
        self.tensors = {
            name: TensorInfo(name, t.dtype, t.shape, Path(t.sources[0].where if t.blocks else ""), 0, t.nbytes)
            for name, t in opened.tensors.items()
        }

    def read(self, name: str) -> np.ndarray:
        """The values, in an array of their own."""
        return self._blocks[name].read()

    def read_into(self, name: str, out: np.ndarray) -> None:
        """Copies the values, converting between floating-point dtypes."""
        check_copy(self.tensors[name], out)
        self._blocks[name].fill(out)
        self.release(name)

    def read_slice(self, name: str, index: Any) -> np.ndarray:
        """A part of the values."""
        return self.read(name)[index]

    def release(self, name: str) -> None:
        """Gives back the memory that mirrors the stored pieces."""
        self._blocks[name].release()

    def close(self) -> None:
        """Nothing to let go of: files are closed with the last view."""
