"""The dense SwiGLU block."""

import equinox as eqx
import jax.random as jr
from jaxtyping import Array, Float, PRNGKeyArray

from kimi_zoo.layers.linear import Linear
from kimi_zoo.ops.activations import swiglu


class MLP(eqx.Module):
    """`down(swiglu(gate(x), up(x)))`, without biases."""

    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear
    limit: float | int | None = eqx.field(static=True)

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        limit: float | int | None = None,
        std: float | None = None,
        key: PRNGKeyArray,
    ):
        """**Arguments:** `limit`: see `swiglu`; `std`: of the initial weights, see `Linear`."""
        gate_key, up_key, down_key = jr.split(key, 3)
        self.gate_proj = Linear(hidden_size, intermediate_size, std=std, key=gate_key)
        self.up_proj = Linear(hidden_size, intermediate_size, std=std, key=up_key)
        self.down_proj = Linear(intermediate_size, hidden_size, std=std, key=down_key)
        self.limit = limit or None

    def __call__(self, x: Float[Array, "*batch hidden_size"]) -> Float[Array, "*batch hidden_size"]:
        """Applied to every token by itself."""
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x), self.limit))
