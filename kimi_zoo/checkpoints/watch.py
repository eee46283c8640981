"""Looking at what is written while it is written: checksums, values that are not finite, progress."""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from kimi_zoo.checkpoints.blocks import Blocks
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


@dataclass
class Watch:
    """Looks at everything that is written: checksums, values that are not finite, progress."""

    advance: Callable[[int], None]
    checksums: dict[str, int] = field(default_factory=dict)
    not_finite: list[str] = field(default_factory=list)

    def stream(self, name: str, tensor: Blocks) -> Iterator[np.ndarray]:
        """The bytes of a tensor, watched; its stored pieces are released afterwards."""
        check = finite_check(tensor.dtype)
        checksum, finite = 0, True
        for part in tensor.stream():
            checksum = zlib.crc32(part, checksum)
            finite = finite and check(part)
            yield part
            self.advance(part.nbytes)
        tensor.release()
        self.checksums[name] = checksum
        if not finite:
            self.not_finite.append(name)


def finite_check(dtype: np.dtype) -> Callable[[np.ndarray], bool]:
    """Says of raw bytes whether all values are finite; always true for integers."""
    limit = _FINITE.get(DTYPE_NAMES.get(dtype, ""))
    if limit is None:
        return lambda _: True
    bits = np.dtype(f"u{dtype.itemsize}")
    mask = bits.type(2 ** (8 * dtype.itemsize - 1) - 1)
    return lambda part: not part.size or int((part.view(bits) & mask).max()) <= limit
