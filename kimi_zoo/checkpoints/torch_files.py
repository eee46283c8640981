"""Files of `torch.save`, read without torch: the zip format, and the older one of pickles followed by raw storages.

Tensors come out as `StoredTensor`s: views of the mapped file, made after their size, strides and offset have been
checked against the storage. The checksum of a storage is verified when its first tensor is looked at.
"""

import io
import math
import mmap
import os
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, no_type_check

import numpy as np

from kimi_zoo.checkpoints.files import CheckpointError, release_pages
from kimi_zoo.checkpoints.pickles import Name, StandIn, read_pickle
from kimi_zoo.checkpoints.torch_storage import DTYPES, STORAGES, Storage, StoredTensor

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_PROTOCOL = 1001
RELEASE_EVERY = 50  # records
EXPANDED_LIMIT = 1 << 30  # bytes of a tensor whose strides repeat what is stored


@dataclass
class TorchFile:
    """What one archive holds: `value` is the saved object, with `StoredTensor`s and `StandIn`s in it."""

    value: Any
    where: str
    tensors: list[StoredTensor] = field(default_factory=list)


def open_torch_file(path: str | os.PathLike[str]) -> TorchFile:
    """Reads what `torch.save` wrote; no tensor is read yet.

    **Raises:** `UnsafePickle` for a pickle that names anything not known to be harmless; `CheckpointError` for a file
    that is damaged or something else.
    """
    mapping = map_bytes(Path(path))
    return read_archive(mapping, 0, len(mapping), str(path))


def map_bytes(path: Path) -> mmap.mmap:
    """A file mapped into memory, read-only.

    **Raises:** `CheckpointError` if it cannot be read or is empty.
    """
    try:
        with open(path, "rb") as file:
            if not os.fstat(file.fileno()).st_size:
                raise CheckpointError(f"{path} is empty. Is the download or copy unfinished?")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None


def read_archive(mapping: mmap.mmap, start: int, size: int, where: str) -> TorchFile:
    """Reads an archive that lies in `size` bytes of a mapped file, from `start` on."""
    first = bytes(mapping[start : start + min(size, 512)])
    if first.startswith(b"PK"):
        return _read_zip(mapping, start, size, where)
    if first[:1] == b"\x80":
        return _read_legacy(mapping, start, size, where)
    if first.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{where} is a Git LFS pointer, not the file itself. Run `git lfs pull` in its folder.")
    if first[257:262] == b"ustar" or first.startswith((b"storages", b"pickle")):
        raise CheckpointError(f"{where} has torch's format of before 2017, a tar file, which is not read.")
    raise CheckpointError(f"{where} was not written by torch.save: it begins with {first[:8]!r}. Is it damaged?")


class _Tensors:
    """Makes tensors from what a pickle says of them."""

    def __init__(self, where: str):
        self.where = where
        self.found: list[StoredTensor] = []
        self.makers = {
            "torch._utils._rebuild_tensor": self.plain,
            "torch._utils._rebuild_tensor_v2": lambda *args: self.plain(*args[:4], metadata=args[6:7]),
            "torch._utils._rebuild_tensor_v3": self.typed,
            "torch._utils._rebuild_parameter": lambda data, *_: data,
            "torch._utils._rebuild_parameter_with_state": lambda data, *_: data,
            "torch._tensor._rebuild_from_type_v2": self.of_type,
            "torch._tensor._rebuild_from_type": lambda function, _kind, args, *_: self.call(function, args),
        }

    def plain(self, stored: Any, offset: Any, shape: Any, strides: Any, *, metadata: tuple = ()) -> StoredTensor:
        if not isinstance(stored, tuple) or len(stored) != 2:
            raise ValueError("a tensor without a storage")
        storage, dtype = stored
        return self.check(storage, dtype, offset, shape, strides, metadata)

    def typed(self, stored: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> StoredTensor:
        kind = rest[2] if len(rest) > 2 else None
        if not isinstance(kind, Name) or kind.name not in DTYPES:
            raise CheckpointError(f"{self.where} holds a tensor of dtype {kind}, which is not read.")
        return self.check(stored[0], DTYPES[kind.name], offset, shape, strides, rest[3:4])

    def of_type(self, function: Any, _kind: Any, args: Any, *_state: Any) -> Any:
        return self.call(function, args)

    def call(self, function: Any, args: Any) -> Any:
        maker = self.makers.get(str(function))
        if maker is None or "from_type" in str(function):
            return StandIn(function, tuple(args))
        return maker(*args)

    def check(
        self, storage: Storage, dtype: np.dtype, offset: Any, shape: Any, strides: Any, metadata: tuple
    ) -> StoredTensor:
        sizes = lambda value: (
            isinstance(value, tuple) and len(value) <= 32 and all(type(v) is int and 0 <= v < 2**48 for v in value)
        )
        if not sizes(shape) or not sizes(strides) or len(shape) != len(strides) or not sizes((offset,)):
            raise CheckpointError(f"{self.where}: a tensor has shape {shape!s:.80} and strides {strides!s:.80}.")
        if metadata and isinstance(metadata[0], dict) and any(metadata[0].values()):
            raise CheckpointError(f"{self.where}: a tensor is saved as conjugate or negative view, which is not read.")
        elements = math.prod(shape)
        last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) if elements else -1
        available = storage.size // dtype.itemsize
        if last >= available:
            raise CheckpointError(
                f"{storage.where}: a tensor of shape {list(shape)}, strides {list(strides)} and offset {offset} "
                f"reaches element {last}, but its storage has {available} of {dtype}."
            )
        if elements > available and elements * dtype.itemsize > EXPANDED_LIMIT:
            raise CheckpointError(
                f"{storage.where}: a tensor of shape {list(shape)} repeats the {available} stored elements; "
                "more than 1 GiB of that is not read."
            )
        tensor = StoredTensor(storage, dtype, tuple(shape), tuple(strides), offset)
        self.found.append(tensor)
        return tensor


def _storage_dtype(kind: Any, where: str) -> np.dtype:
    name = kind.name if isinstance(kind, Name) else ""
    if name not in STORAGES:
        raise CheckpointError(f"{where} holds a storage of kind {kind!s:.80}, which is not read.")
    return DTYPES[STORAGES[name]]


# zip format


@no_type_check
class _Window(io.RawIOBase):
    """A part of a mapped file as a file of its own."""

    def __init__(self, mapping: mmap.mmap, start: int, size: int):
        self._view, self._at = memoryview(mapping)[start : start + size], 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        base = (0, self._at, len(self._view))[whence]
        if base + offset < 0:
            raise OSError("before the start of the file")
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        end = len(self._view) if size is None or size < 0 else self._at + size
        part = bytes(self._view[self._at : end])
        self._at += len(part)
        return part


def _read_zip(mapping: mmap.mmap, start: int, size: int, where: str) -> TorchFile:
    records = _zip_records(mapping, start, size, where)
    main = [name for name in records if name == "data.pkl" or name.endswith("/data.pkl")]
    if len(main) != 1:
        raise CheckpointError(
            f"{where} is a zip file, but not one of torch.save: it holds {len(main)} records named data.pkl."
        )
    root = main[0].removesuffix("data.pkl")
    order = records.get(f"{root}byteorder")
    if order is not None and bytes(order.bytes()) != b"little":
        raise CheckpointError(f"{where} was written on a big-endian machine ({bytes(order.bytes())[:20]!r}).")
    tensors = _Tensors(where)

    def outside(reference: Any) -> tuple[Storage, np.dtype]:
        if not isinstance(reference, tuple) or len(reference) != 5 or reference[0] != "storage":
            raise ValueError("a reference to something else than a storage")
        _, kind, key, _, numel = reference
        dtype, storage = _storage_dtype(kind, where), records.get(f"{root}data/{key}")
        if storage is None:
            raise CheckpointError(f"{where} is damaged: the record data/{key!s:.40} is missing.")
        if type(numel) is not int or numel * dtype.itemsize != storage.size:
            raise CheckpointError(
                f"{storage.where} has {storage.size} bytes; expected {numel} elements of {dtype.itemsize} bytes."
            )
        return storage, dtype

    value, _ = read_pickle(bytes(records[main[0]].bytes()), where, makers=tensors.makers, persistent=outside)
    return TorchFile(value, where, tensors.found)


_ZIP_ERRORS = (zipfile.BadZipFile, struct.error, OSError, ValueError, EOFError, OverflowError, NotImplementedError)


def _zip_records(mapping: mmap.mmap, start: int, size: int, where: str) -> dict[str, Storage]:
    """Name -> where the bytes of that record lie."""
    try:
        infos = zipfile.ZipFile(_Window(mapping, start, size)).infolist()
    except (*_ZIP_ERRORS, UnicodeDecodeError, MemoryError, RuntimeError) as error:
        raise CheckpointError(
            f"{where} is damaged or cut off: its zip directory cannot be read ({error!s:.80}). Copy it again."
        ) from None
    records: dict[str, Storage] = {}
    for number, info in enumerate(infos):
        if number % RELEASE_EVERY == RELEASE_EVERY - 1:
            release_pages(mapping, start, size)  # the system maps what lies around each header too
        name = info.filename
        header = start + info.header_offset
        fixed = mapping[header : header + 30] if 0 <= info.header_offset <= size - 30 else b""
        if len(fixed) < 30 or fixed[:4] != b"PK\x03\x04":
            raise CheckpointError(f"{where} is damaged: the record {name!r:.80} is not where the directory says.")
        if info.compress_type or info.flag_bits & 1 or info.file_size != info.compress_size:
            raise CheckpointError(f"{where}: the record {name!r:.80} is compressed, which torch.save does not do.")
        if name in records:
            raise CheckpointError(f"{where}: the record {name!r:.80} appears twice.")
        begin = header + 30 + int.from_bytes(fixed[26:28], "little") + int.from_bytes(fixed[28:30], "little")
        if begin + info.file_size > start + size:
            raise CheckpointError(f"{where} is cut off within the record {name!r:.80}. Copy it again.")
        records[name] = Storage(mapping, begin, info.file_size, info.CRC, f"{where} (record {name!s:.80})")
    return records


# the format of before torch 1.6


def _read_legacy(mapping: mmap.mmap, start: int, size: int, where: str) -> TorchFile:
    pickles = _LegacyPickles(mapping, start, size, where)
    tensors = _Tensors(where)
    if pickles.next() != LEGACY_MAGIC:
        raise CheckpointError(f"{where} is a pickle, but not one of torch.save.")
    protocol, system = pickles.next(), pickles.next()
    if protocol != LEGACY_PROTOCOL or not isinstance(system, dict) or not system.get("little_endian", True):
        raise CheckpointError(f"{where} has protocol {protocol!s:.20} or byte order of another machine; not read.")
    storages: dict[str, tuple[Storage, np.dtype]] = {}
    numbers: dict[str, int] = {}

    def outside(reference: Any) -> tuple[Storage, np.dtype]:
        if isinstance(reference, tuple) and reference[:1] == ("module",):
            raise CheckpointError(f"{where} holds a whole torch module, not tensors by name. Save its state_dict().")
        if not isinstance(reference, tuple) or len(reference) != 6 or reference[0] != "storage":
            raise ValueError("a reference to something else than a storage")
        _, kind, key, _, numel, view = reference
        dtype = _storage_dtype(kind, where)
        if type(numel) is not int or not 0 <= numel < 2**48 or not isinstance(key, str):
            raise ValueError("a storage without size")
        if key not in storages:
            name = f"{where} (storage {key:.40})"
            storages[key] = (Storage(mapping, 0, numel * dtype.itemsize, None, name), dtype)
            numbers[key] = numel
        if numbers[key] != numel or storages[key][1] != dtype or view is not None:
            raise CheckpointError(f"{where}: the storage {key:.40} is described in two ways, which is not read.")
        return storages[key]

    value = pickles.next(tensors.makers, outside)
    keys = pickles.next()
    if not isinstance(keys, list) or len(set(map(str, keys))) != len(keys) or set(map(str, keys)) != set(storages):
        raise CheckpointError(f"{where} is damaged: its storages are not those that its tensors need.")
    at = pickles.position
    for key in keys:
        storage, dtype = storages[key]
        stated = int.from_bytes(mapping[at : at + 8], "little")
        storage.start = at + 8
        at = storage.start + storage.size
        if stated * dtype.itemsize != storage.size or at > start + size:
            raise CheckpointError(
                f"{storage.where} is damaged or cut off: expected {storage.size} bytes, "
                f"{max(0, start + size - storage.start)} are left, {stated} elements are stated."
            )
    return TorchFile(value, where, tensors.found)


class _LegacyPickles:
    """One pickle after another. They are read from a growing part of the file, since storages follow them."""

    def __init__(self, mapping: mmap.mmap, start: int, size: int, where: str):
        self.mapping, self.end, self.where, self.position = mapping, start + size, where, start

    def next(self, makers: Any = None, persistent: Any = None) -> Any:
        rest = self.end - self.position
        for length in _growing(rest):
            data = bytes(memoryview(self.mapping)[self.position : self.position + length])
            try:
                value, used = read_pickle(data, self.where, makers=makers, persistent=persistent)
            except CheckpointError as error:
                if length == rest or "not a complete pickle" not in str(error):
                    raise
                continue
            self.position += used
            return value
        raise CheckpointError(f"{self.where} is cut off.")


def _growing(rest: int) -> Iterator[int]:
    length = 1 << 16
    while length < rest and length < 1 << 30:
        yield length
        length *= 8
    yield min(rest, 1 << 30)


def plain(value: Any, depth: int = 20) -> Any:
    """What a stand-in says, as JSON can hold it: attributes of a namespace, the value of an enum, names as text."""
    if depth == 0:
        return "..."
    if isinstance(value, bool | int | float | str | None):
        return value
    if isinstance(value, dict):
        return {str(key): plain(item, depth - 1) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item, depth - 1) for item in value]
    if isinstance(value, Name):
        return str(value)
    if isinstance(value, StandIn):
        if value.fields:
            return plain(value.fields, depth - 1)
        return f"{value.kind}({', '.join(str(plain(arg, depth - 1)) for arg in value.args)})"
    if isinstance(value, StoredTensor):
        return f"tensor {value.dtype} {list(value.shape)}"
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, bytes | bytearray) else type(value).__name__
