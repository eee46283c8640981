"""Cutting Megatron's tensors into the sections of the table, and putting the ranks' pieces back together.

A fused tensor of a rank holds that rank's share of each section, one after another. So each rank's tensor is cut first,
then sections are joined over ranks.
"""

from collections.abc import Mapping, Sequence

from kimi_zoo.checkpoints.blocks import Blocks, Zeros, join, whole
from kimi_zoo.checkpoints.tables.megatron import Dims, Row, sized

ROUND_WIDTHS = (8, 16, 32, 64, 128, 256)


class Misfit(ValueError):
    """A tensor whose shape is not that which the configuration demands; the message gives both."""


def padded_heads(heads: int, ranks: int) -> int:
    """Heads with those added that make every rank hold as many."""
    return -(-heads // ranks) * ranks


def padded_sizes(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """`dimensions` of a model whose heads of KDA are padded to a multiple of the ranks."""
    heads = padded_heads(sizes["kda_heads"], ranks)
    return {**sizes, "kda_heads": heads, "kda": heads * sizes["kda_dim"]}


def rank_shape(row: Row, sizes: Mapping[str, int], ranks: int) -> tuple[list[int], tuple[int, ...]]:
    """Rows of each section, and the whole shape, of what one of `ranks` ranks holds.

    **Raises:** `Misfit` if the size does not divide.
    """
    padded = padded_sizes(sizes, ranks)
    shapes = [list(sized(section.shape, padded)) for section in row.sections]
    if row.axis is not None:
        for shape in shapes:
            if shape[row.axis] % ranks:
                raise Misfit(f"{row.name}: {shape[row.axis]} is not divisible by the {ranks} ranks it is split over")
            shape[row.axis] //= ranks
    lengths = [shape[0] for shape in shapes]
    return lengths, (sum(lengths), *shapes[0][1:])


def is_round(stored: int, real: int) -> bool:
    """Whether `stored` is `real` rounded up to a usual width, so that what follows is padding."""
    return any(stored == -(-real // width) * width for width in ROUND_WIDTHS)


def cut_rank(tensor: Blocks, row: Row, sizes: Mapping[str, int], ranks: int) -> tuple[list[Blocks], bool]:
    """The sections in one rank's tensor, and whether the rank holds all of them rather than its share.

    **Raises:** `Misfit` if its shape is not what the configuration demands.
    """
    if row.replicable and ranks > 1:
        lengths, everything = rank_shape(row, sizes, 1)
        if tensor.shape == everything:
            return tensor.cut(0, lengths), True
    lengths, expected = rank_shape(row, sizes, ranks)
    if tensor.shape != expected and len(tensor.shape) == len(expected):
        tensor = _without_padding(tensor, row, expected)
    if tensor.shape != expected:
        raise Misfit(f"has shape {list(tensor.shape)}; expected {list(expected)}")
    return (tensor.cut(0, lengths) if len(lengths) > 1 else [tensor]), False


def _without_padding(tensor: Blocks, row: Row, expected: tuple[int, ...]) -> Blocks:
    """Drops rows that follow those of a fused projection whose width was rounded up."""
    rounded = len(row.sections) > 1 and row.axis == 0 and is_round(tensor.shape[0], expected[0])
    if rounded and tensor.shape[0] > expected[0] and tensor.shape[1:] == expected[1:]:
        return tensor.part(0, 0, expected[0])
    return tensor


def join_ranks(parts: Sequence[Sequence[Blocks]], axis: int | None) -> list[Blocks]:
    """Sections of every rank, in the order of ranks -> sections of the model.

    **Raises:** `Misfit` if pieces differ in dtype or do not fit.
    """
    if axis is None:
        return list(parts[0])
    try:
        return [join(pieces, axis) for pieces in zip(*parts, strict=True)]
    except ValueError as error:
        raise Misfit(str(error)) from None


def trim(tensor: Blocks, row: Row, shape: Dims, sizes: Mapping[str, int]) -> Blocks:
    """A whole section without the padding that Megatron adds to vocabulary and heads.

    **Raises:** `Misfit` if it is shorter than the configuration demands, or differs otherwise.
    """
    expected = sized(shape, dict(sizes))
    axis = row.axis or 0
    if tensor.shape == expected or len(tensor.shape) != len(expected):
        return tensor
    unit = sizes["kda_dim"] if shape[axis] == "kda" else 1
    stored, real = tensor.shape[axis], expected[axis]
    heads = shape[axis] in ("kda", "kda_heads") and stored % unit == 0 and stored < 2 * real + 8 * unit
    if stored > real and (heads or (row.padded and shape[axis] == "vocab")):
        return tensor.part(axis, 0, real)
    return tensor


def pad(tensor: Blocks, axis: int, size: int) -> Blocks:
    """The tensor followed by zeros, so that the axis has this size."""
    if tensor.shape[axis] == size:
        return tensor
    shape = (*tensor.shape[:axis], size - tensor.shape[axis], *tensor.shape[axis + 1 :])
    return join([tensor, whole(Zeros(shape, tensor.dtype))], axis)
