"""Kimi Delta Attention as it is defined, one token at a time. Every other form is tested against this one."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def delta_step(
    state: Float[Array, "*batch key_dim value_dim"],
    query: Float[Array, "*batch key_dim"],
    key: Float[Array, "*batch key_dim"],
    value: Float[Array, "*batch value_dim"],
    log_decay: Float[Array, "*batch key_dim"],
    beta: Float[Array, "*batch"],
) -> tuple[Float[Array, "*batch key_dim value_dim"], Float[Array, "*batch value_dim"]]:
    """One token: decay the state, write the part of the value that the key does not yet recall, read with the query.

    Returns the new state and the output. All in one dtype; the query is already scaled.

    **Source:** Kimi Linear (arXiv:2510.26692), the recurrence of KDA.
    """
    state = state * jnp.exp(log_decay)[..., None]
    recalled = jnp.sum(state * key[..., None], axis=-2)
    written = beta[..., None] * (value - recalled)
    state = state + key[..., None] * written[..., None, :]
    return state, jnp.sum(state * query[..., None], axis=-2)


def kda_recurrent(
    query: Float[Array, "batch seq heads key_dim"],
    key: Float[Array, "batch seq heads key_dim"],
    value: Float[Array, "batch seq heads value_dim"],
    log_decay: Float[Array, "batch seq heads key_dim"],
    beta: Float[Array, "batch seq heads"],
    initial_state: Float[Array, "batch heads key_dim value_dim"],
    starts: Bool[Array, "batch seq"] | None = None,
) -> tuple[Float[Array, "batch seq heads value_dim"], Float[Array, "batch heads key_dim value_dim"]]:
    """Output of every token and the state after the last one, by a scan over tokens.

    All inputs share one dtype; queries are scaled. Where `starts` is True the state is zero before the token. Padding
    has zeros in all five inputs and so leaves the state as it is.
    """

    def step(state, token):
        *token, start = token
        if start is not None:
            state = jnp.where(start[:, None, None, None], jnp.zeros_like(state), state)
        return delta_step(state, *token)

    tokens = [jnp.moveaxis(x, 1, 0) for x in (query, key, value, log_decay, beta)]
    starts = None if starts is None else starts.T
    final_state, output = jax.lax.scan(step, initial_state, (*tokens, starts))
    return jnp.moveaxis(output, 0, 1), final_state
