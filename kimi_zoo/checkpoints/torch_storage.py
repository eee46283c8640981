"""torch's dtypes and storages, and tensors that are views of a storage in a mapped file."""

import math
import mmap
import zlib
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from kimi_zoo.checkpoints.blocks import Source
from kimi_zoo.checkpoints.files import CheckpointError, release_pages

DTYPES: dict[str, np.dtype] = {
    **{name: np.dtype(name) for name in "float64 float32 float16 int64 int32 int16 int8".split()},
    **{name: np.dtype(name) for name in "uint64 uint32 uint16 uint8 bool complex64 complex128".split()},
    **{name: np.dtype(getattr(ml_dtypes, name)) for name in "bfloat16 float8_e4m3fn float8_e5m2".split()},
    **{name: np.dtype(getattr(ml_dtypes, name)) for name in "float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu".split()},
}
"""torch's name of a dtype -> numpy's."""

STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "UntypedStorage": "uint8",
}
"""torch's storage classes -> the dtype of their elements."""


CHECKED_BYTES = 8_000_000  # of a storage that are mirrored in memory while its checksum is computed


@dataclass
class Storage:
    """Bytes in a mapped file: `size` from `start` on, with the checksum they should have."""

    mapping: mmap.mmap
    start: int
    size: int
    checksum: int | None
    where: str
    checked: bool = False

    def bytes(self) -> memoryview:
        """The bytes.

        **Raises:** `CheckpointError` if their checksum is wrong.
        """
        if not self.checked and self.checksum is not None:
            found = 0
            for at in range(self.start, self.start + self.size, CHECKED_BYTES):
                end = min(at + CHECKED_BYTES, self.start + self.size)
                found = zlib.crc32(memoryview(self.mapping)[at:end], found)
                release_pages(self.mapping, at, end - at)
            if found != self.checksum:
                raise CheckpointError(
                    f"{self.where} is damaged: its checksum is {found:08x}, and should be {self.checksum:08x}."
                )
        self.checked = True
        return self.unchecked()

    def unchecked(self) -> memoryview:
        """The bytes, whatever their checksum."""
        return memoryview(self.mapping)[self.start : self.start + self.size]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file: a view of a storage. Strides and offset count elements."""

    storage: Storage
    dtype: np.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def where(self) -> str:
        """The file it lies in."""
        return self.storage.where

    def array(self) -> np.ndarray:
        """A read-only view of it.

        **Raises:** `CheckpointError` if the storage is damaged.
        """
        return self._view(self.storage.bytes())

    def unchecked(self) -> tuple[np.ndarray, int | None]:
        """A view of it, and the checksum of its bytes if it is all of its storage and that was not yet verified."""
        array = self._view(self.storage.unchecked())
        if self.storage.checked or self.storage.checksum is None:
            return array, None
        if array.flags.c_contiguous and array.nbytes == self.storage.size:
            return array, self.storage.checksum
        return self.array(), None

    def _view(self, raw: memoryview) -> np.ndarray:
        width = self.dtype.itemsize
        strides = tuple(stride * width for stride in self.strides)
        return np.ndarray(self.shape, self.dtype, buffer=raw, offset=self.offset * width, strides=strides)

    def release(self) -> None:
        """Gives back the memory that mirrors it."""
        release_pages(self.storage.mapping, self.storage.start, self.storage.size)

    def same_bytes(self, other: Source) -> bool:
        """Whether another tensor holds the same values; equal checksums of whole storages are enough."""
        if not isinstance(other, StoredTensor):
            return _same_values(self, other)
        mine, theirs = self.storage, other.storage
        layout = lambda t: (t.dtype, t.shape, t.strides, t.offset, t.storage.size)
        if mine.checksum is not None and theirs.checksum is not None and layout(self) == layout(other):
            whole = math.prod(self.shape) * self.dtype.itemsize == mine.size
            if mine.checksum == theirs.checksum or whole:
                return mine.checksum == theirs.checksum
        return _same_values(self, other)


def _same_values(one: Source, other: Source) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    bits = f"u{one.dtype.itemsize}" if one.dtype.itemsize in (1, 2, 4, 8) else one.dtype
    return np.array_equal(one.array().view(bits), other.array().view(bits))
