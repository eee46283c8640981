"""Looking at what is written while it is written: checksums, values that are not finite, progress."""

import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from kimi_zoo.checkpoints.blocks import Blocks
from kimi_zoo.checkpoints.checksums import crc32_combine
from kimi_zoo.checkpoints.files import CheckpointError
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
SMALL = 1 << 16  # bytes that are looked at at once; more of them by another thread, while they are written


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

    def stream(self, name: str, tensor: Blocks) -> Iterator[np.ndarray]:
        """The bytes of a tensor, watched; its stored pieces are released afterwards.

        **Raises:** `CheckpointError` after a piece that has not the checksum it should have.
        """
        check = finite_check(tensor.dtype)
        checksum, finite, mirrored = 0, True, 0
        for piece in tensor.pieces():
            found, length = 0, 0
            summed = self.summed or piece.checksum is not None
            look = lambda part, before, summed=summed: (zlib.crc32(part, before) if summed else 0, check(part))
            for part in piece.parts:
                if part.nbytes < SMALL:
                    found, fine = look(part, found)
                    yield part
                else:
                    looking = self._thread.submit(look, part, found)
                    yield part
                    found, fine = looking.result()
                finite = finite and fine
                length += part.nbytes
                self.advance(part.nbytes)
                mirrored += part.nbytes
                if mirrored > RELEASE_BYTES:
                    tensor.release()
                    mirrored = 0
            if piece.checksum is not None and found != piece.checksum:
                raise CheckpointError(
                    f"{piece.where} is damaged ({name}): its checksum is {found:08x}, "
                    f"and should be {piece.checksum:08x}."
                )
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
    bits = np.dtype(f"u{dtype.itemsize}")
    mask = bits.type(2 ** (8 * dtype.itemsize - 1) - 1)
    return lambda part: not part.size or int((part.view(bits) & mask).max()) <= limit
