"""Tensors put together from stored pieces, without reading any: joined, cut, stacked, and streamed in order.

Every operation is arithmetic on shapes. Values are read when `stream` or `read` is called, a few megabytes at a time.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np

from kimi_zoo.checkpoints.files import CheckpointError

STEP = 1 << 19  # bytes that are looked at together: they stay in the cache of a core from one look to the next

Shape = tuple[int, ...]
View = Callable[[np.ndarray], np.ndarray]


@runtime_checkable
class Source(Protocol):
    """A tensor that lies in a file."""

    @property
    def shape(self) -> Shape:
        """Its shape."""
        ...

    @property
    def dtype(self) -> np.dtype:
        """Its dtype."""
        ...

    @property
    def where(self) -> str:
        """What errors call it: its file."""
        ...

    def array(self) -> np.ndarray:
        """A read-only view of it, with checksums verified.

        **Raises:** `CheckpointError` if it is damaged.
        """
        ...

    def unchecked(self) -> tuple[np.ndarray, int | None]:
        """A view of it, and the CRC-32 that its bytes, in order, must have and that whoever reads them must compare;
        `None` if there is nothing left to verify."""
        ...

    def release(self) -> None:
        """Gives back the memory that mirrors it."""
        ...

    def same_bytes(self, other: "Source") -> bool:
        """Whether another one holds the same values, bit for bit."""
        ...


@dataclass(frozen=True)
class Block:
    """A rectangle of a tensor: where it begins, its shape, and how it is cut out of what is stored.

    `intact`: whether it has all of the source's values in the source's order.
    """

    offset: Shape
    shape: Shape
    source: Source
    views: tuple[View, ...] = ()
    intact: bool = True

    def array(self) -> np.ndarray:
        """Its values."""
        return self._view(self.source.array())

    def unchecked(self) -> tuple[np.ndarray, int | None]:
        """Its values, and the checksum that whoever reads them in order must compare, if there is one."""
        if not self.intact:
            return self.array(), None
        array, checksum = self.source.unchecked()
        return self._view(array), checksum

    def _view(self, array: np.ndarray) -> np.ndarray:
        for view in self.views:
            array = view(array)
        return array


@dataclass(frozen=True)
class Piece:
    """A run of a tensor's bytes: in short parts, with the checksum that they must have if that is still to be seen."""

    parts: Iterator[np.ndarray]
    checksum: int | None
    where: str

    def compare(self, found: int, name: str) -> None:
        """Compares the checksum of its bytes, which belong to the tensor of that name.

        **Raises:** `CheckpointError` if it is not the one that they must have.
        """
        if self.checksum is not None and found != self.checksum:
            raise CheckpointError(
                f"{self.where} is damaged ({name}): its checksum is {found:08x}, and should be {self.checksum:08x}."
            )


@dataclass(frozen=True)
class Blocks:
    """A tensor made of blocks that cover it without overlapping."""

    shape: Shape
    dtype: np.dtype
    blocks: tuple[Block, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def sources(self) -> tuple[Source, ...]:
        """What it is made from."""
        return tuple({id(block.source): block.source for block in self.blocks}.values())

    def part(self, axis: int, start: int, stop: int) -> "Blocks":
        """`tensor[..., start:stop, ...]` along `axis`."""
        blocks = []
        for block in self.blocks:
            low, high = block.offset[axis], block.offset[axis] + block.shape[axis]
            begin, end = max(low, start), min(high, stop)
            if begin >= end and block.shape[axis]:
                continue
            begin, end = max(begin, low), max(end, max(begin, low))
            cut = (*(slice(None) for _ in range(axis)), slice(begin - low, end - low))
            offset = _with(block.offset, axis, begin - start)
            whole = (begin, end) == (low, high)
            if not whole:
                views = (*block.views, lambda array, cut=cut: array[cut])
                block = replace(block, shape=_with(block.shape, axis, end - begin), views=views, intact=False)
            blocks.append(replace(block, offset=offset))
        return Blocks(_with(self.shape, axis, stop - start), self.dtype, tuple(blocks))

    def cut(self, axis: int, sizes: Sequence[int]) -> list["Blocks"]:
        """The parts of these sizes along `axis`, which make up the whole."""
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return [self.part(axis, start, start + size) for start, size in zip(starts, sizes, strict=True)]

    def item(self, axis: int, index: int) -> "Blocks":
        """`tensor[..., index, ...]`: one axis less."""
        part = self.part(axis, index, index + 1)
        return part.reshaped(part.shape[:axis] + part.shape[axis + 1 :])

    def items(self) -> list["Blocks"]:
        """`list(tensor)`: a tensor per index of the first axis."""
        below: list[list[Block]] = [[] for _ in range(self.shape[0])]
        for block in self.blocks:
            for index in range(block.offset[0], block.offset[0] + block.shape[0]):
                below[index].append(block)
        return [Blocks(self.shape, self.dtype, tuple(blocks)).item(0, i) for i, blocks in enumerate(below)]

    def reshaped(self, shape: Shape) -> "Blocks":
        """The same values in another shape: any for a tensor of one block, else one with other axes of size one."""
        if shape == self.shape:
            return self
        if len(self.blocks) == 1:
            (block,) = self.blocks
            views = (*block.views, lambda array: array.reshape(shape))
            return Blocks(shape, self.dtype, (replace(block, offset=(0,) * len(shape), shape=shape, views=views),))
        wide = [axis for axis, size in enumerate(self.shape) if size != 1]
        if [self.shape[axis] for axis in wide] != [size for size in shape if size != 1]:
            raise ValueError(f"{list(self.shape)} in pieces cannot be taken as {list(shape)}")

        def spread(values: Shape, fill: int) -> Shape:
            taken = iter(wide)
            return tuple(fill if size == 1 else values[next(taken)] for size in shape)

        blocks = []
        for block in self.blocks:
            new = spread(block.shape, 1)
            views = (*block.views, lambda array, new=new: array.reshape(new))
            blocks.append(replace(block, offset=spread(block.offset, 0), shape=new, views=views))
        return Blocks(shape, self.dtype, tuple(blocks))

    def transposed(self) -> "Blocks":
        """A matrix with rows and columns swapped."""
        blocks = tuple(
            Block(block.offset[::-1], block.shape[::-1], block.source, (*block.views, np.transpose), intact=False)
            for block in self.blocks
        )
        return Blocks(self.shape[::-1], self.dtype, blocks)

    def mapped(self, function: View) -> "Blocks":
        """`function` of every element: it keeps shape and dtype."""
        blocks = tuple(replace(block, views=(*block.views, function), intact=False) for block in self.blocks)
        return replace(self, blocks=blocks)

    def read(self) -> np.ndarray:
        """All values, in an array of their own."""
        out = np.empty(self.shape, self.dtype)
        self.fill(out)
        return out

    def fill(self, out: np.ndarray) -> None:
        """Writes all values into `out`."""
        for block in self.blocks:
            index = tuple(slice(at, at + size) for at, size in zip(block.offset, block.shape, strict=True))
            out[index] = block.array()

    def stream(self) -> Iterator[np.ndarray]:
        """All bytes in row-major order, as short one-dimensional arrays of uint8; each is valid until the next."""
        for piece in self._pieces(lambda block: (block.array(), None)):
            yield from piece.parts

    def pieces(self) -> Iterator[Piece]:
        """The same in runs; for those with a checksum the caller must compare it with that of the bytes."""
        return self._pieces(lambda block: block.unchecked())

    def _pieces(self, read: Callable[[Block], tuple[np.ndarray, int | None]]) -> Iterator[Piece]:
        if not self.nbytes:
            return
        blocks = sorted(self.blocks, key=lambda block: block.offset)
        inner = math.prod(self.shape[1:]) * self.dtype.itemsize if self.shape else self.dtype.itemsize
        if not self.shape or all(block.shape[1:] == self.shape[1:] for block in blocks):
            for block in blocks:
                array, checksum = read(block)
                if checksum is not None and not array.flags.c_contiguous:
                    array, checksum = block.array(), None
                yield Piece(_stream_array(array, inner), checksum, block.source.where)
        else:
            yield Piece(self._rows(inner), None, blocks[0].source.where)

    def _rows(self, inner: int) -> Iterator[np.ndarray]:
        """A few rows at a time, put together from blocks that hold parts of rows."""
        rows = max(1, STEP // inner)
        buffer = np.empty((min(rows, self.shape[0]), *self.shape[1:]), self.dtype)
        for start in range(0, self.shape[0], rows):
            part = self.part(0, start, min(start + rows, self.shape[0]))
            out = buffer[: part.shape[0]]
            part.fill(out)
            yield out.reshape(-1).view(np.uint8)

    def release(self) -> None:
        """Gives back the memory that mirrors the stored pieces."""
        for source in self.sources:
            source.release()


def _stream_array(array: np.ndarray, inner: int) -> Iterator[np.ndarray]:
    if array.flags.c_contiguous:
        flat = array.reshape(-1).view(np.uint8)
        for start in range(0, flat.size, STEP):
            yield flat[start : start + STEP]
        return
    rows = max(1, STEP // inner)
    buffer = np.empty((min(rows, array.shape[0]), *array.shape[1:]), array.dtype)
    for start in range(0, array.shape[0], rows):
        part = array[start : start + rows]
        out = buffer[: part.shape[0]]
        np.copyto(out, part)
        yield out.reshape(-1).view(np.uint8)


def _with(values: Shape, axis: int, value: int) -> Shape:
    return (*values[:axis], value, *values[axis + 1 :])


def whole(source: Source) -> Blocks:
    """A stored tensor as it is."""
    return Blocks(source.shape, source.dtype, (Block((0,) * len(source.shape), source.shape, source),))


def join(parts: Sequence[Blocks], axis: int) -> Blocks:
    """`np.concatenate(parts, axis)`.

    **Raises:** `ValueError` if dtypes or other axes differ.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    frames = {_with(part.shape, axis, 0) for part in parts}
    if len(frames) > 1 or len({part.dtype for part in parts}) > 1:
        kinds = ", ".join(f"{part.dtype} {list(part.shape)}" for part in parts)
        raise ValueError(f"pieces that do not fit together: {kinds}")
    blocks, start = [], 0
    for part in parts:
        blocks += [replace(b, offset=_with(b.offset, axis, b.offset[axis] + start)) for b in part.blocks]
        start += part.shape[axis]
    return Blocks(_with(first.shape, axis, start), first.dtype, tuple(blocks))


def stack(parts: Sequence[Blocks]) -> Blocks:
    """`np.stack(parts)`."""
    return join([part.reshaped((1, *part.shape)) for part in parts], 0)


@dataclass(frozen=True)
class Zeros:
    """A source of zeros, for padding."""

    shape: Shape
    dtype: np.dtype
    where: str = "padding"

    def array(self) -> np.ndarray:
        """Zeros."""
        return np.broadcast_to(np.zeros((), self.dtype), self.shape)

    def unchecked(self) -> tuple[np.ndarray, int | None]:
        """Zeros, with nothing to verify."""
        return self.array(), None

    def release(self) -> None:
        """Nothing to give back."""

    def same_bytes(self, other: Source) -> bool:
        """Whether the other is padding too."""
        return isinstance(other, Zeros) and other.shape == self.shape


@dataclass(frozen=True)
class Computed:
    """A source whose values are made when they are looked at."""

    shape: Shape
    dtype: np.dtype
    make: Callable[[], np.ndarray]
    where: str = "computed"

    def array(self) -> np.ndarray:
        """The values."""
        return self.make()

    def unchecked(self) -> tuple[np.ndarray, int | None]:
        """The values, with nothing to verify."""
        return self.array(), None

    def release(self) -> None:
        """Nothing to give back."""

    def same_bytes(self, other: Source) -> bool:
        """Whether the other is this."""
        return other is self
