"""Writing named tensors as safetensors files: deterministic, one tensor at a time, each file whole or not at all."""

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from kimi_zoo.checkpoints.files import CheckpointError, atomic_file, list_some, parse_size, write_json
from kimi_zoo.checkpoints.safetensors_header import DTYPE_NAMES, DTYPES, check_metadata


@dataclass(frozen=True)
class LazyTensor:
    """A tensor to save whose values are made when it is written: `load()` gives an array of that shape and dtype.

    `stream()`, if there is one, gives its bytes in order instead: arrays of uint8, each valid until the next.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    load: Callable[[], Any]
    stream: Callable[[], Iterator[np.ndarray]] | None = None


def save_tensors(
    tensors: Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    metadata: Mapping[str, str] | None = None,
) -> list[Path]:
    """Writes tensors to a folder, or to one file if `path` ends in `.safetensors`; returns the files written.

    **Arguments:**

    - `tensors`: name -> array (numpy or JAX), or `LazyTensor`. Values are taken one at a time, so lazy ones need never
        be in memory together. The same tensors in the same order always give the same bytes.
    - `path`: a folder gets `model.safetensors`, or, beyond `max_shard_size`, `model-0000N-of-0000M.safetensors` and the
        index. It is made if need be, but must not hold weights already; to replace a checkpoint, write to
        `atomic_folder(path, overwrite=True)`. A single file is never split and replaces an older one.
    - `max_shard_size`: bytes of tensors per file, or text such as `"200MB"`; a larger tensor gets a file of its own.
    - `metadata`: text to text, put into each header; by default `{"format": "pt"}`, which transformers asks for.

    **Raises:** `CheckpointError` before anything is written if a dtype or name cannot be stored or the folder holds
    weights, and when its turn comes if a lazy tensor does not give the shape and dtype announced.
    """
    path = Path(path)
    metadata = {"format": "pt"} if metadata is None else check_metadata(dict(metadata), path)
    files = plan_files(tensors, max_shard_size)
    if path.name.endswith(".safetensors"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, list(tensors), tensors, metadata)
        return [path]
    path.mkdir(parents=True, exist_ok=True)
    present = sorted(file.name for file in path.iterdir() if ".safetensors" in file.suffixes)
    if present:
        raise CheckpointError(
            f"{path} already holds weights: {list_some(present)}. Choose another folder, or replace it as a whole "
            "with atomic_folder(..., overwrite=True)."
        )
    for file, names in files.items():
        write_file(path / file, names, tensors, metadata)
    write_index(path, files, tensors)
    return [path / file for file in files]


@dataclass(frozen=True)
class _Layout:
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _check_storable(name: str, value: Any) -> _Layout:
    dtype = np.dtype(value.dtype).newbyteorder("=")
    if dtype not in DTYPE_NAMES:
        raise CheckpointError(f"{name!r} has dtype {dtype}, which safetensors files cannot hold: {', '.join(DTYPES)}.")
    if name == "__metadata__" or name != name.encode(errors="ignore").decode():  # half of a surrogate pair
        raise CheckpointError(f"{name!r} cannot be the name of a tensor in a safetensors file.")
    return _Layout(dtype, tuple(value.shape))


def _split(layout: Mapping[str, _Layout], limit: int) -> list[list[str]]:
    """Returns the names for each file: in order, a new file whenever the next tensor would exceed the limit."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, tensor in layout.items():
        if shards[-1] and filled + tensor.nbytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += tensor.nbytes
    return shards


def plan_files(tensors: Mapping[str, Any], max_shard_size: int | str, stem: str = "model") -> dict[str, list[str]]:
    """File name -> names of the tensors that go into it, in order.

    **Raises:** `CheckpointError` if a dtype or name cannot be stored.
    """
    layout = {name: _check_storable(name, value) for name, value in tensors.items()}
    shards = _split(layout, parse_size(max_shard_size))
    if len(shards) == 1:
        return {f"{stem}.safetensors": shards[0]}
    return {f"{stem}-{i:05}-of-{len(shards):05}.safetensors": names for i, names in enumerate(shards, 1)}


def write_index(folder: Path, files: Mapping[str, list[str]], tensors: Mapping[str, Any]) -> None:
    """Writes the index of several files; one file needs none."""
    if len(files) == 1:
        return
    weight_map = {name: file for file, names in files.items() for name in names}
    total = sum(_check_storable(name, value).nbytes for name, value in tensors.items())
    stem = re.sub(r"-\d+-of-\d+\.safetensors", "", next(iter(files)))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / f"{stem}.safetensors.index.json", index)


def file_order(names: list[str], tensors: Mapping[str, Any]) -> list[str]:
    """The order in which tensors stand in a file, and in which their values are taken."""
    rank = {dtype: position for position, dtype in enumerate(DTYPE_NAMES)}
    return sorted(names, key=lambda name: (rank[_check_storable(name, tensors[name]).dtype], name))


def write_file(path: Path, names: list[str], tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    """Writes one file with the tensors of these names; it appears whole or not at all."""
    layout = {name: _check_storable(name, tensors[name]) for name in names}
    names = file_order(names, tensors)
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in names:
        begin, end = end, end + layout[name].nbytes
        dtype, shape = DTYPE_NAMES[layout[name].dtype], list(layout[name].shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the first tensor is aligned
    with atomic_file(path) as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in names:
            value = tensors[name]
            if isinstance(value, LazyTensor) and value.stream is not None:
                _write_stream(file, name, value.stream(), layout[name])
            else:
                file.write(_data_bytes(name, value, layout[name]))


def _write_stream(file: BinaryIO, name: str, parts: Iterator[np.ndarray], expected: _Layout) -> None:
    written = sum(file.write(part) for part in parts)
    if written != expected.nbytes:
        raise CheckpointError(f"{name!r} was announced with {expected.nbytes} bytes; {written} came.")


def _data_bytes(name: str, value: Any, expected: _Layout) -> np.ndarray:
    array = np.asarray(value.load() if isinstance(value, LazyTensor) else value)
    if (array.shape, array.dtype.newbyteorder("=")) != (expected.shape, expected.dtype):
        raise CheckpointError(
            f"{name!r} was announced as {expected.dtype} {expected.shape}; its values are {array.dtype} {array.shape}."
        )
    little_endian = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return np.ascontiguousarray(little_endian).reshape(-1).view(np.uint8)
