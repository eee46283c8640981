"""Context parallelism: what ranks that hold consecutive parts of a sequence have to tell one another.

Everything here runs inside `jax.shard_map`, where an axis name stands for the ranks along one axis of the mesh; rank r
holds the r-th part of every row.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kimi_zoo.ops.packing import present_ids, refuse_segments, segment_runs

AxisNames = str | tuple[str, ...]


def axis_size(axes: AxisNames, argument: str) -> int:
    """Number of ranks along a mesh axis, or along several.

    **Raises:** `ValueError` naming the `argument` where the mesh has no such axis or no `jax.shard_map` is around.
    """
    try:
        return jax.lax.axis_size(axes)
    except NameError:
        known = tuple(jax.sharding.get_abstract_mesh().manual_axes)
        raise ValueError(
            f"`{argument}={axes!r}` names mesh axes of the `jax.shard_map` that this is called in, which are {known}. "
            "Outside of it leave the argument out."
        ) from None


def from_left[Tree](tree: Tree, axis: str, distance: int = 1) -> Tree:
    """The arrays of the rank `distance` to the left; zeros where there is none."""
    pairs = [(rank, rank + distance) for rank in range(jax.lax.axis_size(axis) - distance)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, axis, pairs), tree)


def from_last[Tree](tree: Tree, axis: str) -> Tree:
    """The arrays of the last rank, the same on all ranks."""
    last = jax.lax.axis_index(axis) == jax.lax.axis_size(axis) - 1
    return jax.tree.map(lambda x: jax.lax.psum(jnp.where(last, x, jnp.zeros_like(x)), axis), tree)


def exclusive_scan[Tree](combine: Callable[[Tree, Tree], Tree], element: Tree, identity: Tree, axis: str) -> Tree:
    """`combine` of the elements of all ranks to the left, in order; `identity` on the first rank.

    `combine(left, right)` must be associative. For n ranks it takes one exchange and `ceil(log2(n - 1))` more, each
    with a rank twice as far away; n need not be a power of two.
    """
    size, rank = jax.lax.axis_size(axis), jax.lax.axis_index(axis)

    def select(condition: Array, on_true: Tree, on_false: Tree) -> Tree:
        return jax.tree.map(lambda x, y: jnp.where(condition, x, y), on_true, on_false)

    scanned = select(rank > 0, from_left(element, axis), identity)
    distance = 1
    while distance < size - 1:
        joined = combine(from_left(scanned, axis, distance), scanned)
        scanned = select(rank > distance, joined, scanned)  # rank `distance` would add the identity of rank 0
        distance *= 2
    return scanned


def split_heads(
    arrays: Sequence[Float[Array, "batch part heads _"]], axis: str
) -> list[Float[Array, "batch seq some_heads _"]]:
    """Trades sequence for heads, in one all-to-all: from all heads of a part of the sequence to some heads of the parts
    of all ranks along the axis, in their order."""
    joined = jnp.concatenate(arrays, axis=-1)
    joined = jax.lax.all_to_all(joined, axis, split_axis=2, concat_axis=1, tiled=True)
    return jnp.split(joined, np.cumsum([x.shape[-1] for x in arrays])[:-1].tolist(), axis=-1)


def join_heads(x: Float[Array, "batch seq some_heads dim"], axis: str) -> Float[Array, "batch part heads dim"]:
    """The way back."""
    return jax.lax.all_to_all(x, axis, split_axis=1, concat_axis=2, tiled=True)


@dataclasses.dataclass(frozen=True)
class RowPart:
    """Where a rank's part of packed rows stands in them. Documents are numbered 1, 2, ... over the whole row."""

    axes: AxisNames
    segment_ids: Int[Array, "batch seq"]
    documents: Int[Array, "batch seq"]  # 0 at padding
    before: Int[Array, " batch"]  # document of the last real token on ranks to the left, 0 where there is none
    first: Int[Array, " batch"]  # document of the first real token here, 0 where there is none
    first_id: Int[Array, " batch"]  # segment id of the first real token of the whole row, 0 where there is none
    total: Int[Array, " batch"]  # number of documents of the whole row

    @property
    def continues(self) -> Bool[Array, " batch"]:
        """Whether the first real token belongs to a document that began on a rank to the left."""
        return (self.first > 0) & (self.first == self.before)

    @property
    def breaks(self) -> Bool[Array, " batch"]:
        """Whether it starts another document than the one to the left."""
        return (self.first > 0) & (self.before > 0) & (self.first != self.before)


def row_part(segment_ids: Int[Array, "batch seq"], axes: AxisNames) -> RowPart:
    """Numbers documents over the whole row, from three integers per rank and row.

    As in `segment_runs`, an id that comes back after another one is another document; padding separates nothing.
    """
    runs = segment_runs(segment_ids)
    count = jnp.max(runs, axis=1, initial=0)
    first_id, last_id = edge_id(segment_ids, first=True), edge_id(segment_ids, first=False)
    firsts, lasts, counts = jax.lax.all_gather(jnp.stack([first_id, last_id, count]), axes, axis=2)  # [batch, ranks]
    ends = jnp.stack([firsts, lasts], axis=-1).reshape(firsts.shape[0], -1)
    joined = (firsts > 0) & (_last_before(ends)[:, ::2] == firsts)  # by the last real token to the left
    new = counts - joined.astype(counts.dtype)
    totals = jnp.cumsum(new, axis=1, dtype=runs.dtype)
    rank = jax.lax.axis_index(axes)
    before = jnp.take(totals - new, rank, axis=1)
    earlier = before - jnp.take(joined, rank, axis=1).astype(runs.dtype)  # documents that end on ranks to the left
    documents = jnp.where(runs > 0, runs + earlier[:, None], 0)
    first = jnp.where(count > 0, 1 + earlier, 0)
    return RowPart(axes, segment_ids, documents, before, first, edge_id(firsts, first=True), totals[:, -1])


def check_row_segments(part: RowPart, max_num_segments: int) -> Int[Array, "batch seq"]:
    """`kimi_zoo.ops.packing.check_segments` of the whole rows."""
    present = present_ids(part.segment_ids, max_num_segments).astype(jnp.int32)
    distinct = jnp.sum(jax.lax.pmax(present, part.axes), axis=1)
    return refuse_segments(part.segment_ids, jnp.any(part.total > distinct.astype(part.total.dtype)), max_num_segments)


def edge_id(ids: Int[Array, "batch seq"], *, first: bool) -> Int[Array, " batch"]:
    """The first or else the last id above 0 of each row, 0 where there is none."""
    if ids.shape[1] == 0:
        return jnp.sum(ids, axis=1, dtype=ids.dtype)
    real = ids > 0
    index = jnp.argmax(real, axis=1) if first else ids.shape[1] - 1 - jnp.argmax(real[:, ::-1], axis=1)
    return jnp.take_along_axis(jnp.maximum(ids, 0), index[:, None], axis=1)[:, 0]


def _last_before(ids: Int[Array, "batch seq"]) -> Int[Array, "batch seq"]:
    """The last id above 0 in front of each place, 0 where there is none."""
    index = jnp.arange(ids.shape[1], dtype=jnp.int32)
    place = jax.lax.cummax(jnp.where(ids > 0, index, -1), axis=1)
    place = jnp.pad(place, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    found = jnp.take_along_axis(ids, jnp.maximum(place, 0), axis=1)
    return jnp.where(place >= 0, found, 0)
