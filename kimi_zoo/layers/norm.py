"""Root-mean-square normalisation."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kimi_zoo.layers.checks import check_eps


class RMSNorm(eqx.Module):
    """`weight * x / sqrt(mean(x^2) + eps)` over the last axis, computed in float32 and returned in the dtype of `x`.

    **Source:** arXiv:1910.07467.
    """

    weight: Float[Array, " dim"]
    eps: float = eqx.field(static=True)

    def __init__(self, dim: int, *, eps: float):
        """The weight starts at 1; `eps` is added to the mean square."""
        check_eps(eps)
        self.weight = jnp.ones(dim)
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch dim"]) -> Float[Array, "*batch dim"]:
        """Normalises every vector by itself."""
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * self.weight.astype(jnp.float32)).astype(x.dtype)
