"""The compiled parts of generation: a piece of the prompts, and a block of decoding steps.

Model, sampling values and eos ids are arguments, so models of one shape share a trace; the state is donated and updated
in place. The number of steps in a block is a traced value: blocks of every length run the same compiled program.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Float32, Int, Int32, Key

from kimi_zoo.generation.sampling import Sampling, sample
from kimi_zoo.generation.unstack import Plan, restack, unstack


class Run(NamedTuple):
    """What stays the same while a batch is generated."""

    model: Any
    sampling: Sampling
    eos_ids: Int32[Array, " eos"]  # filled up with ids that do not exist, so that their number does not retrace
    keys: Key[Array, " batch"]


class DecodeState(eqx.Module):
    """What changes. `token` is the newest token of each row, which the cache has not yet consumed.

    The cache is taken apart as the decoding model is: see `unstack`.
    """

    cache: Any
    token: Int32[Array, " batch"]
    seen: Bool[Array, "batch vocab"] | None


class Block(NamedTuple):
    """The tokens of some steps, row by row, and their log-probabilities under the model. Unused entries hold 0."""

    tokens: Int32[Array, "steps batch"]
    log_probs: Float32[Array, "steps batch"]


@eqx.filter_jit
def empty_cache(model: Any, batch: int, max_length: int, plan: Plan | None) -> Any:
    """The cache to begin with, for a model stacked as `plan` says (`None`: taken as it is)."""
    cache = model.init_cache(batch, max_length)
    return cache if plan is None else unstack(cache)


@eqx.filter_jit
def copied_cache(cache: Any, plan: Plan | None) -> Any:
    """A caller's cache to begin with: a copy, which may be donated."""
    cache = jax.tree.map(lambda leaf: jnp.copy(leaf) if eqx.is_array(leaf) else leaf, cache)
    return cache if plan is None else unstack(cache)


@eqx.filter_jit
def returned_cache(cache: Any, plan: Plan | None) -> Any:
    """The cache in the form in which the model makes it."""
    return cache if plan is None else restack(cache, plan)


@eqx.filter_jit(donate="all-except-first")
def prefill_piece(
    inputs: tuple[Run, Plan | None, Int32[Array, "batch piece"], Int32[Array, " batch"], Bool[Array, " batch"]],
    state: DecodeState,
) -> tuple[Block, DecodeState]:
    """Feeds one piece of the prompts; rows that end in it get their first new token.

    `inputs` are the run with the stacked model (how, says the plan), the right-padded tokens, how many are real in each
    row, and which rows end here. Only the last real token of each row goes through the output head: over a whole piece,
    logits would be the largest array by far.
    """
    run, plan, tokens, lengths, ends = inputs
    cache = state.cache if plan is None else restack(state.cache, plan)
    hidden, cache = run.model.decode_hidden_states(tokens, cache, lengths=lengths)
    cache = cache if plan is None else unstack(cache)
    last = jnp.maximum(lengths - 1, 0)[:, None, None]
    hidden = jnp.take_along_axis(hidden, last, axis=1)
    logits = run.model.logits(hidden)[:, 0]
    token, log_probs, seen = _choose(run, logits, state.seen, ends, jnp.int32(0))
    token = jnp.where(ends, token, state.token)
    return Block(token[None], log_probs[None]), DecodeState(cache, token, seen)


@eqx.filter_jit(donate="all-except-first")
def decode_block(
    inputs: tuple[Run, Bool[Array, " batch"], Int32[Array, ""], Int32[Array, ""], int], state: DecodeState
) -> tuple[Block, DecodeState]:
    """Decodes several steps, and fewer when all rows have ended.

    `inputs` are the run, the rows to go on with, the number of the first step, the number of steps, and the size of the
    block (static). A row ends at an eos id or at non-finite logits; its cache is left untouched from then on.
    """
    run, active, first, steps, size = inputs
    batch = active.shape[0]
    empty = Block(jnp.zeros((size, batch), jnp.int32), jnp.zeros((size, batch), jnp.float32))

    def unfinished(carry: tuple[Array, Array, Block, DecodeState]) -> Bool[Array, ""]:
        step, active, _, _ = carry
        return (step < steps) & active.any()

    def advance(carry: tuple[Array, Array, Block, DecodeState]) -> tuple[Array, Array, Block, DecodeState]:
        step, active, block, state = carry
        lengths = None if batch == 1 else active.astype(jnp.int32)  # alone, a row that has ended ends the loop
        token = jnp.maximum(state.token, 0)[:, None]
        hidden, cache = run.model.decode_hidden_states(token, state.cache, lengths=lengths)
        logits = run.model.logits(hidden)[:, 0]
        token, log_probs, seen = _choose(run, logits, state.seen, active, first + step)
        block = Block(block.tokens.at[step].set(token), block.log_probs.at[step].set(log_probs))
        token = jnp.where(active, token, state.token)
        active = active & (token >= 0) & ~_is_eos(token, run.eos_ids)
        return step + 1, active, block, DecodeState(cache, token, seen)

    _, _, block, state = jax.lax.while_loop(unfinished, advance, (jnp.int32(0), active, empty, state))
    return block, state


def _choose(
    run: Run,
    logits: Array,
    seen: Bool[Array, "batch vocab"] | None,
    rows: Bool[Array, " batch"],
    step: Int[Array, ""],
) -> tuple[Int32[Array, " batch"], Float32[Array, " batch"], Bool[Array, "batch vocab"] | None]:
    """Samples a token for every row and marks those of `rows` as seen. Keys depend on the row's key and the step."""
    keys = run.keys
    if run.sampling.temperature is not None:
        keys = jax.vmap(jr.fold_in, in_axes=(0, None))(keys, step)
    token, log_probs = sample(logits, run.sampling, keys=keys, seen=seen)
    if seen is not None:
        seen = seen | (jax.nn.one_hot(token, seen.shape[1], dtype=bool) & rows[:, None])
    return token, log_probs, seen


def _is_eos(token: Int32[Array, " batch"], eos_ids: Int32[Array, " eos"]) -> Bool[Array, " batch"]:
    return (token[:, None] == eos_ids).any(axis=-1)
