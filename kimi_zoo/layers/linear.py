"""Linear maps and token embeddings, stored as published checkpoints store them: `[out, in]`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Int, PRNGKeyArray

from kimi_zoo.layers.checks import check_std


class Linear(eqx.Module):
    """`weight @ x + bias` over the last axis."""

    weight: Float[Array, "out_features in_features"]
    bias: Float[Array, " out_features"] | None

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = False, std: float | None = None, key: PRNGKeyArray
    ):
        """**Arguments:**

        - `std`: standard deviation of the normal the weight is drawn from; `in_features ** -0.5` by default.
        - `bias`: whether there is one; it starts at 0.
        """
        check_std(std)
        scale = in_features**-0.5 if std is None else std
        self.weight = scale * jr.normal(key, (out_features, in_features))
        self.bias = jnp.zeros(out_features) if bias else None

    def __call__(self, x: Float[Array, "*batch in_features"]) -> Float[Array, "*batch out_features"]:
        """Computed in the dtype of `x`."""
        y = jnp.einsum("...i,oi->...o", x, self.weight.astype(x.dtype))
        return y if self.bias is None else y + self.bias.astype(x.dtype)


class Embedding(eqx.Module):
    """A table of token vectors; also the output head of a model that ties the two."""

    weight: Float[Array, "vocab_size hidden_size"]

    def __init__(self, vocab_size: int, hidden_size: int, *, std: float, key: PRNGKeyArray):
        """Rows are drawn from a normal of standard deviation `std`."""
        check_std(std)
        self.weight = std * jr.normal(key, (vocab_size, hidden_size))

    def __call__(
        self, tokens: Int[Array, "*batch"], *, tensor_axis: str | None = None
    ) -> Float[Array, "*batch hidden_size"]:
        """The row of each token.

        **Arguments:** `tensor_axis`: inside `jax.shard_map`, the mesh axis over which the rows are split, in order.
        """
        if tensor_axis is None:
            return self.weight[tokens]
        rows = self.weight.shape[0]
        place = tokens - jax.lax.axis_index(tensor_axis) * rows
        own = (place >= 0) & (place < rows)
        found = jnp.where(own[..., None], self.weight[jnp.clip(place, 0, rows - 1)], jnp.zeros((), self.weight.dtype))
        return jax.lax.psum(found, tensor_axis)

    def attend(self, x: Float[Array, "*batch hidden_size"]) -> Float[Array, "*batch vocab_size"]:
        """Scores of every token for the vectors `x`: the tied output head."""
        return jnp.einsum("...h,vh->...v", x, self.weight.astype(x.dtype))
