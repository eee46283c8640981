"""Checkpoints of torch.distributed.checkpoint, read without torch: `.metadata` and `*.distcp` files.

`.metadata` says, for each tensor, its global shape and the chunks it is cut into, and for each chunk, in which file and
at which bytes an archive of `torch.save` with it lies. Megatron's `torch_dist` and `fsdp_dtensor` are such checkpoints.
"""

import math
import mmap
import os
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kimi_zoo.checkpoints.blocks import Block, Blocks, Source
from kimi_zoo.checkpoints.files import CheckpointError, join_problems, release_pages
from kimi_zoo.checkpoints.pickles import Name, StandIn, read_pickle
from kimi_zoo.checkpoints.torch_files import map_bytes, read_archive
from kimi_zoo.checkpoints.torch_storage import DTYPES, StoredTensor

METADATA = ".metadata"
MAX_OPEN_FILES = 200
MAX_BESIDE = 10_000  # chunks of one tensor that share a range of the first axis


class Mappings:
    """The files of a folder, mapped into memory when they are needed; at most `MAX_OPEN_FILES` at a time."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._open: OrderedDict[str, mmap.mmap] = OrderedDict()

    def get(self, name: str) -> mmap.mmap:
        """The file of that name, mapped."""
        if name not in self._open:
            self._open[name] = map_bytes(self.folder / name)
            if len(self._open) > MAX_OPEN_FILES:
                self._open.popitem(last=False)
        self._open.move_to_end(name)
        return self._open[name]


@dataclass(frozen=True)
class Place:
    """Where an archive lies: `length` bytes from `offset` on."""

    file: str
    offset: int
    length: int


@dataclass
class Chunk:
    """One chunk of a tensor, opened when it is first looked at."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    place: Place
    files: Mappings
    _tensor: StoredTensor | None = field(default=None, repr=False)
    _checked: bool = False

    @property
    def where(self) -> str:
        """Its file, and the tensor it belongs to."""
        return f"{self.files.folder / self.place.file} ({self.name})"

    def open(self) -> StoredTensor:
        """The tensor in the archive.

        **Raises:** `CheckpointError` if it is not the tensor that `.metadata` announces.
        """
        if self._tensor is None:
            mapping = self.files.get(self.place.file)
            value = read_archive(mapping, self.place.offset, self.place.length, self.where).value
            if not isinstance(value, StoredTensor):
                raise CheckpointError(f"{self.where} holds {_kind(value)}; expected a tensor.")
            if (value.shape, value.dtype) != (self.shape, self.dtype):
                raise CheckpointError(
                    f"{self.where}: .metadata says {self.dtype} {list(self.shape)}, "
                    f"the file holds {value.dtype} {list(value.shape)}."
                )
            value.storage.checked = self._checked
            self._tensor = value
        return self._tensor

    def array(self) -> np.ndarray:
        """A read-only view of it, with its checksum verified."""
        array = self.open().array()
        self._checked = True
        return array

    def unchecked(self) -> tuple[np.ndarray, int | None]:
        """A view of it, and the checksum that is still to be compared."""
        return self.open().unchecked()

    def release(self) -> None:
        """Gives back the memory that mirrors it, and the view of its file."""
        release_pages(self.files.get(self.place.file), self.place.offset, self.place.length)
        self._tensor = None

    def same_bytes(self, other: Source) -> bool:
        """Whether another source holds the same values."""
        return self.open().same_bytes(other.open() if isinstance(other, Chunk) else other)


def _kind(value: Any) -> str:
    return f"a {value.kind}" if isinstance(value, StandIn) else f"a {type(value).__name__}"


@dataclass
class DistCheckpoint:
    """What `.metadata` announces: `tensors` by name, and `objects`, the names of everything else."""

    folder: Path
    tensors: dict[str, Blocks]
    objects: dict[str, Place]
    files: Mappings

    def read_object(self, name: str) -> Any:
        """The value of something that is not a tensor, with stand-ins in it.

        **Raises:** `UnsafePickle` or `CheckpointError` if it cannot be read.
        """
        place = self.objects[name]
        where = f"{self.folder / place.file} ({name})"
        return read_archive(self.files.get(place.file), place.offset, place.length, where).value


def is_dist_checkpoint(folder: Path) -> bool:
    """Whether a folder holds `.metadata` or chunks."""
    return (folder / METADATA).is_file() or any(folder.glob("*.distcp"))


def open_dist_checkpoint(folder: str | os.PathLike[str]) -> DistCheckpoint:
    """Reads `.metadata`, and checks that every tensor is covered by its chunks and that every file is there.

    **Raises:** `CheckpointError` that lists everything found wrong: missing and cut off files, paths that leave the
    folder, chunks that overlap or leave gaps, entries described twice; `UnsafePickle` for a pickle that names what is
    not known to be harmless.
    """
    folder = Path(folder)
    path = folder / METADATA
    if not path.is_file():
        raise CheckpointError(f"{folder} holds *.distcp files but no .metadata, which says what is in them.")
    value, _ = read_pickle(path.read_bytes(), str(path))
    if not isinstance(value, StandIn) or not value.kind.name.endswith("Metadata"):
        raise CheckpointError(f"{path} holds {_kind(value)}; expected the metadata of a distributed checkpoint.")
    entries, stored = value.fields.get("state_dict_metadata"), value.fields.get("storage_data")
    if not isinstance(entries, dict) or not isinstance(stored, dict):
        raise CheckpointError(f"{path} lacks state_dict_metadata or storage_data. Is it from a very old torch?")
    problems: list[str] = []
    places = _places(stored, problems)
    _check_files(folder, places, problems)
    files = Mappings(folder)
    out = DistCheckpoint(folder, {}, {}, files)
    for name, entry in entries.items():
        try:
            if _is(entry, "BytesStorageMetadata"):
                out.objects[name] = _find(places, name, None)
            elif _is(entry, "TensorStorageMetadata"):
                out.tensors[name] = _tensor(name, entry, places, files)
            else:
                problems.append(f"{name!s:.100} is described by {_kind(entry)}.")
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError(f"{path} does not describe a complete checkpoint:\n" + join_problems(problems))
    return out


def _is(value: Any, name: str) -> bool:
    return isinstance(value, StandIn) and value.kind.name == name


Places = dict[tuple[str, tuple[int, ...] | None], Place]


def _places(stored: Mapping[Any, Any], problems: list[str]) -> Places:
    places: Places = {}
    for index, info in stored.items():
        if not isinstance(index, StandIn) or not isinstance(info, StandIn):
            problems.append("storage_data holds something else than places in files.")
            continue
        name, offset = index.fields.get("fqn"), index.fields.get("offset")
        file, begin, length = (info.fields.get(key) for key in ("relative_path", "offset", "length"))
        if not isinstance(name, str) or not isinstance(offset, tuple | None) or not isinstance(file, str):
            problems.append(f"storage_data has an entry without name, offset or file: {name!s:.80}.")
        elif type(begin) is not int or type(length) is not int or begin < 0 or length < 0:
            problems.append(f"{name:.100} lies at byte {begin!s:.20} of {file:.100}, for {length!s:.20} bytes.")
        elif info.fields.get("transform_descriptors"):
            problems.append(f"{name:.100} is stored compressed ({info.fields['transform_descriptors']!s:.80}).")
        elif (name, offset) in places:
            problems.append(f"{name:.100} is stored twice at offset {offset}.")
        else:
            places[name, offset] = Place(file, begin, length)
    return places


def _check_files(folder: Path, places: Places, problems: list[str]) -> None:
    """Checks that each file lies in the folder, exists, and is as long as its entries say."""
    needed: dict[str, tuple[int, str]] = {}
    for (name, _), place in places.items():
        needed[place.file] = max(needed.get(place.file, (0, name)), (place.offset + place.length, name))
    for file, (size, name) in sorted(needed.items()):
        path = Path(file)
        if path.is_absolute() or ".." in path.parts or "\0" in file or not path.parts:
            problems.append(f"{name:.100} lies in {file!r:.200}, which leaves the checkpoint's folder.")
        elif not (folder / path).is_file():
            problems.append(f"the file {folder / path} is missing (it holds {name:.100}, among others).")
        elif (present := (folder / path).stat().st_size) < size:
            problems.append(
                f"the file {folder / path} is cut off: {name:.100} ends at byte {size}, the file has {present} bytes."
            )


def _find(places: Places, name: str, offset: tuple[int, ...] | None) -> Place:
    place = places.get((name, offset))
    if place is None:
        at = "" if offset is None else f" at offset {list(offset)}"
        raise CheckpointError(f"{name:.100}{at} is announced, but storage_data does not say where it is.")
    return place


def _sizes(value: Any) -> tuple[int, ...] | None:
    fine = isinstance(value, tuple) and len(value) <= 32 and all(type(v) is int and 0 <= v < 2**48 for v in value)
    return value if fine else None


def _tensor(name: str, entry: StandIn, places: Places, files: Mappings) -> Blocks:
    shape, chunks = _sizes(entry.fields.get("size")), entry.fields.get("chunks")
    dtype = _dtype(entry.fields.get("properties"))
    if shape is None or not isinstance(chunks, list) or math.prod(shape) >= 2**60:
        raise CheckpointError(f"{name:.100} has no usable shape ({entry.fields.get('size')!s:.60}) or chunks.")
    if dtype is None:
        raise CheckpointError(f"{name:.100} has a dtype that is not read: {entry.fields.get('properties')!s:.100}.")
    blocks = []
    for chunk in chunks:
        fields = chunk.fields if isinstance(chunk, StandIn) else {}
        offset, size = _sizes(fields.get("offsets")), _sizes(fields.get("sizes"))
        if offset is None or size is None or len(offset) != len(shape) or len(size) != len(shape):
            raise CheckpointError(f"{name:.100} {list(shape)} has a chunk without usable offsets and sizes.")
        if any(at + n > total for at, n, total in zip(offset, size, shape, strict=True)):
            raise CheckpointError(
                f"{name:.100} {list(shape)} has a chunk {list(size)} at {list(offset)}, which reaches beyond it."
            )
        if math.prod(size) or not math.prod(shape):
            blocks.append(Block(offset, size, Chunk(name, size, dtype, _find(places, name, offset), files)))
    check_cover(name, shape, blocks)
    return Blocks(shape, dtype, tuple(blocks))


def _dtype(properties: Any) -> np.dtype | None:
    """The dtype in `TensorProperties`: pickled as a tuple that begins with it, or as attributes."""
    if not isinstance(properties, StandIn):
        return None
    first = properties.args[0] if properties.args else properties.fields.get("dtype")
    if first is None and isinstance(properties.state, tuple) and properties.state:
        first = properties.state[0]
    return DTYPES.get(first.name) if isinstance(first, Name) else None


def check_cover(name: str, shape: tuple[int, ...], blocks: list[Block]) -> None:
    """Checks that blocks cover a tensor without overlapping.

    **Raises:** `CheckpointError` otherwise.
    """
    active: list[Block] = []
    for block in sorted(blocks, key=lambda block: block.offset):
        if shape:
            active = [other for other in active if other.offset[0] + other.shape[0] > block.offset[0]]
        if len(active) > MAX_BESIDE:
            raise CheckpointError(f"{name:.100} {list(shape)} is cut into more than {MAX_BESIDE} chunks side by side.")
        for other in active:
            if _overlap(block, other):
                raise CheckpointError(
                    f"{name:.100} {list(shape)}: its chunks {list(other.shape)} at {list(other.offset)} and "
                    f"{list(block.shape)} at {list(block.offset)} overlap."
                )
        active.append(block)
    covered = sum(math.prod(block.shape) for block in blocks)
    if covered != math.prod(shape):
        raise CheckpointError(
            f"{name:.100} {list(shape)}: its {len(blocks)} chunks do not cover it; "
            f"{math.prod(shape) - covered:,} of {math.prod(shape):,} elements are missing."
        )


def _overlap(one: Block, other: Block) -> bool:
    sides = zip(one.offset, one.shape, other.offset, other.shape, strict=True)
    return all(a < c + d and c < a + b for a, b, c, d in sides)
