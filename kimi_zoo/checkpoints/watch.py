"""Looking at what is written while it is written: checksums, values that are not finite, progress."""

import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from kimi_zoo.checkpoints.blocks import STEP, Blocks
from kimi_zoo.checkpoints.checksums import crc32_combine
from kimi_zoo.checkpoints.safetensors_header import DTYPE_NAMES

# the largest bit pattern, without its sign, that is still finite
_FINITE = {
    "F64": 0x7FEFFFFFFFFFFFFF,
    "F32": 0x7F7FFFFF,
    "F16": 0x7BFF,
    "BF16": 0x7F7F,
    "F8_E5M2": 0x7B,
    "F8_E4M3": 0x7E,
}


RELEASE_BYTES = 1 << 26  # of a long tensor that may be mirrored in memory at a time


@dataclass
class Watch:
    """Looks at everything that is written: checksums, values that are not finite, progress.

    `summed`: whether the checksum of every tensor is wanted; those that its pieces should have are compared anyway.
    """

    advance: Callable[[int], None]
    summed: bool = True
    checksums: dict[str, int] = field(default_factory=dict)
    not_finite: list[str] = field(default_factory=list)
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1), repr=False)
    _memory: tuple[np.ndarray, np.ndarray] = field(
        default_factory=lambda: (np.empty(STEP, np.uint8), np.empty(STEP, np.uint8)), repr=False
    )

    def stream(self, name: str, tensor: Blocks) -> Iterator[np.ndarray]:
        """The bytes of a tensor, watched; its stored pieces are released afterwards. Each part is valid until the next.

        Another thread makes and looks at the next part while one is written.

        **Raises:** `CheckpointError` after a piece that has not the checksum it should have.
        """
        parts = self._parts(name, tensor)
        coming = self._thread.submit(next, parts, None)
        while (part := coming.result()) is not None:
            coming = self._thread.submit(next, parts, None)
            yield part
            self.advance(part.nbytes)

    def _parts(self, name: str, tensor: Blocks) -> Iterator[np.ndarray]:
        """The parts, each in memory of its own until the second after it."""
        check = finite_check(tensor.dtype)
        checksum, finite, mirrored = 0, True, 0
        for piece in tensor.pieces():
            found, length = 0, 0
            for part in piece.parts:
                if part.nbytes > self._memory[0].nbytes:
                    self._memory = (np.empty(part.nbytes, np.uint8), np.empty(part.nbytes, np.uint8))
                one, other = self._memory
                copy, self._memory = one[: part.nbytes], (other, one)
                np.copyto(copy, part)  # besides, the system is slow to write what is only mapped
                if self.summed or piece.checksum is not None:
                    found = zlib.crc32(copy, found)
                finite = finite and check(copy)
                yield copy
                length += part.nbytes
                mirrored += part.nbytes
                if mirrored > RELEASE_BYTES:
                    tensor.release()
                    mirrored = 0
            piece.compare(found, name)
            checksum = crc32_combine(checksum, found, length) if self.summed else 0
        tensor.release()
        if self.summed:
            self.checksums[name] = checksum
        if not finite:
            self.not_finite.append(name)

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown()


def finite_check(dtype: np.dtype) -> Callable[[np.ndarray], bool]:
    """Says of raw bytes whether all values are finite; always true for integers."""
    limit = _FINITE.get(DTYPE_NAMES.get(dtype, ""))
    if limit is None:
        return lambda _: True
    positive, any_sign = np.dtype(f"i{dtype.itemsize}"), np.dtype(f"u{dtype.itemsize}")
    sign = 1 << (8 * dtype.itemsize - 1)
    return lambda part: (
        not part.size or bool(part.view(positive).max() <= limit and part.view(any_sign).max() <= sign | limit)
    )
