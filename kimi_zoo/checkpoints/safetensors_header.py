"""One safetensors file: its header, checked before any tensor is touched, and its bytes, memory-mapped.

A file is 8 bytes with the header's length, a JSON header (name -> dtype, shape, byte range), then the tensors' bytes,
little-endian, row-major and without gaps.
"""

import math
import mmap
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from kimi_zoo.checkpoints.files import CheckpointError, parse_json_object

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
class MappedFile:
    """One checked safetensors file."""

    mapping: mmap.mmap
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]


def map_file(path: Path) -> MappedFile:
    """Checks the header of a safetensors file and maps the file into memory, read-only, reading none of its tensors.

    **Raises:** `CheckpointError` saying what is wrong with the file.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            header, data_start = _read_header(file, path, size)
            metadata = check_metadata(header.pop("__metadata__", None), path)
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


def check_metadata(metadata: Any, path: Path) -> dict[str, str]:
    """Returns the `__metadata__` of a file, empty if it has none.

    **Raises:** `CheckpointError` if it does not map text to text.
    """
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
    # numpy counts the bytes of an array without its zeros; keep that below 2**63 too
    if not _is_sizes(shape) or len(shape) > 32 or math.prod(size or 1 for size in shape) >= 2**60:
        raise CheckpointError(f"{where} has shape {str(shape)[:100]}; expected a list of up to 32 sizes >= 0.")
    if not _is_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{where} has data_offsets {str(offsets)[:100]}; expected two numbers, begin and end.")
    begin, end = offsets
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != nbytes:
        raise CheckpointError(f"{where} is {dtype} {shape}, {nbytes} bytes, but is given {end - begin} bytes.")
    return TensorInfo(name, DTYPES[dtype], tuple(shape), path, data_start + begin, nbytes)


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**60 for item in value)
