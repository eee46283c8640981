"""Safetensors files <-> named tensors: memory-mapped reading of one or many files, atomic and deterministic writing.

Needs numpy and ml_dtypes only. A file is 8 bytes with the header's length, a JSON header (name -> dtype, shape, byte
range), then the tensors' bytes, little-endian, row-major and without gaps. A checkpoint is one such file, or several
with an index `*.safetensors.index.json` whose `weight_map` says which file holds which tensor.
"""

import json
import math
import mmap
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import ml_dtypes
import numpy as np

from kimi_zoo.checkpoints.files import (
    CheckpointError,
    aligned_empty,
    atomic_file,
    atomic_folder,
    list_some,
    parse_json_object,
    parse_size,
    read_json,
    write_json,
)

__all__ = [
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

# In the order in which tensors are laid out in a file: wide ones first, so that each starts at a multiple of its width.
DTYPES = {
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F64": np.dtype(np.float64),
    "C64": np.dtype(np.complex64),
    "F32": np.dtype(np.float32),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
FLOAT_DTYPES = frozenset(dtype for name, dtype in DTYPES.items() if name.startswith(("F", "BF")))

MAX_HEADER_BYTES = 100_000_000  # the limit of the format's reference implementation
COPY_BYTES = 32_000_000  # mapped pages count as resident memory, so long copies give them back at this interval


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: `nbytes` bytes from `offset` (counted from the start of `file`) on."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


@dataclass(frozen=True)
class LazyTensor:
    """A tensor to save whose values are made when it is written: `load()` gives an array of that shape and dtype."""

    shape: tuple[int, ...]
    dtype: np.dtype
    load: Callable[[], Any]


class Checkpoint:
    """The tensors of a checkpoint, memory-mapped; made by `open_checkpoint`.

    `tensors` maps each name to its `TensorInfo`, in file order; `metadata` joins the headers' `__metadata__`.

    The arrays that `read` and `read_slice` return are read-only views of the files: nothing is copied, and bytes come
    from disk when they are looked at. They must not live on in a model: a program that rewrites a file in place changes
    them, and one that shortens it makes looking at them crash, so copy what is to stay. Beware that
    `jax.numpy.asarray` and `jax.device_put` on CPU may keep the view itself. `read_into` copies, into memory that JAX
    can adopt if it comes from `aligned_empty`. Files replaced by renaming, as everything here writes them, are safe:
    the mapping keeps the old content.

    **Use:** as a context manager, or call `close`; views taken before stay valid.
    """

    def __init__(self, files: Mapping[Path, "MappedFile"]):
        self._files = dict(files)
        self.files: tuple[Path, ...] = tuple(files)
        self.tensors: dict[str, TensorInfo] = {}
        self.metadata: dict[str, str] = {}
        for mapped in files.values():
            self.tensors.update(mapped.tensors)
            self.metadata.update(mapped.metadata)

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

    def read(self, name: str) -> np.ndarray:
        """Returns a read-only view of a tensor, of the stored dtype.

        **Raises:** `KeyError` if there is none of that name.
        """
        info = self.tensors[name]
        return np.ndarray(info.shape, info.dtype, buffer=self._mapping(info), offset=info.offset)

    def read_slice(self, name: str, index: Any) -> np.ndarray:
        """Returns a read-only view of `tensor[index]`; only those bytes are read from disk."""
        return self.read(name)[index]

    def read_into(self, name: str, out: np.ndarray) -> None:
        """Copies a tensor into `out`, converting between floating-point dtypes, and releases the mapped memory.

        **Raises:** `ValueError` if `out` has another shape, or if dtypes differ and are not both floating-point.
        """
        info = self.tensors[name]
        check_copy(info, out)
        source = self.read(name)
        if not out.flags.c_contiguous or source.size == 0:
            out[...] = source
        else:
            step = COPY_BYTES // info.dtype.itemsize
            for start in range(0, source.size, step):
                part = slice(start, start + step)
                out.reshape(-1)[part] = source.reshape(-1)[part]
                self.release(name)
        self.release(name)

    def release(self, name: str) -> None:
        """Gives the memory that mirrors a tensor's bytes back to the system; views stay valid and read the file again.

        Mapped pages count as resident memory once looked at: release each tensor when it has been copied.
        """
        info = self.tensors[name]
        if hasattr(mmap, "MADV_DONTNEED") and info.nbytes:  # elsewhere the system decides alone
            start = info.offset - info.offset % mmap.PAGESIZE
            self._mapping(info).madvise(mmap.MADV_DONTNEED, start, info.offset + info.nbytes - start)

    def close(self) -> None:
        """Lets go of the files; their mapping ends with the last view."""
        self._files.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _mapping(self, info: TensorInfo) -> mmap.mmap:
        if info.file not in self._files:
            raise ValueError(f"The checkpoint is closed; {info.name} of {info.file} can no longer be read.")
        return self._files[info.file].mapping


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
            opened[file] = _map_file(file)
        except CheckpointError as error:
            problems.append(str(error))
    problems += _duplicates(opened)
    if not problems:
        problems = _misplaced(opened, weight_map)
    if problems:
        raise CheckpointError(
            "\n".join(problems[:20] + [f"... and {len(problems) - 20} more problems"] * (len(problems) > 20))
        )
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


def _duplicates(opened: Mapping[Path, "MappedFile"]) -> list[str]:
    owner: dict[str, Path] = {}
    problems = []
    for file, mapped in opened.items():
        for name in mapped.tensors:
            if name in owner:
                problems.append(f"{name!r} is stored twice, in {owner[name]} and in {file}.")
            owner.setdefault(name, file)
    return problems


def _misplaced(opened: Mapping[Path, "MappedFile"], weight_map: Mapping[str, Path]) -> list[str]:
    return [
        f"The index places {name!r} in {file.name}, but that file has no such tensor."
        for name, file in weight_map.items()
        if name not in opened[file].tensors
    ]


@dataclass(frozen=True)
class MappedFile:
    """One checked safetensors file."""

    mapping: mmap.mmap
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]


def _map_file(path: Path) -> MappedFile:
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            header, data_start = _read_header(file, path, size)
            metadata = _check_metadata(header.pop("__metadata__", None), path)
            tensors = _check_tensors(header, path, data_start, size)
            return MappedFile(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), tensors, metadata)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None


def _read_header(file: BinaryIO, path: Path, size: int) -> tuple[dict[str, Any], int]:
    """Returns the parsed header and the position at which the tensors' bytes begin."""
    start = file.read(256)
    if start.startswith(b"version https://git-lfs"):
        match = re.search(rb"^size (\d+)$", start, re.MULTILINE)
        expected = f" of {int(match[1]):,} bytes" if match else ""
        raise CheckpointError(
            f"{path} is a Git LFS pointer, a text file that stands for the weights{expected}, not the weights. "
            "Run `git lfs pull` in its folder, or download the file itself."
        )
    length = int.from_bytes(start[:8], "little")
    if size < 8 or not 2 <= length <= MAX_HEADER_BYTES or start[8:9] != b"{":
        raise CheckpointError(
            f"{path} is not a safetensors file: it begins with {start[:16]!r}, where the length of a header and '{{' "
            f"are expected; it has {size} bytes. Download it again, or convert it if it has another format."
        )
    if 8 + length > size:
        raise CheckpointError(
            f"{path} is cut off within its header, which needs {length} bytes and has {size - 8}. "
            "Is the download unfinished? Download the file again."
        )
    file.seek(8)
    try:
        text = file.read(length).decode()
    except UnicodeDecodeError:
        raise CheckpointError(f"{path} is damaged: its header is not UTF-8 text. Download it again.") from None
    return parse_json_object(text, f"The header of {path}"), 8 + length


def _check_metadata(metadata: Any, path: Path) -> dict[str, str]:
    metadata = metadata or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ must map text to text; got {str(metadata)[:100]}.")
    return metadata


def _check_tensors(header: Mapping[str, Any], path: Path, data_start: int, size: int) -> dict[str, TensorInfo]:
    tensors = [_parse_tensor(name, entry, path, data_start) for name, entry in header.items()]
    tensors.sort(key=lambda info: (info.offset, info.nbytes))
    end, last = data_start, "the header"
    for info in tensors:
        if info.offset < end:
            raise CheckpointError(
                f"{path}: {last!r} and {info.name!r} share {min(end - info.offset, info.nbytes)} bytes; tensors must "
                "not overlap. The file was written wrongly: get it from another source."
            )
        if info.offset > end:
            raise CheckpointError(
                f"{path}: {info.offset - end} bytes between {last!r} and {info.name!r} have no owner."
            )
        end, last = info.offset + info.nbytes, info.name
    if end > size:
        raise CheckpointError(
            f"{path} is cut off: its tensors need {end - data_start} data bytes, but only {size - data_start} are "
            "present. Is the download unfinished? Download the file again."
        )
    if end < size:
        raise CheckpointError(
            f"{path}: its tensors need {end - data_start} data bytes, but {size - data_start} are present; "
            "the surplus has no owner."
        )
    return {info.name: info for info in tensors}


def _parse_tensor(name: str, entry: Any, path: Path, data_start: int) -> TensorInfo:
    where = f"{path}: tensor {name!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where} needs dtype, shape and data_offsets in the header; got {str(entry)[:100]}.")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{where} has dtype {str(dtype)[:100]!r}; known ones are {', '.join(DTYPES)}.")
    if not _is_sizes(shape) or len(shape) > 32:
        raise CheckpointError(f"{where} has shape {str(shape)[:100]}; expected a list of up to 32 sizes >= 0.")
    if not _is_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{where} has data_offsets {str(offsets)[:100]}; expected two numbers, begin and end.")
    begin, end = offsets
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != nbytes:
        raise CheckpointError(f"{where} is {dtype} {shape}, {nbytes} bytes, but is given {end - begin} bytes.")
    return TensorInfo(name, DTYPES[dtype], tuple(shape), path, data_start + begin, nbytes)


def _is_sizes(value: Any) -> bool:
    # Numpy counts the bytes of an array without its zeros; keep that below 2**63 too.
    return (
        isinstance(value, list)
        and all(type(item) is int and item >= 0 for item in value)
        and math.prod(item or 1 for item in value) < 2**60
    )


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
    metadata = {"format": "pt"} if metadata is None else dict(metadata)
    layout = {name: _check_storable(name, value) for name, value in tensors.items()}
    if path.name.endswith(".safetensors"):
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_file(path, list(tensors), layout, tensors, metadata)
        return [path]
    path.mkdir(parents=True, exist_ok=True)
    present = sorted(file.name for file in path.iterdir() if ".safetensors" in file.suffixes)
    if present:
        raise CheckpointError(
            f"{path} already holds weights: {list_some(present)}. Choose another folder, or replace it as a whole "
            "with atomic_folder(..., overwrite=True)."
        )
    return _write_shards(path, _split(layout, parse_size(max_shard_size)), layout, tensors, metadata)


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
    if name == "__metadata__" or not name.isprintable():
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


def _write_shards(
    folder: Path,
    shards: list[list[str]],
    layout: Mapping[str, _Layout],
    tensors: Mapping[str, Any],
    metadata: dict[str, str],
) -> list[Path]:
    if len(shards) == 1:
        files = [folder / "model.safetensors"]
    else:
        files = [folder / f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for file, names in zip(files, shards, strict=True):
        _write_file(file, names, layout, tensors, metadata)
    if len(shards) > 1:
        weight_map = {name: file.name for file, names in zip(files, shards, strict=True) for name in names}
        total = sum(tensor.nbytes for tensor in layout.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(folder / "model.safetensors.index.json", index)
    return files


def _write_file(
    path: Path, names: list[str], layout: Mapping[str, _Layout], tensors: Mapping[str, Any], metadata: dict[str, str]
) -> None:
    rank = {dtype: position for position, dtype in enumerate(DTYPE_NAMES)}
    names = sorted(names, key=lambda name: (rank[layout[name].dtype], name))
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
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
            file.write(_data_bytes(name, tensors[name], layout[name]))


def _data_bytes(name: str, value: Any, expected: _Layout) -> np.ndarray:
    array = np.asarray(value.load() if isinstance(value, LazyTensor) else value)
    if (array.shape, array.dtype.newbyteorder("=")) != (expected.shape, expected.dtype):
        raise CheckpointError(
            f"{name!r} was announced as {expected.dtype} {expected.shape}; its values are {array.dtype} {array.shape}."
        )
    little_endian = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return np.ascontiguousarray(little_endian).reshape(-1).view(np.uint8)
