"""Kimi Delta Attention as it is defined, one token at a time. Every other form is tested against this one."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kimi_zoo.ops.packing import segment_starts


def delta_step(
    state: Float[Array, "*batch key_dim value_dim"],
    query: Float[Array, "*batch key_dim"],
    key: Float[Array, "*batch key_dim"],
    value: Float[Array, "*batch value_dim"],
    log_decay: Float[Array, "*batch key_dim"],
    beta: Float[Array, "*batch"],
    query_key: Float[Array, "*batch 1"] | None = None,
) -> tuple[Float[Array, "*batch key_dim value_dim"], Float[Array, "*batch value_dim"]]:
    """One token: decay the state, write the part of the value that the key does not yet recall, read with the query.

    Returns the new state and the output. All in one dtype; the query is already scaled. Written so that the old state
    is read once for key and query together, and once more to become the new one. `query_key` is the inner product of
    the two, where it is already known.

    **Source:** Kimi Linear (arXiv:2510.26692), the recurrence of KDA.
    """
    decay = jnp.exp(log_decay)
    both = jnp.stack([key, query], axis=-2) * decay[..., None, :]  # reads what decay leaves of the state
    read = jnp.matmul(both, state, precision=jax.lax.Precision.HIGHEST)
    written = beta[..., None] * (value - read[..., 0, :])
    if query_key is None:
        query_key = jnp.sum(query * key, axis=-1, keepdims=True)
    output = read[..., 1, :] + query_key * written
    return decay[..., None] * state + key[..., None] * written[..., None, :], output


def kda_recurrent(
    query: Float[Array, "batch seq heads key_dim"],
    key: Float[Array, "batch seq heads key_dim"],
    value: Float[Array, "batch seq heads value_dim"],
    log_decay: Float[Array, "batch seq heads key_dim"],
    beta: Float[Array, "batch seq heads"],
    initial_state: Float[Array, "batch *segments heads key_dim value_dim"],
    segment_ids: Int[Array, "batch seq"] | None = None,
) -> tuple[Float[Array, "batch seq heads value_dim"], Float[Array, "batch *segments heads key_dim value_dim"]]:
    """Output of every token and the final state, by a scan over tokens; a state per segment id if given so.

    All inputs share one dtype; queries are scaled. Padding (id 0) has zeros in all five inputs and so leaves the state
    as it is. The state is zero before a token that starts a segment other than the row's first; with a state per
    segment, each starts from its own.
    """

    def step(states, token):
        *token, start, slot = token
        state = read_slot(states, slot)
        if start is not None:
            state = jnp.where(start[:, None, None, None], jnp.zeros_like(state), state)
        state, output = delta_step(state, *token)
        return write_slot(states, slot, state), output

    starts, slots = None, None
    if segment_ids is not None and initial_state.ndim == 5:
        slots = jnp.maximum(segment_ids.T - 1, 0)
    elif segment_ids is not None:
        starts = segment_starts(segment_ids).T
    query_key = jnp.sum(query * key, axis=-1, keepdims=True)  # all at once: a CPU's step takes a quarter less time
    tokens = [jnp.moveaxis(x, 1, 0) for x in (query, key, value, log_decay, beta, query_key)]
    final_state, output = jax.lax.scan(step, initial_state, (*tokens, starts, slots))
    return jnp.moveaxis(output, 0, 1), final_state


def read_slot(states: Array, slot: Int[Array, " batch"] | None) -> Float[Array, "batch heads key_dim value_dim"]:
    """Each row's state with the number `slot`, or the whole when there is one state only."""
    if slot is None:
        return states
    return jnp.take_along_axis(states, slot[:, None, None, None, None], axis=1)[:, 0]


def write_slot(states: Array, slot: Int[Array, " batch"] | None, state: Array) -> Array:
    """The states with each row's state number `slot` replaced."""
    if slot is None:
        return state
    return states.at[jnp.arange(slot.shape[0], dtype=slot.dtype), slot].set(state)
