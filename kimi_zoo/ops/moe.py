"""Mixture of experts: choosing experts, and running each token through the ones it chose."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32

from kimi_zoo.ops.activations import swiglu
from kimi_zoo.ops.varying import vary_alike, zeros_like

BLOCK_ROWS = 32  # rows of one expert computed together on CPU, forward only
TRAINING_ROWS = 128  # and with derivatives
FEW_PAIRS = 64  # (token, expert) pairs up to which sorting does not pay on CPU


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
    - `renormalize`: whether the chosen scores are divided by their sum, if there are several. One alone keeps its
        score, as in the published code (in transformers it becomes 1). `scale` multiplies the weights afterwards, once.

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
    if renormalize and top_k > 1:
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
    """`sum_k expert_weights[t, k] * down_e(swiglu(gate_e(x_t), up_e(x_t)))` with `e = expert_ids[t, k]`.

    No token is dropped. The form is chosen by the platform that the program is lowered to. On CPU, a few tokens go
    through the weights of the experts they chose, one pair after another; many are sorted by expert into blocks.
    Elsewhere they are sorted into one ragged matmul. Derivatives are those of reverse mode.

    **Arguments:** `limit`: see `swiglu`; an id of `experts`, with a weight of 0, stands for none.
    """
    if x.shape[0] == 0:
        return x
    form = _chosen if expert_ids.size <= FEW_PAIRS else _blocks
    arguments = vary_alike((x, expert_ids, expert_weights, gate, up, down))
    return jax.lax.platform_dependent(*arguments, cpu=partial(form, limit=limit), default=partial(_ragged, limit=limit))


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

    start = zeros_like(x.astype(jnp.float32))
    return jax.lax.scan(pair, start, jnp.arange(expert_ids.size))[0].astype(x.dtype)


def _blocks(
    x: Array, expert_ids: Array, expert_weights: Array, gate: Array, up: Array, down: Array, limit: float | int | None
) -> Array:
    """Rows sorted by expert, each expert's padded to whole blocks.

    Forward, a loop over small blocks reads each expert's weights in place. Its derivative would add up whole weight
    gradients block by block, so with derivatives all larger blocks are one batched matmul.
    """

    @jax.custom_vjp
    def run(*arguments: Array) -> Array:
        return _sorted(*arguments, limit=limit, size=BLOCK_ROWS, experts=_loop)

    def forward(*arguments: Array) -> tuple[Array, Callable]:
        floats = lambda x, weights, gate, up, down: _sorted(
            x, arguments[1], weights, gate, up, down, limit=limit, size=TRAINING_ROWS, experts=_batched
        )
        return jax.vjp(floats, arguments[0], *arguments[2:])

    def backward(pullback: Callable, cotangent: Array) -> tuple:
        x, *rest = pullback(cotangent)
        return x, None, *rest

    run.defvjp(forward, backward)
    return run(x, expert_ids, expert_weights, gate, up, down)


def _sorted(
    x: Array,
    expert_ids: Array,
    expert_weights: Array,
    gate: Array,
    up: Array,
    down: Array,
    *,
    limit: float | int | None,
    size: int,
    experts: Callable,
) -> Array:
    """Sorts the (token, expert) pairs into blocks of `size` rows of one expert, computes them, and sums per token."""
    tokens, top_k = expert_ids.shape
    count, rows = gate.shape[0], tokens * top_k
    blocks = rows // size + min(count, rows)
    flat = expert_ids.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.bincount(flat, length=count)
    padded = (sizes + size - 1) // size * size
    ends = jnp.cumsum(padded)
    shift = (ends - padded) - (jnp.cumsum(sizes) - sizes)  # from sorted place to padded place, per expert
    some = flat[order] < count
    place = jnp.where(some, jnp.arange(rows) + shift[jnp.minimum(flat[order], count - 1)], blocks * size)
    # row `tokens` does not exist: filled with 0
    source = jnp.full(blocks * size, tokens).at[place].set(order // top_k, mode="drop")
    inputs = jnp.take(x, source, axis=0, mode="fill", fill_value=0).reshape(blocks, size, -1)
    owner = jnp.searchsorted(ends, jnp.arange(blocks) * size, side="right")  # `count` for blocks that nothing fills
    outputs = experts(inputs, owner, gate, up, down, limit).reshape(blocks * size, -1)
    where = jnp.zeros(rows, place.dtype).at[order].set(place).reshape(tokens, top_k)
    return combine(jnp.take(outputs, where, axis=0, mode="fill", fill_value=0), expert_weights, x.dtype)


def _loop(
    inputs: Array, owner: Array, gate: Array, up: Array, down: Array, limit: float | int | None
) -> Float[Array, "blocks rows hidden"]:
    """Block after block; those that nothing fills cost nothing."""

    def block(_: None, piece: tuple[Array, Array]) -> tuple[None, Array]:
        rows, expert = piece
        run = lambda rows: _mlp(rows, gate[expert], up[expert], down[expert], limit)
        return None, jax.lax.cond(expert < gate.shape[0], run, jnp.zeros_like, rows)

    return jax.lax.scan(block, None, (inputs, owner))[1]


def _batched(
    inputs: Array, owner: Array, gate: Array, up: Array, down: Array, limit: float | int | None
) -> Float[Array, "blocks rows hidden"]:
    """All blocks at once, with a copy of its expert's weights for each."""
    owner = jnp.minimum(owner, gate.shape[0] - 1)
    matmul = lambda a, w: jnp.einsum("nbi,noi->nbo", a, w[owner].astype(inputs.dtype))
    return matmul(swiglu(matmul(inputs, gate), matmul(inputs, up), limit), down)


def _ragged(
    x: Array, expert_ids: Array, expert_weights: Array, gate: Array, up: Array, down: Array, limit: float | int | None
) -> Array:
    """Rows sorted by expert, one ragged matmul per weight."""
    tokens, top_k = expert_ids.shape
    flat = expert_ids.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.bincount(flat, length=gate.shape[0]).astype(jnp.int32)
    matmul = lambda a, w: _ragged_matmul(a, w.astype(x.dtype), sizes)
    inputs = x[order // top_k]
    outputs = matmul(swiglu(matmul(inputs, gate), matmul(inputs, up), limit), down)
    outputs = jnp.where((flat[order] < gate.shape[0])[:, None], outputs, jnp.zeros((), outputs.dtype))
    return combine(outputs[jnp.argsort(order)].reshape(tokens, top_k, -1), expert_weights, x.dtype)


@jax.custom_vjp
def _ragged_matmul(a: Array, w: Array, sizes: Array) -> Array:
    """`a[r] @ w[e].T` for every row `r`, where the first `sizes[0]` rows belong to `e = 0`, and so on.

    JAX has no batched form of it: under `jax.vmap` the members of the batch take turns, and so do their derivatives.
    """
    return jax.custom_batching.sequential_vmap(_ragged_dot)(a, w, sizes)


def _ragged_dot(a: Array, w: Array, sizes: Array) -> Array:
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=(0,), rhs_group_dimensions=(0,)
    )
    return jax.lax.ragged_dot_general(a, w, sizes, numbers)


def _ragged_forward(a: Array, w: Array, sizes: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return _ragged_matmul(a, w, sizes), (a, w, sizes)


def _ragged_backward(saved: tuple[Array, Array, Array], cotangent: Array) -> tuple[Array, Array, None]:
    @jax.custom_batching.sequential_vmap
    def pull(a: Array, w: Array, sizes: Array, cotangent: Array) -> tuple[Array, Array]:
        return jax.vjp(lambda a, w: _ragged_dot(a, w, sizes), a, w)[1](cotangent)

    return *pull(*saved, cotangent), None


_ragged_matmul.defvjp(_ragged_forward, _ragged_backward)


def combine(
    outputs: Float[Array, "tokens top_k hidden"], expert_weights: Float32[Array, "tokens top_k"], dtype: jnp.dtype
) -> Float[Array, "tokens hidden"]:
    """The weighted sum over the chosen experts, in float32."""
    return jnp.einsum("tkh,tk->th", outputs.astype(jnp.float32), expert_weights).astype(dtype)
