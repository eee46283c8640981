"""Packed rows: several documents in one row of a batch, told apart by segment ids.

Segment ids are 1, 2, ... for documents and 0 for padding. Padding may lead, sit inside or trail.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Int

from kimi_zoo.ops.varying import varying_axes


def segment_ids_from_cu_seqlens(
    cu_seqlens: Int[Array | np.ndarray, " bounds"] | list[int] | tuple[int, ...],
    seq_len: int,
    *,
    cu_seqlens_kv: Int[Array | np.ndarray, " bounds_kv"] | list[int] | tuple[int, ...] | None = None,
) -> Int[Array, " seq"]:
    """Segment ids of one row from cumulative lengths: `[0, 3, 3, 8]` gives three ones and five threes.

    An empty segment takes a number but no token. The values decide the result's contents and are checked, so they
    must be known when this is called (outside `jax.jit`).

    **Arguments:**

    - `cu_seqlens`: where each segment starts, and at last where the row ends.
    - `seq_len`: number of tokens of the row.
    - `cu_seqlens_kv`: the same for keys and values, for callers that hold both; they must agree.

    **Raises:** `ValueError` when the lengths do not start at 0, fall, do not end at `seq_len`, or differ between
    query and key.
    """
    bounds = np.asarray(cu_seqlens)
    if bounds.ndim != 1 or bounds.size < 2 or not np.issubdtype(bounds.dtype, np.integer):
        raise ValueError(f"`cu_seqlens` must be a list of at least two integers, got {cu_seqlens!r}.")
    if bounds[0] != 0:
        raise ValueError(f"`cu_seqlens` must start at 0, got {bounds.tolist()}, which starts at {bounds[0]}.")
    if (np.diff(bounds) < 0).any():
        raise ValueError(f"`cu_seqlens` must never fall, got {bounds.tolist()}.")
    if bounds[-1] != seq_len:
        raise ValueError(
            f"`cu_seqlens` must end at the number of tokens, {seq_len}, got {bounds.tolist()}, which ends at "
            f"{bounds[-1]}. Give padding a segment of its own and set its ids to 0 afterwards."
        )
    if cu_seqlens_kv is not None and not np.array_equal(bounds, np.asarray(cu_seqlens_kv)):
        raise ValueError(
            "`cu_seqlens` and `cu_seqlens_kv` must be the same: each token has one query and one key; got "
            f"{bounds.tolist()} and {np.asarray(cu_seqlens_kv).tolist()}."
        )
    return jnp.asarray(np.repeat(np.arange(1, bounds.size, dtype=np.int32), np.diff(bounds)))


def segment_starts(segment_ids: Int[Array, "batch seq"]) -> Bool[Array, "batch seq"]:
    """True at real tokens whose id differs from that of the last real token before them in the row.

    The first real token of a row is no start: it continues from the state the row is given.
    """
    index = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    real = segment_ids > 0
    last = jax.lax.cummax(jnp.where(real, index, -1), axis=1)
    last = jnp.pad(last, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]  # before the token itself
    previous = jnp.take_along_axis(segment_ids, jnp.maximum(last, 0), axis=1)
    return real & (last >= 0) & (segment_ids != previous)


def segment_positions(segment_ids: Int[Array, "batch seq"]) -> Int[Array, "batch seq"]:
    """Position of every token in its segment, counted from 0 over real tokens only; 0 at padding."""
    real = segment_ids > 0
    count = jnp.cumsum(real, axis=1, dtype=jnp.int32) - 1
    first = jax.lax.cummax(jnp.where(segment_starts(segment_ids), count, 0), axis=1)
    return jnp.where(real, count - first, 0)


class Alignment(NamedTuple):
    """Where the tokens of packed rows go when every segment is moved to a multiple of some number of tokens."""

    source: Int[Array, "batch aligned"]  # index of the token that stands here; the row's length where there is none
    position: Int[Array, "batch seq"]  # where each token went; the aligned length for padding

    def gather(self, x: Array) -> Array:
        """Moves the tokens of `x` (`batch seq ...`) to their aligned places, zeros elsewhere."""
        return _take_rows(x, self.source)

    def restore(self, x: Array) -> Array:
        """Moves them back; zeros at padding."""
        return _take_rows(x, self.position)


def segment_runs(segment_ids: Int[Array, "batch seq"]) -> Int[Array, "batch seq"]:
    """Numbers the documents of each row 1, 2, ... in order: an id which comes back later is another document."""
    runs = jnp.cumsum(segment_starts(segment_ids), axis=1, dtype=segment_ids.dtype) + 1
    return jnp.where(segment_ids > 0, runs, jnp.zeros((), segment_ids.dtype))


def align_segments(segment_ids: Int[Array, "batch seq"], multiple: int, max_num_segments: int) -> Alignment:
    """Moves every segment to a start at a multiple of `multiple` tokens, and drops the padding between them."""
    batch, seq = segment_ids.shape
    segments = min(max_num_segments, seq)
    length = ((seq - segments) // multiple + segments) * multiple  # the most that many segments can need
    real = segment_ids > 0
    offset = segment_positions(segment_ids) % multiple
    block = jnp.cumsum(real & (offset == 0), axis=1, dtype=jnp.int32) - 1
    position = jnp.where(real, block * multiple + offset, length)
    rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
    tokens = jnp.broadcast_to(jnp.arange(seq, dtype=jnp.int32), (batch, seq))
    source = jnp.full((batch, length), seq, jnp.int32).at[rows, position].set(tokens, mode="drop")
    return Alignment(source, position)


def check_segments(segment_ids: Int[Array, "batch seq"], max_num_segments: int) -> Int[Array, "batch seq"]:
    """Returns the ids if each is at most `max_num_segments` and its tokens stand together (padding aside) in its row.

    Raises `ValueError` where the ids are known, a run-time error where they are traced.
    """
    if segment_ids.size == 0:
        return segment_ids
    distinct = jnp.sum(present_ids(segment_ids, max_num_segments), axis=1)
    apart = jnp.any(jnp.max(segment_runs(segment_ids), axis=1).astype(distinct.dtype) > distinct)
    return refuse_segments(segment_ids, apart, max_num_segments)


def present_ids(segment_ids: Int[Array, "batch seq"], max_num_segments: int) -> Bool[Array, "batch segments"]:
    """Which of the ids 1, 2, ... a row has tokens of."""
    ids = jnp.arange(1, max_num_segments + 1, dtype=segment_ids.dtype)
    return jnp.any(segment_ids[..., None] == ids, axis=1)


def refuse_segments(
    segment_ids: Int[Array, "batch seq"], apart: Bool[Array, ""], max_num_segments: int
) -> Int[Array, "batch seq"]:
    """Returns the ids unless one is above `max_num_segments` or `apart` says that a segment's tokens are."""
    most = jnp.max(segment_ids)
    above = f"`max_num_segments` is {max_num_segments}, and `segment_ids` hold a larger id"
    returns = (
        "with `max_num_segments`, the tokens of a segment must stand together, but an id in `segment_ids` comes back"
    )
    if isinstance(most, Tracer):
        too_large = _on_any_device(most > max_num_segments)
        segment_ids = _error_if(segment_ids, too_large, above)
        return _error_if(segment_ids, _on_any_device(apart) & ~too_large, returns)
    if most > max_num_segments:
        raise ValueError(f"{above}: {int(most)}. Ids count from 1; give as many segments as the largest id.")
    if apart:
        raise ValueError(f"{returns} after another one. Number its second part as a segment of its own.")
    return segment_ids


def _on_any_device(wrong: Bool[Array, ""]) -> Bool[Array, ""]:
    """Inside `jax.shard_map`, whether it is so anywhere: `equinox.error_if` needs to see the same on all devices."""
    axes = tuple(varying_axes(wrong))
    return jax.lax.pmax(wrong.astype(jnp.int32), axes) > 0 if axes else wrong


def _error_if(x: Array, wrong: Bool[Array, ""], message: str) -> Array:
    return x + eqx.error_if(jnp.zeros((), x.dtype), wrong, message)


def _take_rows(x: Array, index: Int[Array, "batch places"]) -> Array:
    """`x[b, index[b, i]]`, zero where the index is beyond the row."""
    index = index.reshape(index.shape + (1,) * (x.ndim - 2))
    return jnp.take_along_axis(x, index, axis=1, mode="fill", fill_value=0)
