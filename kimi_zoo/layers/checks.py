"""Arguments of layers, checked where layers are made and called."""

import math
import operator


def check_sizes(*, least: int = 1, **sizes: int) -> None:
    """**Raises:** `TypeError` for a size that is no whole number, `ValueError` for one below `least`."""
    for name, size in sizes.items():
        try:
            whole = operator.index(size)
        except TypeError:
            raise TypeError(f"`{name}` must be a whole number; got {size!r}.") from None
        if whole < least:
            raise ValueError(f"`{name}` must be at least {least}; got {size}.")


def check_std(std: float | None) -> None:
    """**Raises:** `ValueError` for a standard deviation that is not finite or below 0."""
    if std is not None and not (math.isfinite(std) and std >= 0):
        raise ValueError(f"`std` must be a finite number >= 0 or None; got {std}.")


def check_eps(eps: float) -> None:
    """**Raises:** `ValueError` for an `eps` of a norm that is not finite or not above 0."""
    if not (math.isfinite(eps) and eps > 0):
        raise ValueError(f"`eps` of a norm must be a finite number above 0; got {eps}.")


def check_axes(shape: tuple[int, ...]) -> None:
    """**Raises:** `ValueError` for the shape of an input without the three axes of a batch of rows."""
    if len(shape) != 3:
        raise ValueError(
            f"The input needs the axes [batch, seq, hidden_size], also for one row (`x[None]`); got shape {shape}."
        )
