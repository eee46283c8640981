"""Short causal depthwise convolution with packed segments, padding and a decoding window."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kimi_zoo.ops.context import axis_size, exclusive_scan, from_last, from_left, row_part
from kimi_zoo.ops.packing import segment_runs


def short_convolution(
    x: Float[Array, "batch seq channels"],
    weight: Float[Array, "channels width"],
    bias: Float[Array, " channels"] | None = None,
    *,
    window: Float[Array, "batch tail channels"] | None = None,
    segment_ids: Int[Array, "batch seq"] | None = None,
    activation: str | None = "silu",
    context_axis: str | None = None,
) -> tuple[Float[Array, "batch seq channels"], Float[Array, "batch tail channels"]]:
    """`y_t = act(bias + sum_j weight[:, width - 1 - j] * x_{t - j})`, the sum taken in float32.

    The last tap multiplies the current token. Tokens before the row's first one are those of `window`, or zero.

    **Arguments:**

    - `window`: the `width - 1` raw inputs before `x`, oldest first, as returned by the call before.
    - `segment_ids`: 1, 2, ... for packed documents, 0 for padding, anywhere in a row. A document sees only its own
        tokens, as if padding were not there (`window` belongs to the row's first document); the output at padding is 0.
    - `activation`: `"silu"` or `None`.
    - `context_axis`: inside `jax.shard_map`, the mesh axis over whose ranks each row is split into consecutive parts.
        `window` and the next window are then those of the whole row, the same on every rank.

    **Returns:** the output, in the dtype of `x`, and the window for the next call: the last `width - 1` real inputs of
    the row's last document, zero-filled on the left.

    **Raises:** `ValueError` for an unknown activation, a weight without taps, or a window of the wrong length.

    **Source:** Kimi Linear (arXiv:2510.26692), section on the neural parameterisation of KDA.
    """
    channels, width = weight.shape
    if activation not in ("silu", None):
        raise ValueError(f'`activation` of a short convolution is "silu" or None; got {activation!r}.')
    if width < 1:
        raise ValueError(f"`weight` needs at least one tap: [channels, width >= 1]; got shape {weight.shape}.")
    if window is not None and window.shape != (x.shape[0], width - 1, channels):
        expected = (x.shape[0], width - 1, channels)
        raise ValueError(f"`window` holds the width - 1 inputs before `x`: expected {expected}, got {window.shape}.")
    row_window = None
    if context_axis is not None:
        (window,), (row_window,) = context_windows(
            [x], width, windows=[window], segment_ids=segment_ids, context_axis=context_axis
        )
    if segment_ids is None or x.shape[1] == 0:
        inputs, next_window = _shifted(x, window, width)
    else:
        inputs, next_window = _segmented(x, window, width, segment_ids)
    taps = weight.astype(jnp.float32)
    y = jnp.zeros(x.shape, jnp.float32) if bias is None else bias.astype(jnp.float32)
    for j, shifted in enumerate(inputs):
        y = y + shifted.astype(jnp.float32) * taps[:, width - 1 - j]
    if activation == "silu":
        y = jax.nn.silu(y)
    if segment_ids is not None:
        y = jnp.where((segment_ids > 0)[..., None], y, 0.0)
    return y.astype(x.dtype), next_window if row_window is None else row_window


def _extend(x: Array, window: Array | None, width: int) -> Array:
    if window is None:
        window = jnp.zeros((x.shape[0], width - 1, x.shape[2]), x.dtype)
    return jnp.concatenate([window.astype(x.dtype), x], axis=1)


def _shifted(x: Array, window: Array | None, width: int) -> tuple[list[Array], Array]:
    """The inputs `x_{t-j}` for `j = 0 .. width - 1`, and the next window, of rows that hold one document and no
    padding."""
    seq = x.shape[1]
    extended = _extend(x, window, width)
    if window is not None and seq == 1:  # or XLA joins the two anew for every tap
        extended = jax.lax.optimization_barrier(extended)
    shifted = [extended[:, width - 1 - j : width - 1 - j + seq] for j in range(width)]
    return shifted, extended[:, seq:]


def _segmented(x: Array, window: Array | None, width: int, segment_ids: Array) -> tuple[list[Array], Array]:
    """As `_shifted`, reading only tokens of the same document: other positions give 0."""
    batch, seq = segment_ids.shape
    segment_ids = segment_runs(segment_ids)
    real = segment_ids > 0
    x = jnp.where(real[..., None], x, jnp.zeros((), x.dtype))  # whatever padding holds, NaN included, must not spread
    extended = _extend(x, window, width)
    first = jnp.take_along_axis(segment_ids, jnp.argmax(real, axis=1)[:, None], axis=1)
    ids = jnp.concatenate([jnp.broadcast_to(first, (batch, width - 1)), segment_ids], axis=1)

    # places[r] is where the r-th token of (window, real tokens in order) stands in `extended`
    order = jnp.argsort(~real, axis=1, stable=True) + width - 1
    places = jnp.concatenate([jnp.broadcast_to(jnp.arange(width - 1), (batch, width - 1)), order], axis=1)
    rank = jnp.cumsum(real, axis=1) + width - 2

    def gather(index: Array, own: Array) -> Array:
        """The tokens of rank `index`, 0 where they belong to another document than `own`."""
        place = jnp.take_along_axis(places, jnp.maximum(index, 0), axis=1)
        same = jnp.take_along_axis(ids, place, axis=1) == own
        return jnp.where(
            same[..., None], jnp.take_along_axis(extended, place[..., None], axis=1), jnp.zeros((), x.dtype)
        )

    def gathered(_: None) -> list[Array]:
        return [gather(rank - j, segment_ids) for j in range(width)]

    def sliced(_: None) -> list[Array]:
        same = [ids[:, width - 1 - j : width - 1 - j + seq] == segment_ids for j in range(width)]
        shifted = [extended[:, width - 1 - j : width - 1 - j + seq] for j in range(width)]
        return [
            jnp.where(keep[..., None], token, jnp.zeros((), x.dtype)) for keep, token in zip(same, shifted, strict=True)
        ]

    gap = _has_gap(real, window is not None)
    inputs = jax.lax.cond(gap, gathered, sliced, None)
    last = rank[:, -1:] if seq else jnp.full((batch, 1), width - 2)
    tail = last - jnp.arange(width - 2, -1, -1)
    newest = (
        jnp.take_along_axis(ids, jnp.take_along_axis(places, jnp.maximum(last, 0), axis=1), axis=1)
        if width > 1
        else first
    )
    return inputs, gather(tail, newest)


def _has_gap(real: Bool[Array, "batch seq"], continued: bool) -> Bool[Array, ""]:
    """Whether padding stands between two tokens that a window could join; only then are gathers needed."""
    before = jnp.concatenate([jnp.full((real.shape[0], 1), continued), real], axis=1)
    seen = jax.lax.cummax(before.astype(jnp.int32), axis=1)[:, :-1] > 0
    return jnp.any(real & seen & ~before[:, :-1])


def context_windows(
    inputs: Sequence[Float[Array, "batch seq _"]],
    width: int,
    *,
    windows: Sequence[Float[Array, "batch tail _"] | None] | None = None,
    segment_ids: Int[Array, "batch seq"] | None = None,
    context_axis: str,
) -> tuple[list[Float[Array, "batch tail _"]], list[Float[Array, "batch tail _"]]]:
    """For several convolutions of one width over split rows, in one exchange: the windows before this rank's part of
    the rows, and those behind the whole rows.

    A rank may hold fewer tokens than a window, or padding only, so what is combined over ranks is the last
    `width - 1` real tokens, each with the number of its document.

    **Arguments:** `windows`: those before the whole rows, zero by default; the others as in `short_convolution`.
    """
    axis_size(context_axis, "context_axis")
    batch, seq, _ = inputs[0].shape
    tail = width - 1
    windows = [None] * len(inputs) if windows is None else windows
    zeros = [jnp.zeros((batch, tail, x.shape[-1]), x.dtype) for x in inputs]
    before_row = _join_channels([z if w is None else w.astype(z.dtype) for w, z in zip(windows, zeros, strict=True)])
    split = functools.partial(_split_channels, sizes=[x.shape[-1] for x in inputs])
    if segment_ids is None and seq >= tail:  # one exchange with the neighbour
        own = _join_channels([x[:, seq - tail :] for x in inputs])
        before = jnp.where(jax.lax.axis_index(context_axis) > 0, from_left(own, context_axis), before_row)
        return split(before), split(from_last(own, context_axis))
    segment_ids = jnp.ones((batch, seq), jnp.int32) if segment_ids is None else segment_ids
    part = row_part(segment_ids, context_axis)
    row_start = _Tail(jnp.ones((batch, tail), part.documents.dtype), before_row)  # belongs to the row's first document
    nothing = jax.tree.map(jnp.zeros_like, row_start)
    tails = [_last_real(_Tail(part.documents, x), tail) for x in inputs]
    own = _Tail(tails[0].documents, _join_channels([x.tokens for x in tails]))
    before = _join(row_start, exclusive_scan(_join, own, nothing, context_axis))
    row_end = from_last(_join(before, own), context_axis)
    last = row_end.documents[:, -1] if tail else part.first
    return split(before.of_document(part.first)), split(row_end.of_document(last))


def _join_channels(arrays: Sequence[Array]) -> Array:
    return jnp.concatenate(arrays, axis=-1)


def _split_channels(x: Array, sizes: Sequence[int]) -> list[Array]:
    return jnp.split(x, np.cumsum(sizes)[:-1].tolist(), axis=-1)


class _Tail(NamedTuple):
    """Tokens with the numbers of their documents, 0 where there is no token."""

    documents: Int[Array, "batch seq"]
    tokens: Float[Array, "batch seq channels"]

    def of_document(self, number: Int[Array, " batch"]) -> Array:
        """The tokens of one document, zeros elsewhere."""
        return jnp.where((self.documents == number[:, None])[..., None], self.tokens, jnp.zeros_like(self.tokens))


def _join(left: _Tail, right: _Tail) -> _Tail:
    """The last real tokens of both, as many as each has places."""
    joined = _Tail(*(jnp.concatenate(pair, axis=1) for pair in zip(left, right, strict=True)))
    return _last_real(joined, left.documents.shape[1])


def _last_real(part: _Tail, places: int) -> _Tail:
    """The last real tokens, right-aligned."""
    documents, tokens = part
    order = jnp.argsort(documents > 0, axis=1, stable=True)[:, max(documents.shape[1] - places, 0) :]
    documents = jnp.take_along_axis(documents, order, axis=1)
    tokens = jnp.take_along_axis(tokens, order[..., None], axis=1)
    tokens = jnp.where((documents > 0)[..., None], tokens, jnp.zeros_like(tokens))
    missing = places - documents.shape[1]
    return _Tail(jnp.pad(documents, ((0, 0), (missing, 0))), jnp.pad(tokens, ((0, 0), (missing, 0), (0, 0))))
