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
from kimi_zoo.ops.varying import vary_alike


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

    Derivatives are taken in reverse mode, also repeatedly, and forward mode over reverse. Only the inputs are kept for
    them.

    **Returns:** the output, in the dtype of `x`, and the window for the next call: the last `width - 1` real inputs of
    the row's last document, zero-filled on the left.

    **Raises:** `ValueError` for an unknown activation, a weight without taps, or a window of the wrong length.

    **Source:** Kimi Linear (arXiv:2510.26692), section on the neural parameterisation of KDA.
    """
    channels, width = weight.shape
    batch, seq = x.shape[:2]
    if activation not in ("silu", None):
        raise ValueError(f'`activation` of a short convolution is "silu" or None; got {activation!r}.')
    if width < 1:
        raise ValueError(f"`weight` needs at least one tap: [channels, width >= 1]; got shape {weight.shape}.")
    if window is not None and window.shape != (batch, width - 1, channels):
        expected = (batch, width - 1, channels)
        raise ValueError(f"`window` holds the width - 1 inputs before `x`: expected {expected}, got {window.shape}.")
    row_window = None
    if context_axis is not None:
        (window,), (row_window,) = context_windows(
            [x], width, windows=[window], segment_ids=segment_ids, context_axis=context_axis
        )
    x, weight, bias, window, segment_ids = vary_alike((x, weight, bias, window, segment_ids))
    if segment_ids is not None and seq > 0:
        y, next_window = _convolve_documents(x, weight, bias, window, segment_ids, activation)
    else:
        extended = _extend(x, window, width)
        if window is not None and seq == 1:  # or XLA joins the two anew for every tap
            extended = jax.lax.optimization_barrier(extended)
        y, next_window = _convolve(extended, weight, bias, None, activation), extended[:, seq:]
    return y, next_window if row_window is None else row_window


def _convolve_documents(
    x: Array, weight: Array, bias: Array | None, window: Array | None, segment_ids: Array, activation: str | None
) -> tuple[Float[Array, "batch seq channels"], Float[Array, "batch tail channels"]]:
    """Output and next window of packed rows. Where padding stands in the way, real tokens are first moved together."""
    width = weight.shape[1]
    real, documents = segment_ids > 0, segment_runs(segment_ids)
    x = jnp.where(real[..., None], x, jnp.zeros((), x.dtype))  # whatever padding holds, NaN included, must not spread
    gap = _has_gap(real, window is not None)
    order = jnp.argsort(~real, axis=1, stable=True)
    back = jnp.argsort(order, axis=1)
    x, documents = jax.lax.cond(
        gap,
        lambda x, documents: (_permute(x, order, back), jnp.take_along_axis(documents, order, axis=1)),
        lambda x, documents: (x, documents),
        *(x, documents),
    )
    extended = _extend(x, window, width)
    documents = jnp.pad(documents, ((0, 0), (width - 1, 0)), constant_values=1)  # the window is of the first document
    y = _convolve(extended, weight, bias, documents, activation)
    y = jax.lax.cond(gap, lambda y: _permute(y, back, order), lambda y: y, y)

    end = jnp.max(jnp.where(documents > 0, jnp.arange(1, documents.shape[1] + 1), width - 1), axis=1, keepdims=True)
    tail = jnp.arange(1 - width, 0) + end
    same = jnp.take_along_axis(documents, tail, axis=1) == jnp.take_along_axis(documents, end - 1, axis=1)
    next_window = jnp.take_along_axis(extended, tail[..., None], axis=1)
    next_window = jnp.where(same[..., None], next_window, jnp.zeros((), x.dtype))
    return jnp.where(real[..., None], y, jnp.zeros((), y.dtype)), next_window


def _extend(x: Array, window: Array | None, width: int) -> Array:
    if window is None:
        return jnp.pad(x, ((0, 0), (width - 1, 0), (0, 0)))
    return jnp.concatenate([window.astype(x.dtype), x], axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _convolve(
    extended: Float[Array, "batch extended channels"],
    weight: Float[Array, "channels width"],
    bias: Float[Array, " channels"] | None,
    documents: Int[Array, "batch extended"] | None,
    activation: str | None,
) -> Float[Array, "batch seq channels"]:
    """The output at every token; a tap that reaches into another document reads 0."""
    return _activated_sum(extended, weight, bias, documents, activation)


def _convolve_forward(extended, weight, bias, documents, activation):
    return _activated_sum(extended, weight, bias, documents, activation), (extended, weight, bias, documents)


def _convolve_backward(activation: str | None, inputs: tuple, d_output: Array) -> tuple:
    """Cotangents of the four arrays. The sum before the activation is computed again."""
    extended, weight, bias, documents = inputs
    width = weight.shape[1]
    d_sum = d_output.astype(jnp.float32)
    if activation == "silu":
        y = _sum_taps(extended, weight, bias, documents)
        gate = jax.nn.sigmoid(y)
        d_sum = d_sum * gate * (1.0 + y * (1.0 - gate))
    d_sum = jax.lax.optimization_barrier(d_sum)  # or XLA computes it anew for every tap
    d_weight = [jnp.sum(d_sum * x, axis=(0, 1)) for x in _taps(extended, documents, width)]
    d_bias = None if bias is None else jnp.sum(d_sum, axis=(0, 1)).astype(bias.dtype)
    # an input is read by its own token and the width - 1 behind it
    d_sum = jnp.pad(d_sum, ((0, 0), (width - 1, width - 1), (0, 0)))
    readers = None if documents is None else jnp.pad(documents, ((0, 0), (0, width - 1)), constant_values=-1)
    d_extended = jnp.zeros(extended.shape, jnp.float32)
    for j in range(width):
        here = slice(j, j + extended.shape[1])
        piece = d_sum[:, here] * weight[:, width - 1 - j].astype(jnp.float32)
        if readers is not None:
            piece = jnp.where((readers[:, here] == documents)[..., None], piece, 0.0)
        d_extended = d_extended + piece
    d_weight = jnp.stack(d_weight[::-1], axis=1).astype(weight.dtype)
    return d_extended.astype(extended.dtype), d_weight, d_bias, None


_convolve.defvjp(_convolve_forward, _convolve_backward)


def _activated_sum(
    extended: Array, weight: Array, bias: Array | None, documents: Array | None, activation: str | None
) -> Float[Array, "batch seq channels"]:
    y = _sum_taps(extended, weight, bias, documents)
    return (jax.nn.silu(y) if activation == "silu" else y).astype(extended.dtype)


def _sum_taps(
    extended: Array, weight: Array, bias: Array | None, documents: Array | None
) -> Float[Array, "batch seq channels"]:
    """The sum before the activation, in float32."""
    width = weight.shape[1]
    y = jnp.zeros((), jnp.float32) if bias is None else bias.astype(jnp.float32)
    for j, x in enumerate(_taps(extended, documents, width)):
        y = y + x * weight[:, width - 1 - j].astype(jnp.float32)
    return y


def _taps(extended: Array, documents: Array | None, width: int) -> list[Float[Array, "batch seq channels"]]:
    """For `j = 0 .. width - 1`, the input `j` tokens before each one, in float32."""
    seq = extended.shape[1] - width + 1
    taps = [extended[:, n : n + seq].astype(jnp.float32) for n in range(width - 1, -1, -1)]
    if documents is None:
        return taps
    same = [documents[:, n : n + seq] == documents[:, width - 1 :] for n in range(width - 1, -1, -1)]
    return [jnp.where(keep[..., None], x, 0.0) for keep, x in zip(same, taps, strict=True)]


@jax.custom_vjp
def _permute(x: Float[Array, "batch seq channels"], order: Int[Array, "batch seq"], back: Int[Array, "batch seq"]):
    """`x[b, order[b, i]]`; `back` is the inverse of `order`, so that no scatter is needed for the derivative."""
    return _reordered(x, order)


def _reordered(x: Array, order: Array) -> Array:
    return jnp.take_along_axis(x, order[..., None], axis=1)


_permute.defvjp(
    lambda x, order, back: (_reordered(x, order), back), lambda back, d_output: (_reordered(d_output, back), None, None)
)


def _has_gap(real: Bool[Array, "batch seq"], continued: bool) -> Bool[Array, ""]:
    """Whether padding stands between two tokens that a window could join; only then are tokens moved together."""
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
