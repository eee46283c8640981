"""Checks of what a caller asks for, before any work starts, and the pieces in which prompts are fed."""

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Key

type Prompt = Sequence[int] | np.ndarray | Array
type Prompts = Sequence[Prompt] | np.ndarray | Array

SMALLEST_PIECE = 16  # shorter ends of prompts are padded to this


def check_prompts(prompts: Prompts, vocab_size: int) -> list[np.ndarray]:
    """Returns the prompts as integer arrays.

    **Raises:** `ValueError` for no prompts, an empty prompt or an id outside the vocabulary, naming row, position and
    value; `TypeError` for anything but a list of lists of integers.
    """
    if isinstance(prompts, str) or any(isinstance(prompt, str) for prompt in prompts):
        raise TypeError(
            "`prompts` must be a list of token lists; got text. Encode it with the model's tokenizer first."
        )
    if len(prompts) == 0:
        raise ValueError("`prompts` is empty; give at least one token list.")
    return [_check_prompt(row, prompt, vocab_size) for row, prompt in enumerate(prompts)]


def _check_prompt(row: int, prompt: Prompt, vocab_size: int) -> np.ndarray:
    ids = np.asarray(prompt)
    if ids.ndim != 1:
        raise TypeError(
            f"`prompts` must be a list of token lists, also for one prompt: [[1, 2, 3]]; "
            f"prompt {row} is {prompt!r}, of {ids.ndim} dimensions."
        )
    if ids.size == 0:
        raise ValueError(f"Prompt {row} is empty; give at least one token, for example the tokenizer's bos id.")
    if not np.issubdtype(ids.dtype, np.integer):
        raise TypeError(f"Prompt {row} must hold integers; got {ids.dtype}.")
    wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if wrong.size:
        at = int(wrong[0])
        raise ValueError(
            f"Prompt {row} has the token id {int(ids[at])} at position {at}, outside the vocabulary of {vocab_size}; "
            "ids run from 0. Is the tokenizer that of this model?"
        )
    return ids.astype(np.int32)


def check_count(name: str, value: int, least: int) -> int:
    """Returns `value` as a Python integer.

    **Raises:** `TypeError` if it is not an integer, `ValueError` if it is below `least`.
    """
    try:
        count = operator.index(value)
    except TypeError as error:
        raise TypeError(f"`{name}` must be an integer; got {value!r}.") from error
    if count < least:
        raise ValueError(f"`{name}` must be at least {least}; got {count}.")
    return count


def check_room(cache: Any, prompts: Sequence[np.ndarray], max_new_tokens: int) -> None:
    """Checks that a cache has a row per prompt, and room in each for the prompt and the new tokens.

    **Raises:** `ValueError` otherwise.
    """
    used = np.asarray(cache.lengths)
    if used.shape != (len(prompts),):
        raise ValueError(f"`cache` has {used.shape[0]} rows for {len(prompts)} prompts; it needs one row per prompt.")
    for row, prompt in enumerate(prompts):
        needed = int(used[row]) + len(prompt) + max_new_tokens
        if needed > cache.max_length:
            raise ValueError(
                f"`cache` has room for {cache.max_length} tokens; row {row} needs {needed}: {used[row]} there already, "
                f"{len(prompt)} of the prompt and {max_new_tokens} new. "
                "Make a larger one: `model.init_cache(batch, max_length)`."
            )


def check_stops(stop: str | Sequence[str], has_tokenizer: bool) -> tuple[str, ...]:
    """Returns the stop strings as a tuple.

    **Raises:** `TypeError` for anything but text, `ValueError` for an empty string, or for stop strings without a
    tokenizer.
    """
    stops = (stop,) if isinstance(stop, str) or not isinstance(stop, Iterable) else tuple(stop)
    if isinstance(stop, bytes) or not all(isinstance(text, str) for text in stops):
        raise TypeError(f"`stop` must be a string or a list of strings; got {stop!r}.")
    if any(not text for text in stops):
        raise ValueError(f"`stop` holds an empty string, which would stop at once: {list(stops)!r}.")
    if stops and not has_tokenizer:
        raise ValueError(f"`stop={list(stops)!r}` needs `tokenizer=`: stop strings are looked for in the decoded text.")
    return stops


def check_eos_ids(eos_ids: SupportsIndex | Iterable[SupportsIndex], vocab_size: int) -> tuple[int, ...]:
    """Returns one id, or several in anything that can be iterated, as Python integers.

    **Raises:** `TypeError` for anything but integers, `ValueError` for one outside the vocabulary.
    """
    listed: list[Any] = [eos_ids]
    if isinstance(eos_ids, Iterable) and not isinstance(eos_ids, str | bytes) and _as_index(eos_ids) is None:
        listed = list(eos_ids)
    ids = tuple(index for value in listed if (index := _as_index(value)) is not None and not isinstance(value, bool))
    if len(ids) < len(listed):
        raise TypeError(f"`eos_ids` must be an integer or several; got {eos_ids!r}.")
    outside = [value for value in ids if not 0 <= value < vocab_size]
    if outside:
        raise ValueError(f"`eos_ids` holds {outside[0]}, outside the vocabulary of {vocab_size}; `()` is for none.")
    return ids


def row_keys(key: Array | SupportsIndex, batch: int) -> Key[Array, " batch"]:
    """Returns one PRNG key per row: the same for all from a seed or one key, or the given ones.

    **Raises:** `TypeError` for anything but a seed or keys; `ValueError` for several keys, but not one per
    row.
    """
    seed = _as_index(key)
    if seed is not None:
        keys = jr.key(seed)
    elif isinstance(key, Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        keys = key
    elif isinstance(key, Array | np.ndarray) and key.dtype == np.uint32 and key.ndim:
        keys = jr.wrap_key_data(jnp.asarray(key))
    else:
        raise TypeError(f"`key` must be a seed (a whole number), a PRNG key or one key per prompt; got {key!r}.")
    if keys.ndim == 0:
        return jnp.broadcast_to(keys, (batch,))
    if keys.shape != (batch,):
        raise ValueError(f"`key` must be a seed, one key or one per prompt ({batch}); got keys of shape {keys.shape}.")
    return keys


def _as_index(value: Any) -> int | None:
    """A whole number of any kind as a Python integer; `None` for anything else."""
    try:
        return operator.index(value)
    except TypeError:
        return None


def cache_size(tokens: int) -> int:
    """Returns the room to make for so many tokens: rounded up, by a quarter at most, so that few sizes get compiled."""
    step = max(256, 1 << max(tokens.bit_length() - 3, 0))
    return -(-tokens // step) * step


def prompt_pieces(prompts: Sequence[np.ndarray], largest: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Cuts the prompts into pieces: right-padded tokens `[batch, piece]`, real tokens of each row, and which rows end.

    All pieces have the largest size but the last, which is padded to a power of two: few shapes get compiled.
    """
    sizes = np.array([len(prompt) for prompt in prompts])
    start = 0
    while start < sizes.max():
        rest = int(sizes.max()) - start
        size = min(largest, max(SMALLEST_PIECE, 1 << (rest - 1).bit_length()))
        lengths = np.clip(sizes - start, 0, size).astype(np.int32)
        tokens = np.zeros((len(prompts), size), np.int32)
        for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            tokens[row, :length] = prompt[start : start + length]
        yield tokens, lengths, (lengths > 0) & (sizes <= start + size)
        start += size
