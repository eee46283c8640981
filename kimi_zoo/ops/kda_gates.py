"""What happens to the inputs of Kimi Delta Attention before the recurrence: decay gates and L2 normalisation."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

L2_NORM_EPS = 1e-6


def accumulation_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype sums and states are kept in: float32, or float64 for float64 inputs."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def l2_norm(x: Float[Array, "*shape dim"]) -> Float[Array, "*shape dim"]:
    """`x / sqrt(sum(x^2) + 1e-6)` over the last axis, in float32; zero vectors stay zero, with finite gradients."""
    x = x.astype(accumulation_dtype(x.dtype))
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + L2_NORM_EPS)


def kda_gate(
    gate: Float[Array, "*shape heads key_dim"],
    a_log: Float[Array, " heads"],
    dt_bias: Float[Array, "..."] | None = None,
    lower_bound: float | None = None,
) -> Float[Array, "*shape heads key_dim"]:
    """Log-decay (natural log, <= 0, per token, float32) from the raw gate.

    Unbounded, `-exp(a_log) * softplus(gate + dt_bias)`; with a lower bound,
    `lower_bound * sigmoid(exp(a_log) * (gate + dt_bias))`.

    **Arguments:**

    - `gate`: the raw gate, before the bias.
    - `a_log`: log of the decay rate of each head.
    - `dt_bias`: `[heads * key_dim]` (head-major) or `[heads, key_dim]`; None for no bias.
    - `lower_bound`: the least log-decay per token, in [-5, 0), for the bounded form.

    **Raises:** `ValueError` for a `dt_bias` of another size and for a bound out of range.

    **Source:** Kimi Linear (arXiv:2510.26692); the bounded form as in Ling 3 and Megatron's safe gate.
    """
    heads, key_dim = gate.shape[-2:]
    check_gate(heads, key_dim, a_log, dt_bias, lower_bound)
    dtype = accumulation_dtype(gate.dtype)
    gate = gate.astype(dtype)
    if dt_bias is not None:
        gate = gate + dt_bias.astype(dtype).reshape(heads, key_dim)
    rate = jnp.exp(a_log.astype(dtype))[:, None]
    if lower_bound is None:
        return -rate * (jnp.maximum(gate, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(gate))))  # softplus
    return lower_bound * jax.nn.sigmoid(rate * gate)


def check_gate(heads: int, key_dim: int, a_log: Array | None, dt_bias: Array | None, lower_bound: float | None) -> None:
    """Raises `ValueError` when the gate's parameters do not fit the gate or one another."""
    if a_log is None:
        if dt_bias is not None or lower_bound is not None:
            raise ValueError(
                "`dt_bias` and `lower_bound` belong to the gate activation, which is applied when `a_log` is given; "
                "without `a_log`, `gate` is taken as the log-decay itself. Pass `a_log` too, or neither of them."
            )
        return
    if a_log.shape != (heads,):
        raise ValueError(f"`a_log` needs one value per head, shape ({heads},), got shape {a_log.shape}.")
    if dt_bias is not None and dt_bias.shape not in ((heads * key_dim,), (heads, key_dim)):
        raise ValueError(
            f"`dt_bias` needs heads * key_dim = {heads} * {key_dim} = {heads * key_dim} values, shape "
            f"({heads * key_dim},) or ({heads}, {key_dim}), got shape {dt_bias.shape} with {dt_bias.size} values."
        )
    if lower_bound is not None and not -5 <= lower_bound < 0:
        raise ValueError(f"`lower_bound` must be in [-5, 0), got {lower_bound}.")


@dataclasses.dataclass(frozen=True)
class Activation:
    """What is done to the inputs before the recurrence, all of it static."""

    scale: float
    lower_bound: float | None
    use_qk_l2norm: bool


class Tokens(NamedTuple):
    """The inputs that have one entry per token; as the recurrence takes them, `gate` is the log-decay."""

    query: Float[Array, "*tokens heads key_dim"]
    key: Float[Array, "*tokens heads key_dim"]
    value: Float[Array, "*tokens heads value_dim"]
    gate: Float[Array, "*tokens heads key_dim"]
    beta: Float[Array, "*tokens heads"]


class Inputs(NamedTuple):
    """All arrays that the operator works on."""

    tokens: Tokens  # raw, `batch seq heads ...`
    states: Float[Array, "batch *segments heads key_dim value_dim"]
    a_log: Float[Array, " heads"] | None
    dt_bias: Float[Array, "heads key_dim"] | None
    segment_ids: Int[Array, "batch seq"] | None


def activate_tokens(
    tokens: Tokens,
    real: Bool[Array, "*tokens"] | None,
    a_log: Float[Array, " heads"] | None,
    dt_bias: Float[Array, "heads key_dim"] | None,
    activation: Activation,
) -> Tokens:
    """Query (normalised, scaled), key, value, log-decay and beta as the recurrence takes them, in float32.

    Where `real` is False all five are 0, so that the token neither decays nor writes; the raw inputs there are masked
    before anything is computed from them, so that not even NaN in them reaches a gradient.
    """
    dtype = accumulation_dtype(tokens.query.dtype)
    inputs = [x.astype(dtype) for x in tokens]
    if real is not None:
        inputs = [jnp.where(real.reshape(real.shape + (1,) * (x.ndim - real.ndim)), x, 0.0) for x in inputs]
    query, key, value, gate, beta = inputs
    if activation.use_qk_l2norm:
        query, key = l2_norm(query), l2_norm(key)
    if a_log is not None:
        gate = kda_gate(gate, a_log, dt_bias, activation.lower_bound)
        if real is not None:
            gate = jnp.where(real[..., None, None], gate, 0.0)
    return Tokens(query * activation.scale, key, value, gate, beta)
