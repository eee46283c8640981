"""Packed rows: several documents in one row of a batch, told apart by segment ids.

Segment ids are 1, 2, ... for documents and 0 for padding. Padding may lead, sit inside or trail.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int


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
