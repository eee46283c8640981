"""The training loss: next-token cross entropy without the logits of all tokens, and what a mixture of experts adds."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from kimi_zoo.layers.moe import MoE
from kimi_zoo.layers.stack import LayerStack
from kimi_zoo.models.kimi_linear import KimiLinear
from kimi_zoo.ops.packing import segment_positions
from kimi_zoo.training.fused_loss import fused_is_valid, fused_token_losses
from kimi_zoo.training.packing import Batch

LOGITS_AT_ONCE = 1 << 24  # numbers: 64 MB in float32


class Sums(NamedTuple):
    """Sums over the learned tokens of a batch, which add up over batches: divide by `tokens` at the end.

    - `loss`: cross entropy in nats. `z`: squares of the logits' log-sum-exp. `balance`: the balancing loss of every
        mixture of experts, a mean over its layers, times the tokens.
    - `expert_counts`: how many tokens each expert of each layer was given; a stack like the model's layers.
    """

    loss: Float32[Array, ""]
    z: Float32[Array, ""]
    balance: Float32[Array, ""]
    tokens: Float32[Array, ""]
    expert_counts: LayerStack


def token_losses(
    model: KimiLinear,
    hidden: Float[Array, "batch seq hidden_size"],
    targets: Int[Array, "batch seq"],
) -> tuple[Float32[Array, "batch seq"], Float32[Array, "batch seq"]]:
    """Cross entropy of every token in nats, and the log-sum-exp of its logits.

    As many tokens go through the output head at a time as have 16 million logits together; gradients compute them anew.
    On one TPU, tokamax's fused kernel does it: see `kimi_zoo.training.fused_loss`.
    """
    if fused_is_valid(model):
        weight = model.embedding.weight if model.head is None else model.head.weight
        flat = hidden.reshape(-1, hidden.shape[-1])
        losses, totals = fused_token_losses(flat, targets.reshape(-1), weight)
        return losses.reshape(targets.shape), totals.reshape(targets.shape)

    @jax.checkpoint
    def some(piece: tuple[Array, Array]) -> tuple[Array, Array]:
        hidden, targets = piece
        logits = model.logits(hidden).astype(jnp.float32)
        total = jax.nn.logsumexp(logits, axis=-1)
        return total - jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0], total

    count = targets.size
    pieces = -(-count // max(1, LOGITS_AT_ONCE // model.config.vocab_size))
    rows = -(-count // pieces)
    flat = jnp.pad(hidden.reshape(count, -1), ((0, rows * pieces - count), (0, 0)))
    wanted = jnp.pad(targets.reshape(count), (0, rows * pieces - count))
    losses, totals = jax.lax.map(some, (flat.reshape(pieces, rows, -1), wanted.reshape(pieces, rows)))
    return losses.reshape(-1)[:count].reshape(targets.shape), totals.reshape(-1)[:count].reshape(targets.shape)


def batch_sums(model: KimiLinear, batch: Batch, *, remat: bool | Callable[..., bool] = False) -> Sums:
    """The sums of one batch. See `Sums`; `remat`: see `LayerStack.scan`."""
    hidden, balance, counts = hidden_states_and_routing(model, batch.tokens, batch.segment_ids, remat=remat)
    losses, totals = token_losses(model, hidden, batch.targets)
    weights = batch.weights.astype(jnp.float32)
    tokens = jnp.sum(weights)
    return Sums(jnp.sum(losses * weights), jnp.sum(totals**2 * weights), balance * tokens, tokens, counts)


def hidden_states_and_routing(
    model: KimiLinear,
    tokens: Int[Array, "batch seq"],
    segment_ids: Int[Array, "batch seq"],
    *,
    remat: bool | Callable[..., bool] = False,
) -> tuple[Float[Array, "batch seq hidden_size"], Float32[Array, ""], LayerStack]:
    """As `model.hidden_states`, and how the routers chose.

    **Returns:** hidden states; the balancing loss, averaged over the layers that route: `experts * sum_e f_e p_e` with
    `f_e` the share of choices that expert `e` got and `p_e` its mean normalised score (1 when even); and the choices
    counted. Padding does not count.

    **Source:** the balancing loss of Switch Transformers (arXiv:2101.03961, equation 4), with the normalised scores of
    DeepSeek-V3 (arXiv:2412.19437, section 2.1.2).
    """
    positions = segment_positions(segment_ids)
    real = (segment_ids > 0).reshape(-1).astype(jnp.float32)

    def apply(carry: tuple[Array, Array, Array], block: Any) -> tuple[tuple[Array, Array, Array], Array | None]:
        x, balance, layers = carry
        x = block.mix(x, positions=positions, segment_ids=segment_ids)
        normed = block.post_norm(x)
        counts = None
        if isinstance(block.mlp, MoE):
            counts, uneven = _routing(block.mlp.router, normed.reshape(-1, x.shape[-1]), real)
            balance, layers = balance + uneven, layers + 1.0
        return (x + block.mlp(normed), balance, layers), counts

    zero = jnp.zeros((), jnp.float32)
    (x, balance, layers), counts = model.layers.scan(apply, (model.embedding(tokens), zero, zero), remat=remat)
    return model.norm(x), balance / jnp.maximum(layers, 1.0), counts


def _routing(router: Any, x: Float[Array, "tokens hidden"], real: Float32[Array, " tokens"]) -> tuple[Array, Array]:
    """The choices per expert, and how uneven they are."""
    expert_ids, _ = router(x)
    experts = router.weight.shape[0]
    chosen = jnp.sum(jax.nn.one_hot(expert_ids, experts, dtype=jnp.float32), axis=1)
    counts = jax.lax.stop_gradient(real @ chosen)
    logits = jnp.einsum("th,eh->te", x.astype(jnp.float32), router.weight.astype(jnp.float32))
    scores = jax.nn.sigmoid(logits) if router.activation == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    shares = scores / (jnp.sum(scores, axis=-1, keepdims=True) + 1e-20)
    mean = real @ shares / jnp.maximum(jnp.sum(real), 1.0)
    return counts, experts * jnp.sum(counts / jnp.maximum(jnp.sum(counts), 1.0) * mean)
