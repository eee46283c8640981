"""What a caller hands to a model, checked before any work starts.

Values are looked at where they are known. Under `jax.jit` and the like they are not, and a look would cost a
synchronisation at every step: there, ids outside the vocabulary are read as the nearest one inside.
"""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int32, Integer

AnyArray = Array | np.ndarray


def check_tokens(tokens: Integer[AnyArray, "batch seq"], vocab_size: int) -> Int32[Array, "batch seq"]:
    """The token ids of a batch.

    **Raises:** `TypeError` for anything but an array of integers, `ValueError` for other than two axes or an id outside
    the vocabulary.
    """
    ids = as_integers("tokens", tokens)
    if ids.ndim != 2:
        raise ValueError(
            f"`tokens` must have the axes [batch, seq], also for one row: [1, seq]; got shape {ids.shape}."
        )
    known = known_values(ids)
    if known is not None and known.size and not 0 <= known.min() <= known.max() < vocab_size:
        row, place = np.argwhere((known < 0) | (known >= vocab_size))[0]
        raise ValueError(
            f"`tokens` holds the id {known[row, place]} at [{row}, {place}], outside the vocabulary of {vocab_size}; "
            "ids run from 0. Is the tokenizer that of this model?"
        )
    return ids


def check_beside_tokens(
    name: str, array: Integer[AnyArray, "..."] | None, tokens: Int32[Array, "batch seq"]
) -> Int32[Array, "batch seq"] | None:
    """A number per token, such as `segment_ids`; `None` stays `None`.

    **Raises:** `TypeError` for anything but an array of integers, `ValueError` for another shape than that of `tokens`
    or a negative number.
    """
    if array is None:
        return None
    numbers = as_integers(name, array)
    if numbers.shape != tokens.shape:
        raise ValueError(f"`{name}` must have the shape of `tokens`, {tokens.shape}; got {numbers.shape}.")
    known = known_values(numbers)
    if known is not None and known.size and known.min() < 0:
        raise ValueError(f"`{name}` must not be negative; got {known.min()}.")
    return numbers


def check_lengths(
    lengths: Integer[AnyArray, "..."], most: int | Array, batch: int, *, traced: bool
) -> Int32[Array, " batch"]:
    """A number of tokens per row, from 0 to `most`.

    **Arguments:** `traced`: whether values known only at run time are checked then.

    **Raises:** `TypeError` for anything but an array of integers, `ValueError` for another shape or a number out of
    range (a run-time error if it is traced).
    """
    numbers = as_integers("lengths", lengths)
    if numbers.shape != (batch,):
        raise ValueError(f"`lengths` must hold a number per row, shape {(batch,)}; got shape {numbers.shape}.")
    wrong = (numbers < 0) | (numbers > most)
    known = known_values(wrong)
    if known is not None and known.any():
        limits = np.broadcast_to(np.asarray(most), known.shape)
        row = int(known.argmax())
        raise ValueError(f"`lengths` of row {row} must be from 0 to {limits[row]}; got {np.asarray(numbers)[row]}.")
    if known is None and traced:
        return eqx.error_if(numbers, jnp.any(wrong), "`lengths` must be from 0 to the number of tokens of the row.")
    return numbers


def as_integers(name: str, value: Any) -> Int32[Array, "..."]:
    """A JAX or numpy array of integers as int32.

    **Raises:** `TypeError` for anything else.
    """
    if not isinstance(value, AnyArray) or not jnp.issubdtype(value.dtype, jnp.integer):
        found = f"an array of {value.dtype}" if isinstance(value, AnyArray) else f"a {type(value).__name__}"
        raise TypeError(f"`{name}` must be an array of integers, such as `jnp.asarray([[1, 2, 3]])`; got {found}.")
    return jnp.asarray(value).astype(jnp.int32)


def known_values(array: Array) -> np.ndarray | None:
    """The values of an array; `None` if it is traced, or spread over machines."""
    if isinstance(array, Tracer) or not array.is_fully_addressable:
        return None
    return np.asarray(array)
