"""Gated activations."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def swiglu(
    gate: Float[Array, "*batch dim"], up: Float[Array, "*batch dim"], limit: float | int | None = None
) -> Float[Array, "*batch dim"]:
    """`silu(gate) * up`; with a `limit` L, `min(silu(gate), L) * clip(up, -L, L)`. A limit of 0 or `None` means none.

    **Source:** arXiv:2002.05202; the limit as in published Ling 3 configs (`expert_swiglu_limit_list`).
    """
    gate = jax.nn.silu(gate)
    if limit:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return gate * up
