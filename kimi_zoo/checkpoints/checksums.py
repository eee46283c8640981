"""CRC-32 of bytes that lie one after another, from the checksums of the parts.

**Source:** `crc32_combine` of zlib: appending zeros to a message is a linear map of its checksum over GF(2).
"""

import functools

POLYNOMIAL = 0xEDB88320

Matrix = tuple[int, ...]  # column n is what bit n becomes


def crc32_combine(first: int, second: int, length: int) -> int:
    """`crc32(a + b)`, given `crc32(a)`, `crc32(b)` and the `length` of `b` in bytes."""
    return _times(_zeros(length), first) ^ second if first else second


@functools.lru_cache(maxsize=256)
def _zeros(length: int) -> Matrix:
    """What appending that many zero bytes does to a checksum."""
    power = _square(_square(_square((POLYNOMIAL, *(1 << n for n in range(31))))))  # one byte
    result: Matrix = tuple(1 << n for n in range(32))
    while length:
        if length & 1:
            result = tuple(_times(power, column) for column in result)
        power = _square(power)
        length >>= 1
    return result


def _times(matrix: Matrix, vector: int) -> int:
    total = 0
    for column in matrix:
        if vector & 1:
            total ^= column
        vector >>= 1
    return total


def _square(matrix: Matrix) -> Matrix:
    return tuple(_times(matrix, column) for column in matrix)
