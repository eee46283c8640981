"""The mixture-of-experts block: router, routed experts, shared experts."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Float, Float32, Int, PRNGKeyArray

from kimi_zoo.layers.checks import check_std
from kimi_zoo.layers.mlp import MLP
from kimi_zoo.ops.moe import route
from kimi_zoo.ops.moe_dispatch import run_experts


class Router(eqx.Module):
    """Linear router in float32 whatever the storage, with the bias that balances the choice of experts.

    `score_bias` takes part in choosing only and receives no gradient: training moves it by its own rule, or not at all.
    """

    weight: Float[Array, "experts hidden_size"]
    score_bias: Float32[Array, " experts"] | None
    top_k: int = eqx.field(static=True)
    activation: str = eqx.field(static=True)
    num_groups: int = eqx.field(static=True)
    top_groups: int = eqx.field(static=True)
    renormalize: bool = eqx.field(static=True)
    scale: float = eqx.field(static=True)

    def __init__(
        self,
        hidden_size: int,
        experts: int,
        *,
        top_k: int,
        activation: str = "sigmoid",
        num_groups: int = 1,
        top_groups: int = 1,
        renormalize: bool = True,
        scale: float = 1.0,
        std: float | None = None,
        key: PRNGKeyArray,
    ):
        """**Arguments:** see `kimi_zoo.ops.moe.route`; `std`: of the initial weights; the bias starts at 0."""
        check_std(std)
        spread = hidden_size**-0.5 if std is None else std
        self.weight = spread * jr.normal(key, (experts, hidden_size))
        self.score_bias = jnp.zeros(experts)
        self.top_k = top_k
        self.activation = activation
        self.num_groups = num_groups
        self.top_groups = top_groups
        self.renormalize = renormalize
        self.scale = scale

    def __call__(self, x: Float[Array, "tokens hidden_size"]) -> tuple[Array, Array]:
        """**Returns:** `expert_ids` and `expert_weights`, both `[tokens, top_k]`."""
        logits = jnp.einsum(
            "th,eh->te", x.astype(jnp.float32), self.weight.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
        )
        return route(
            logits,
            self.score_bias,
            top_k=self.top_k,
            activation=self.activation,
            num_groups=self.num_groups,
            top_groups=self.top_groups,
            renormalize=self.renormalize,
            scale=self.scale,
        )


class Experts(eqx.Module):
    """SwiGLU blocks of one shape, stacked along a leading expert axis."""

    gate_proj: Float[Array, "experts inner hidden_size"]
    up_proj: Float[Array, "experts inner hidden_size"]
    down_proj: Float[Array, "experts hidden_size inner"]

    def __init__(self, hidden_size: int, inner: int, experts: int, *, std: float | None = None, key: PRNGKeyArray):
        """Weights are drawn from a normal of standard deviation `std`, by default `in_features ** -0.5`."""
        check_std(std)
        gate_key, up_key, down_key = jr.split(key, 3)
        in_std, out_std = (hidden_size**-0.5, inner**-0.5) if std is None else (std, std)
        self.gate_proj = in_std * jr.normal(gate_key, (experts, inner, hidden_size))
        self.up_proj = in_std * jr.normal(up_key, (experts, inner, hidden_size))
        self.down_proj = out_std * jr.normal(down_key, (experts, hidden_size, inner))

    def __call__(
        self,
        x: Float[Array, "tokens hidden_size"],
        expert_ids: Int[Array, "tokens top_k"],
        expert_weights: Float32[Array, "tokens top_k"],
        *,
        limit: float | int | None = None,
        **options: Any,
    ) -> Float[Array, "tokens hidden_size"]:
        """The weighted sum over the experts that each token chose: see `kimi_zoo.ops.moe_dispatch.run_experts`."""
        matrices = (self.gate_proj, self.up_proj, self.down_proj)
        return run_experts(x, expert_ids, expert_weights, *matrices, limit=limit, **options)


class MoE(eqx.Module):
    """Every token goes through `top_k` routed experts, weighted, and through all shared ones. No token is dropped,
    unless on several devices a capacity is set.

    **Source:** DeepSeekMoE (arXiv:2401.06066); DeepSeek-V3 (arXiv:2412.19437), section 2.1.2.
    """

    router: Router
    experts: Experts
    shared: MLP | None
    limit: float | int | None = eqx.field(static=True)

    def __init__(
        self, router: Router, experts: Experts, shared: MLP | None = None, *, limit: float | int | None = None
    ):
        """**Arguments:** `limit`: clamp of the routed experts' SwiGLU, see `swiglu`; the shared ones have their own."""
        self.router = router
        self.experts = experts
        self.shared = shared
        self.limit = limit or None

    def __call__(
        self,
        x: Float[Array, "*batch hidden_size"],
        *,
        expert_axis: str | None = None,
        expert_capacity: float | None = None,
        real: Bool[Array, "*batch"] | None = None,
    ) -> Float[Array, "*batch hidden_size"]:
        """Applied to every token by itself: what a token gives does not depend on which others there are, unless they
        fill the `expert_capacity`.

        **Arguments:** see `kimi_zoo.ops.moe_dispatch.run_experts`.
        """
        tokens = x.reshape(-1, x.shape[-1])
        options = {}
        if expert_axis is not None:
            real = None if real is None else real.reshape(-1)
            options = {"expert_axis": expert_axis, "expert_capacity": expert_capacity, "real": real}
        y = self.experts(tokens, *self.router(tokens), limit=self.limit, **options).reshape(x.shape)
        return y if self.shared is None else y + self.shared(x)
