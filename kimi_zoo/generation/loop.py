"""Generation: prompts in, new tokens out, all at once (`generate`) or as they come (`stream_generate`).

The prompts are fed in pieces of bounded length, then decoded several steps at a time on the device; the host looks at
the tokens once per block of steps.
"""

import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, SupportsIndex

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kimi_zoo.generation.config import GenerationConfig, model_generation_config, token_ids
from kimi_zoo.generation.prompts import (
    Prompts,
    cache_size,
    check_count,
    check_eos_ids,
    check_prompts,
    check_room,
    check_stops,
    prompt_pieces,
    row_keys,
)
from kimi_zoo.generation.sampling import NON_FINITE, make_sampling
from kimi_zoo.generation.steps import (
    DecodeState,
    Run,
    copied_cache,
    decode_block,
    empty_cache,
    prefill_piece,
    returned_cache,
)
from kimi_zoo.generation.text import Released, StopStrings, TextDecoder, TextStream
from kimi_zoo.generation.unstack import stack_plan, unstack_views
from kimi_zoo.parallel.processes import whole_value

FinishReason = Literal["eos", "stop_string", "length"]

PREFILL_CHUNK_SIZE = 512
STEPS_PER_DISPATCH = 16
SMOOTH_SECONDS = 0.05  # a stream's blocks double while they take less than this: slow models stream token by token
NO_TOKEN = -2  # neither an id nor `NON_FINITE`
EOS_SLOTS = 8  # eos ids are filled up to a multiple, so that their number does not retrace


class NonFiniteLogitsError(FloatingPointError):
    """The model gave NaN or infinite logits; the message names the step and the row."""


class GeneratedToken(NamedTuple):
    """One new token of a stream.

    - `row`: which prompt it continues.
    - `token`: its id; `None` only in an event that ends a row whose last tokens were dropped as part of a stop string.
    - `text`: what to show, without any stop string; `None` without a tokenizer. It is empty for a token that completes
      no character; an eos token has no text of its own.
    - `log_prob`: of the token, natural log, under the unmodified model distribution; 0 where `token` is `None`.
    - `finish_reason`: why the row ends here, else `None`.
    """

    row: int
    token: int | None
    text: str | None
    log_prob: float
    finish_reason: FinishReason | None


class TokenStream(Iterator[GeneratedToken]):
    """Iterates over new tokens. After its end, `cache` goes on from there; made by `stream_generate`."""

    def __init__(self, run: Run, cache: Any, prompts: list[np.ndarray], options: "_Options"):
        seen = None
        if run.sampling.repetition_penalty is not None:
            seen = np.zeros((len(prompts), run.model.config.vocab_size), bool)
            for row, prompt in enumerate(prompts):
                seen[row, prompt] = True
            seen = jnp.array(seen)
        self._plan = stack_plan(run.model)
        self._run = run  # what feeds the prompts, a scan over the layers, and what decodes:
        self._decode_run = run if self._plan is None else run._replace(model=unstack_views(run.model))
        self._options = options
        if cache is None:
            size = cache_size(max(len(prompt) for prompt in prompts) + options.max_new_tokens)
            cache = empty_cache(run.model, len(prompts), size, self._plan)
        else:
            cache = copied_cache(cache, self._plan)
        self._state = DecodeState(cache, jnp.zeros(len(prompts), jnp.int32), seen)
        self._rows = [_Row(row, options) for row in range(len(prompts))]
        self._events = self._generate(prompts)
        self._exhausted = False
        self._carried: Any = None

    def __next__(self) -> GeneratedToken:
        return next(self._events)

    @property
    def cache(self) -> Any:
        """The model's cache after every prompt and all of its new tokens, eos included: `cache=` of the next turn.

        **Raises:** `RuntimeError` before the stream has come to its end, or if a row ended at a stop string: its cache
        has consumed tokens past the text, and a recurrent state cannot go back.
        """
        if not self._exhausted:
            raise RuntimeError("`cache` belongs to a finished stream: iterate to its end first.")
        if any(row.finish_reason == "stop_string" for row in self._rows):
            raise RuntimeError(
                "A row ended at a stop string, so its cache has consumed tokens that were dropped, and a recurrent "
                "state cannot go back. Prefill the text again, or end turns with `eos_ids`."
            )
        if self._carried is None:
            if self._options.max_new_tokens > 0:  # the newest token of every row has not been consumed yet
                self._decode(np.ones(len(self._rows), bool), self._options.max_new_tokens, 1)
            self._carried = returned_cache(self._state.cache, self._plan)
        return self._carried

    def _generate(self, prompts: list[np.ndarray]) -> Iterator[GeneratedToken]:
        limit = self._options.max_new_tokens
        for tokens, lengths, ends in prompt_pieces(prompts, self._options.prefill_chunk_size):
            inputs = (self._run, self._plan, jnp.asarray(tokens), jnp.asarray(lengths), jnp.asarray(ends))
            block, self._state = prefill_piece(inputs, self._state)
            if limit > 0 and ends.any():
                first_tokens, first_log_probs = map(whole_value, block)
                yield from self._report(first_tokens, first_log_probs, ends)
        done, steps = 1, 1 if self._options.ramp else self._options.steps_per_dispatch
        while done < limit and (active := np.array([row.finish_reason is None for row in self._rows])).any():
            steps = min(steps, limit - done)
            started = time.perf_counter()
            tokens, log_probs = self._decode(active, done, steps)
            if time.perf_counter() - started < SMOOTH_SECONDS:
                grown = min(2 * steps, self._options.steps_per_dispatch)
            else:
                grown = steps
            yield from self._report(tokens[:steps], log_probs[:steps], active)
            done, steps = done + steps, grown
        self._exhausted = True

    def _decode(self, active: np.ndarray, done: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
        first, count = jnp.asarray(done, jnp.int32), jnp.asarray(steps, jnp.int32)
        inputs = (self._decode_run, jnp.asarray(active), first, count, self._options.steps_per_dispatch)
        block, self._state = decode_block(inputs, self._state)
        tokens, log_probs = map(whole_value, block)
        return tokens, log_probs

    def _report(self, tokens: np.ndarray, log_probs: np.ndarray, rows: np.ndarray) -> Iterator[GeneratedToken]:
        live = [row for row, wanted in zip(self._rows, rows, strict=True) if wanted]
        for step_tokens, step_log_probs in zip(tokens.tolist(), log_probs.tolist(), strict=True):
            for row in live:
                if row.finish_reason is None:
                    yield from row.push(step_tokens[row.index], step_log_probs[row.index])


class _Options(NamedTuple):
    """What the host needs to know."""

    max_new_tokens: int
    eos_ids: frozenset[int]
    stops: tuple[str, ...]
    tokenizer: TextDecoder | None
    prefill_chunk_size: int
    steps_per_dispatch: int
    ramp: bool  # begin with short blocks


class _Row:
    """One prompt's new tokens as the host sees them."""

    def __init__(self, index: int, options: _Options):
        self.index = index
        self.finish_reason: FinishReason | None = None
        self._options = options
        self._count = 0
        self._text = None
        if options.tokenizer is not None:
            self._text = StopStrings(TextStream(options.tokenizer), options.stops)

    def push(self, token: int, log_prob: float) -> list[GeneratedToken]:
        """Takes the next token from the device; returns the events that have become certain."""
        self._count += 1
        if token == NON_FINITE:
            raise NonFiniteLogitsError(
                f"The logits of row {self.index} are not finite at step {self._count} of "
                f"{self._options.max_new_tokens}. "
                "Are there NaN or infinite weights, or did activations overflow in a narrow dtype?"
            )
        is_eos = token in self._options.eos_ids
        if self._text is None:
            events, rest = [self._event(token, None, log_prob)], None
        elif is_eos:
            released, rest = self._text.flush()
            events = [*map(self._event_of, released), self._event(token, "", log_prob)]
        else:
            released, rest = self._text.push(token, log_prob)
            events = [*map(self._event_of, released)]
            if rest is not None:
                return self._end("stop_string", events or [self._event(None, "", 0.0)], rest)
            if self._count == self._options.max_new_tokens:
                released, rest = self._text.flush()
                events += map(self._event_of, released)
        if is_eos:
            return self._end("eos", events, rest)
        if self._count == self._options.max_new_tokens:
            return self._end("length", events, rest)
        return events

    def _end(self, reason: FinishReason, events: list[GeneratedToken], rest: str | None) -> list[GeneratedToken]:
        self.finish_reason = reason
        last = events[-1]
        text = last.text if rest is None or last.text is None else last.text + rest
        return [*events[:-1], last._replace(text=text, finish_reason=reason)]

    def _event(self, token: int | None, text: str | None, log_prob: float) -> GeneratedToken:
        return GeneratedToken(self.index, token, text, log_prob, None)

    def _event_of(self, released: Released) -> GeneratedToken:
        return self._event(released.token, released.text, released.log_prob)


def generate(
    model: Any,
    prompts: Prompts,
    *,
    max_new_tokens: int | None = None,
    temperature: float | int | None = None,
    top_k: int | None = None,
    top_p: float | int | None = None,
    min_p: float | int | None = None,
    repetition_penalty: float | int | None = None,
    eos_ids: SupportsIndex | Iterable[SupportsIndex] | None = None,
    stop: str | Sequence[str] = (),
    tokenizer: TextDecoder | None = None,
    key: Array | SupportsIndex = 0,
    generation_config: GenerationConfig | None = None,
    cache: Any = None,
    return_log_probs: bool = False,
    prefill_chunk_size: int = PREFILL_CHUNK_SIZE,
    steps_per_dispatch: int = STEPS_PER_DISPATCH,
) -> list[list[int]] | tuple[list[list[int]], list[list[float]]]:
    """Continues every prompt; returns the new tokens of each, in order, without the prompt.

    Prompts may differ in length: each gets exactly the tokens it gets alone, up to rounding in the model. A row ends at

    - an eos id, which is the last token returned;
    - a stop string in the decoded text; the last token returned is the last that holds text before the stop string;
    - `max_new_tokens` tokens.

    **Arguments:**

    - `model`: a model with `decode`, such as `KimiLinear`; it is left as it is.
    - `prompts`: token ids, one list per prompt.
    - `temperature`, `top_k`, `top_p`, `min_p`, `repetition_penalty`: see `Sampling`; temperature 0 is greedy. Off are
      `top_k=0`, `top_p=1`, `min_p=0`, `repetition_penalty=1`. The penalty is over the prompt and the new tokens.
    - `eos_ids`: one or several ids; `()` for none. By default those of `generation_config`, else of the model's config.
    - `stop`: one or several strings; needs `tokenizer`, of which only `decode(ids)` is used.
    - `key`: a seed, one PRNG key, or one key per prompt. The new token number `t` of a row is drawn with
      `fold_in(key, t)`, never with the row's place in the batch: a seed gives a prompt the same text alone and in
      company. To draw several texts for one prompt, give it several times with keys of their own (`jax.random.split`).
    - `generation_config`: defaults for the arguments above that are `None`; by default what the
        `generation_config.json` of the model's folder says, see `read_generation_config`.
    - `cache`: go on from here, one row per prompt: from `model.init_cache`, `model.decode` or the `cache` of a finished
      stream. It is copied, not changed. By default an empty one of the right size.
    - `return_log_probs`: return the tokens and the log-probability of each: natural log, float32, under the model's own
      distribution (temperature 1, nothing cut away).
    - `prefill_chunk_size`: the prompts are fed in pieces of at most so many tokens, which bounds memory.
    - `steps_per_dispatch`: decoding steps between two looks of the host at the tokens.

    **Raises:** `ValueError` or `TypeError` before any work for arguments that make no sense, `NonFiniteLogitsError` (a
    `FloatingPointError`) naming step and row when the model gives NaN or infinity.
    """
    stream = stream_generate(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        eos_ids=eos_ids,
        stop=stop,
        # text costs time and only stop strings need it
        tokenizer=tokenizer if stop else None,
        key=key,
        generation_config=generation_config,
        cache=cache,
        prefill_chunk_size=prefill_chunk_size,
        steps_per_dispatch=steps_per_dispatch,
        ramp=False,
    )
    tokens: list[list[int]] = [[] for _ in prompts]
    log_probs: list[list[float]] = [[] for _ in prompts]
    for event in stream:
        if event.token is not None:
            tokens[event.row].append(event.token)
            log_probs[event.row].append(event.log_prob)
    return (tokens, log_probs) if return_log_probs else tokens


def stream_generate(
    model: Any,
    prompts: Prompts,
    *,
    max_new_tokens: int | None = None,
    temperature: float | int | None = None,
    top_k: int | None = None,
    top_p: float | int | None = None,
    min_p: float | int | None = None,
    repetition_penalty: float | int | None = None,
    eos_ids: SupportsIndex | Iterable[SupportsIndex] | None = None,
    stop: str | Sequence[str] = (),
    tokenizer: TextDecoder | None = None,
    key: Array | SupportsIndex = 0,
    generation_config: GenerationConfig | None = None,
    cache: Any = None,
    prefill_chunk_size: int = PREFILL_CHUNK_SIZE,
    steps_per_dispatch: int = STEPS_PER_DISPATCH,
    ramp: bool = True,
) -> TokenStream:
    """Continues every prompt; yields a `GeneratedToken` for each new token as it comes, rows interleaved.

    The same tokens and arguments as `generate`. With a `tokenizer` the events carry text; tokens whose text may still
    turn out to be part of a stop string are held back. With `ramp` the number of steps in a dispatch grows from one, as
    long as a dispatch is short for the eye; otherwise every dispatch has `steps_per_dispatch`.

    Arguments are checked at the call, not at the first token. The finished stream's `cache` carries a conversation on:

        stream = stream_generate(model, [turn], cache=model.init_cache(1, max_length=4096))
        for event in stream: ...
        stream = stream_generate(model, [next_turn], cache=stream.cache)

    **Raises:** as `generate`.
    """
    config = generation_config or model_generation_config(model)
    vocab_size = model.config.vocab_size
    ids = check_prompts(prompts, vocab_size)
    options = _Options(
        max_new_tokens=check_count("max_new_tokens", _first(max_new_tokens, config.max_new_tokens), 0),
        eos_ids=frozenset(_eos_ids(model, eos_ids, config)),
        stops=check_stops(stop, tokenizer is not None),
        tokenizer=tokenizer,
        prefill_chunk_size=check_count("prefill_chunk_size", prefill_chunk_size, 1),
        steps_per_dispatch=check_count("steps_per_dispatch", steps_per_dispatch, 1),
        ramp=ramp,
    )
    sampling = make_sampling(
        temperature=_first(temperature, config.temperature),
        top_k=_first(top_k, config.top_k),
        top_p=_first(top_p, config.top_p),
        min_p=_first(min_p, config.min_p),
        repetition_penalty=_first(repetition_penalty, config.repetition_penalty),
    )
    keys = row_keys(key, len(ids))
    if cache is not None:
        check_room(cache, ids, options.max_new_tokens)
    _warn_of_length(model, ids, options.max_new_tokens, cache)
    slots = -(-max(len(options.eos_ids), 1) // EOS_SLOTS) * EOS_SLOTS
    eos = np.full(slots, NO_TOKEN, np.int32)
    eos[: len(options.eos_ids)] = sorted(options.eos_ids)
    return TokenStream(Run(model, sampling, jnp.asarray(eos), keys), cache, ids, options)


def _first[T](value: T | None, default: T) -> T:
    return default if value is None else value


def _eos_ids(
    model: Any, eos_ids: SupportsIndex | Iterable[SupportsIndex] | None, config: GenerationConfig
) -> tuple[int, ...]:
    """The explicit ids, else those of the generation config, else those of the model's config, else none.

    An id that a file names and the vocabulary lacks never comes.
    """
    vocab_size = model.config.vocab_size
    if eos_ids is not None:
        return check_eos_ids(eos_ids, vocab_size)
    for ids, name in (
        (config.eos_token_ids, "`eos_token_ids`"),
        (model.config.eos_token_id, "`eos_token_id` of the model's config"),
    ):
        if ids is not None:
            return tuple(token for token in token_ids(ids, name) or () if 0 <= token < vocab_size)
    return ()


def _warn_of_length(model: Any, prompts: Sequence[np.ndarray], max_new_tokens: int, cache: Any) -> None:
    """Warns of rows that may become longer than the model was made for."""
    limit = getattr(model.config, "model_max_length", None)
    before = np.zeros(len(prompts), int) if cache is None else np.asarray(cache.lengths)
    longest = max(int(held) + len(prompt) for held, prompt in zip(before, prompts, strict=True)) + max_new_tokens
    if limit is not None and longest > limit:
        warnings.warn(
            f"A row may reach {longest} tokens with its {max_new_tokens} new ones; this model was made for {limit} "
            "(`model_max_length`), and its text may get worse beyond.",
            stacklevel=4,
        )
