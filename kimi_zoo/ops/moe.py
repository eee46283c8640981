"""Mixture of experts: choosing experts, and running each token through the ones it chose."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32

from kimi_zoo.ops.activations import swiglu

BLOCK_ROWS = 128  # rows of one expert computed together on CPU
DENSE_TOKENS = 16  # up to here all experts over all tokens cost no more than reading the experts' weights once


def route(
    router_logits: Float32[Array, "tokens experts"],
    score_bias: Float32[Array, " experts"] | None,
    *,
    top_k: int,
    activation: str = "sigmoid",
    num_groups: int = 1,
    top_groups: int = 1,
    renormalize: bool = True,
    scale: float = 1.0,
) -> tuple[Int32[Array, "tokens top_k"], Float32[Array, "tokens top_k"]]:
    """Chooses `top_k` experts per token and weighs them by their scores.

    The bias takes part in the choice alone, never in the weights. With groups, an expert can be chosen only in the
    `top_groups` groups whose two best biased scores have the largest sum.

    **Arguments:**

    - `router_logits`: float32, since a rounding decides who is chosen.
    - `activation`: `"sigmoid"` or `"softmax"`, logits to scores.
    - `renormalize`: whether the chosen scores are divided by their sum; `scale` multiplies the weights afterwards,
        once.

    **Raises:** `ValueError` for an unknown activation or counts that do not fit one another.

    **Source:** DeepSeek-V3 (arXiv:2412.19437), section 2.1.2; Kimi Linear (arXiv:2510.26692).
    """
    tokens, experts = router_logits.shape
    if activation not in ("sigmoid", "softmax"):
        raise ValueError(f'The router activation is "sigmoid" or "softmax"; got {activation!r}.')
    if experts % num_groups or not 1 <= top_groups <= num_groups:
        raise ValueError(f"{experts} experts cannot form {num_groups} equal groups of which {top_groups} are kept.")
    if top_k > experts // num_groups * top_groups:
        raise ValueError(f"Cannot choose {top_k} of {experts} experts in {top_groups} of {num_groups} groups.")
    scores = jax.nn.sigmoid(router_logits) if activation == "sigmoid" else jax.nn.softmax(router_logits, axis=-1)
    choice = scores if score_bias is None else scores + score_bias
    choice = jax.lax.stop_gradient(choice)
    if num_groups > top_groups:
        grouped = choice.reshape(tokens, num_groups, experts // num_groups)
        best = jax.lax.top_k(grouped, min(2, experts // num_groups))[0].sum(-1)
        kept = jax.lax.top_k(best, top_groups)[1]
        mask = jnp.any(kept[:, :, None] == jnp.arange(num_groups), axis=1)
        choice = jnp.where(mask[:, :, None], grouped, -jnp.inf).reshape(tokens, experts)
    expert_ids = jax.lax.top_k(choice, top_k)[1]
    weights = jnp.take_along_axis(scores, expert_ids, axis=1)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return expert_ids, weights * scale


def expert_mlps(
    x: Float[Array, "tokens hidden"],
    expert_ids: Int[Array, "tokens top_k"],
    expert_weights: Float32[Array, "tokens top_k"],
    gate: Float[Array, "experts inner hidden"],
    up: Float[Array, "experts inner hidden"],
    down: Float[Array, "experts hidden inner"],
    *,
    limit: float | int | None = None,
) -> Float[Array, "tokens hidden"]:
    """`sum_k expert_weights[t, k] * down_e(swiglu(gate_e(x_t), up_e(x_t)))` with `e = expert_ids[t, k]`: no token is
    dropped.

    The form is chosen by size and by the platform that the program is lowered to: few tokens go through every expert,
    or through the chosen ones' weights alone; many are sorted by expert, on CPU into blocks of `BLOCK_ROWS` rows,
    elsewhere into one ragged matmul.

    **Arguments:** `limit`: see `swiglu`.
    """
    tokens, top_k = expert_ids.shape
    if tokens == 0:
        return x
    if tokens <= DENSE_TOKENS:
        few = 2 * tokens * top_k <= gate.shape[0]
        return (_chosen if few else _dense)(x, expert_ids, expert_weights, gate, up, down, limit)
    blocks, ragged = partial(_blocks, limit=limit), partial(_ragged, limit=limit)
    arguments = (x, expert_ids, expert_weights, gate, up, down)
    return jax.lax.platform_dependent(*arguments, cpu=blocks, default=ragged)


def _mlp(x: Array, gate: Array, up: Array, down: Array, limit: float | int | None) -> Array:
    """One expert over the rows of `x`."""
    inner = swiglu(x @ gate.T.astype(x.dtype), x @ up.T.astype(x.dtype), limit)
    return inner @ down.T.astype(x.dtype)


def _chosen(
    x: Array, expert_ids: Array, expert_weights: Array, gate: Array, up: Array, down: Array, limit: float | int | None
) -> Array:
    """Reads the weights of the chosen experts only, one (token, expert) pair after another."""
    top_k = expert_ids.shape[1]

    def pair(output: Array, index: Array) -> tuple[Array, None]:
        token, expert = index // top_k, expert_ids.reshape(-1)[index]
        y = _mlp(x[token][None], gate[expert], up[expert], down[expert], limit)[0]
        return output.at[token].add(expert_weights.reshape(-1)[index] * y.astype(jnp.float32)), None

    start = jnp.zeros(x.shape, jnp.float32)
    return jax.lax.scan(pair, start, jnp.arange(expert_ids.size))[0].astype(x.dtype)


def _dense(
    x: Array, expert_ids: Array, expert_weights: Array, gate: Array, up: Array, down: Array, limit: float | int | None
) -> Array:
    """Every expert over every token; those that were not chosen weigh 0."""
    experts = gate.shape[0]
    chosen = expert_ids[:, :, None] == jnp.arange(experts)
    weights = jnp.sum(jnp.where(chosen, expert_weights[:, :, None], 0.0), axis=1)  # [tokens, experts]
    inner = swiglu(
        jnp.einsum("th,efh->etf", x, gate.astype(x.dtype)), jnp.einsum("th,efh->etf", x, up.astype(x.dtype)), limit
    )
    inner = inner * weights.T[:, :, None].astype(x.dtype)
    return (
        jnp.einsum("etf,ehf->eth", inner, down.astype(x.dtype), preferred_element_type=jnp.float32)
        .sum(0)
        .astype(x.dtype)
    )


def _blocks(
    x: Array, expert_ids: Array, expert_weights: Array, gate: Array, up: Array, down: Array, limit: float | int | None
) -> Array:
    """Rows sorted by expert, each expert's padded to whole blocks, one batched matmul over the blocks."""
    tokens, top_k = expert_ids.shape
    experts, rows = gate.shape[0], tokens * top_k
    block = min(BLOCK_ROWS, max(8, -(-rows // experts)))
    blocks = rows // block + min(experts, rows)
    flat = expert_ids.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.bincount(flat, length=experts)
    padded = (sizes + block - 1) // block * block
    ends = jnp.cumsum(padded)
    shift = (ends - padded) - (jnp.cumsum(sizes) - sizes)  # from sorted place to padded place, per expert
    place = jnp.arange(rows) + shift[flat[order]]
    source = (
        jnp.full(blocks * block, tokens).at[place].set(order // top_k)
    )  # row `tokens` does not exist: filled with 0
    inputs = jnp.take(x, source, axis=0, mode="fill", fill_value=0).reshape(blocks, block, -1)
    owner = jnp.minimum(jnp.searchsorted(ends, jnp.arange(blocks) * block, side="right"), experts - 1)
    matmul = lambda a, w: jnp.einsum("nbi,noi->nbo", a, w[owner].astype(x.dtype))
    outputs = matmul(swiglu(matmul(inputs, gate), matmul(inputs, up), limit), down).reshape(blocks * block, -1)
    where = jnp.zeros(rows, place.dtype).at[order].set(place).reshape(tokens, top_k)
    return _combine(outputs[where], expert_weights, x.dtype)


def _ragged(
    x: Array, expert_ids: Array, expert_weights: Array, gate: Array, up: Array, down: Array, limit: float | int | None
) -> Array:
    """Rows sorted by expert, one ragged matmul per weight."""
    tokens, top_k = expert_ids.shape
    flat = expert_ids.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.bincount(flat, length=gate.shape[0]).astype(jnp.int32)
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=(0,), rhs_group_dimensions=(0,)
    )
    matmul = lambda a, w: jax.lax.ragged_dot_general(a, w.astype(x.dtype), sizes, numbers)
    inputs = x[order // top_k]
    outputs = matmul(swiglu(matmul(inputs, gate), matmul(inputs, up), limit), down)
    return _combine(outputs[jnp.argsort(order)].reshape(tokens, top_k, -1), expert_weights, x.dtype)


def _combine(outputs: Array, expert_weights: Array, dtype: jnp.dtype) -> Array:
    """The weighted sum over the chosen experts, in float32."""
    return jnp.einsum("tkh,tk->th", outputs.astype(jnp.float32), expert_weights).astype(dtype)
