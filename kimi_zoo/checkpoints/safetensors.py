"""Safetensors files <-> named tensors: which files make up a checkpoint, memory-mapped reading, atomic writing.

Needs numpy and ml_dtypes only. A checkpoint is one safetensors file, or several with an index
`*.safetensors.index.json` whose `weight_map` says which file holds which tensor.
"""

import mmap
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, override

import numpy as np

from kimi_zoo.checkpoints.files import (
    CheckpointError,
    aligned_empty,
    atomic_folder,
    join_problems,
    list_some,
    read_json,
    release_pages,
)
from kimi_zoo.checkpoints.safetensors_header import FLOAT_DTYPES, MappedFile, TensorInfo, map_file
from kimi_zoo.checkpoints.safetensors_saving import LazyTensor, save_tensors

__all__ = [
    "AbstractCheckpoint",
    "Checkpoint",
    "CheckpointError",
    "LazyTensor",
    "TensorInfo",
    "aligned_empty",
    "atomic_folder",
    "open_checkpoint",
    "read_json",
    "save_tensors",
]

COPY_BYTES = 8_000_000  # mapped pages count as resident memory, so long copies give them back at this interval


class AbstractCheckpoint(ABC):
    """Named tensors that lie in files: `Checkpoint` as they are stored, `DequantizedCheckpoint` computed from them.

    `tensors` maps each name to its `TensorInfo`, in file order; `metadata` joins the headers' `__metadata__`; `files`
    are the files read. Iteration, `len` and `in` are those of `tensors`.

    **Use:** as a context manager, or call `close`; arrays taken before stay valid.
    """

    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    files: tuple[Path, ...]

    @abstractmethod
    def read(self, name: str) -> np.ndarray:
        """Returns a tensor, possibly a read-only view of its file.

        **Raises:** `KeyError` if there is none of that name.
        """

    @abstractmethod
    def read_into(self, name: str, out: np.ndarray) -> None:
        """Copies a tensor into `out`, converting between floating-point dtypes, and releases the mapped memory.

        **Raises:** `ValueError` if `out` has another shape, or if dtypes differ and are not both floating-point.
        """

    @abstractmethod
    def release(self, name: str) -> None:
        """Gives the memory that mirrors a tensor's bytes back to the system; views stay valid and read the file again.

        Mapped pages count as resident memory once looked at: release each tensor when it has been copied.
        """

    @abstractmethod
    def close(self) -> None:
        """Lets go of the files; their mapping ends with the last view."""

    def read_slice(self, name: str, index: Any) -> np.ndarray:
        """Returns `tensor[index]`; of a tensor stored as it is, no other bytes are read from disk."""
        return self.read(name)[index]

    @property
    def total_bytes(self) -> int:
        """The bytes of all tensors together."""
        return sum(info.nbytes for info in self.tensors.values())

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __enter__(self) -> "AbstractCheckpoint":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Checkpoint(AbstractCheckpoint):
    """The tensors of a checkpoint as they are stored, memory-mapped; made by `open_checkpoint`.

    The arrays that `read` and `read_slice` return are read-only views of the files: nothing is copied, and bytes come
    from disk when they are looked at. They must not live on in a model: a program that rewrites a file in place changes
    them, and one that shortens it makes looking at them crash, so copy what is to stay. Beware that `jax.device_put`
    on CPU may keep the view itself. `read_into` copies, into memory that JAX can adopt if it comes from
    `aligned_empty`. Files replaced by renaming, as everything here writes them, are safe: whoever has opened the old
    ones keeps their content.
    """

    def __init__(self, files: Mapping[Path, MappedFile]):
        self.files = tuple(files)
        self.tensors = {name: info for mapped in files.values() for name, info in mapped.tensors.items()}
        self.metadata = {key: text for mapped in files.values() for key, text in mapped.metadata.items()}
        self._mappings = {file: mapped.mapping for file, mapped in files.items()}

    def read(self, name: str) -> np.ndarray:
        """Returns a read-only view of a tensor, of the stored dtype.

        **Raises:** `KeyError` if there is none of that name.
        """
        info = self.tensors[name]
        return np.ndarray(info.shape, info.dtype, buffer=self._mapping(info), offset=info.offset)

    @override
    def read_into(self, name: str, out: np.ndarray) -> None:
        info = self.tensors[name]
        check_copy(info, out)
        source = self.read(name)
        if source.size == 0 or not out.flags.c_contiguous:
            out[...] = source
        else:
            step = COPY_BYTES // info.dtype.itemsize
            for start in range(0, source.size, step):
                part = slice(start, start + step)
                out.reshape(-1)[part] = source.reshape(-1)[part]
                self.release(name)
        self.release(name)

    @override
    def release(self, name: str) -> None:
        info = self.tensors[name]
        release_pages(self._mapping(info), info.offset, info.nbytes)

    @override
    def close(self) -> None:
        self._mappings.clear()

    def _mapping(self, info: TensorInfo) -> mmap.mmap:
        if info.file not in self._mappings:
            raise ValueError(f"The checkpoint is closed; {info.name} of {info.file} can no longer be read.")
        return self._mappings[info.file]


def check_copy(info: TensorInfo, out: np.ndarray) -> None:
    """Checks that a tensor can be copied into `out`.

    **Raises:** `ValueError` if shapes differ, or if dtypes differ and are not both floating-point.
    """
    if out.shape != info.shape:
        raise ValueError(f"{info.name} has shape {info.shape}; it does not fit an array of shape {out.shape}.")
    if out.dtype != info.dtype and not {out.dtype, info.dtype} <= FLOAT_DTYPES:
        raise ValueError(f"{info.name} is {info.dtype}; only floating-point tensors are converted, not to {out.dtype}.")


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens a checkpoint folder, an index file or one safetensors file; reads and checks every header, no data.

    In a folder the files are, in this order of preference: those that the `*.safetensors.index.json` lists, and no
    others; `model.safetensors`; a complete set named `*-0000N-of-0000M.safetensors`; the only `*.safetensors` file.

    **Raises:** `CheckpointError`, listing every problem found, if files are missing, unfinished downloads, Git LFS
    pointers or otherwise not safetensors; if tensors overlap, leave gaps or appear in two files; if a tensor is not in
    the file in which the index places it.
    """
    path = Path(path)
    files, weight_map = _find_files(path)
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(
            f"{path}: {len(missing)} of {len(files)} weight files are missing: {list_some(missing)}. "
            "Is the download unfinished? Download the checkpoint again, or the missing files into this folder."
        )
    opened: dict[Path, MappedFile] = {}
    problems = []
    for file in files:
        try:
            opened[file] = map_file(file)
        except CheckpointError as error:
            problems.append(str(error))
    problems += _duplicates(opened)
    if not problems:
        problems = _misplaced(opened, weight_map)
    if problems:
        raise CheckpointError(join_problems(problems))
    return Checkpoint(opened)


def _find_files(path: Path) -> tuple[list[Path], dict[str, Path]]:
    """Returns the weight files of a checkpoint and, from the index if there is one, the file of each tensor."""
    if path.name.endswith(".index.json"):
        return _read_index(path)
    if not path.is_dir():
        if not path.exists():
            raise CheckpointError(f"{path} does not exist. Give a checkpoint folder or a safetensors file.")
        return [path], {}
    names = sorted(entry.name for entry in path.iterdir())
    indexes = [name for name in names if name.endswith(".safetensors.index.json")]
    if "model.safetensors.index.json" in indexes or len(indexes) == 1:
        return _read_index(path / ("model.safetensors.index.json" if len(indexes) > 1 else indexes[0]))
    if indexes:
        raise CheckpointError(f"{path} holds several indexes: {list_some(indexes)}. Give the path of the one to load.")
    weights = [name for name in names if name.endswith(".safetensors")]
    if "model.safetensors" in weights:
        return [path / "model.safetensors"], {}
    return [path / name for name in _without_index(path, weights, names)], {}


def _without_index(path: Path, weights: list[str], names: list[str]) -> list[str]:
    if not weights:
        raise CheckpointError(
            f"{path} holds no weights: no model.safetensors, no *.safetensors.index.json. It holds {list_some(names)}."
        )
    numbered = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")
    sets = {(match[1], match[3]) for name in weights if (match := numbered.fullmatch(name))}
    if len(sets) == 1 and all(numbered.fullmatch(name) for name in weights):
        ((stem, count),) = sets
        if int(count) <= 100_000:
            return [f"{stem}-{number:0{len(count)}}-of-{count}.safetensors" for number in range(1, int(count) + 1)]
    if len(weights) > 1:
        raise CheckpointError(
            f"{path} holds several safetensors files and no index that says which belong together: "
            f"{list_some(weights)}. Give the path of one file, or add the index."
        )
    return weights


def _read_index(path: Path) -> tuple[list[Path], dict[str, Path]]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{path} has no weight_map, the object that maps each tensor to its file. Download the index again, or "
            "remove it if the folder's weights are complete without it."
        )
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(".safetensors") or Path(file).name != file:
            raise CheckpointError(
                f"{path}: weight_map places {name!r} in {file!r}; expected the name of a .safetensors file beside it."
            )
    located = {name: path.parent / file for name, file in weight_map.items()}
    return sorted(set(located.values())), located


def _duplicates(opened: Mapping[Path, MappedFile]) -> list[str]:
    owner: dict[str, Path] = {}
    problems = []
    for file, mapped in opened.items():
        for name in mapped.tensors:
            if name in owner:
                problems.append(f"{name!r} is stored twice, in {owner[name]} and in {file}.")
            owner.setdefault(name, file)
    return problems


def _misplaced(opened: Mapping[Path, MappedFile], weight_map: Mapping[str, Path]) -> list[str]:
    return [
        f"The index places {name!r} in {file.name}, but that file has no such tensor."
        for name, file in weight_map.items()
        if name not in opened[file].tensors
    ]
