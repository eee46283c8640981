"""The training loss: next-token cross entropy without the logits of all tokens, and what a mixture of experts adds."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Float32, Int

from kimi_zoo.layers.moe import MoE
from kimi_zoo.layers.stack import LayerStack
from kimi_zoo.models.kimi_linear import KimiBlock, KimiLinear, apply_layer
from kimi_zoo.models.kimi_linear_partition import over_mesh
from kimi_zoo.ops.moe_dispatch import dropped_pairs, without_padding
from kimi_zoo.ops.packing import segment_positions
from kimi_zoo.parallel.axes import ONE_DEVICE, Axes, Parallelism, as_parallelism
from kimi_zoo.parallel.split import keep_all_but_gathered, whole
from kimi_zoo.training.fused_loss import fused_is_valid, fused_token_losses
from kimi_zoo.training.packing import Batch

LOGITS_AT_ONCE = 1 << 24  # numbers: 64 MB in float32


class Sums(NamedTuple):
    """Sums over the learned tokens of a batch, which add up over batches: divide by `tokens` at the end.

    - `loss`: cross entropy in nats. `z`: squares of the logits' log-sum-exp. `balance`: the balancing loss of every
        mixture of experts, a mean over its layers, times the tokens.
    - `expert_counts`: how many tokens each expert of each layer was given; a stack like the model's layers.
    - `dropped`: (token, expert) pairs for which a device had no room; 0 unless a capacity is set.
    """

    loss: Float32[Array, ""]
    z: Float32[Array, ""]
    balance: Float32[Array, ""]
    tokens: Float32[Array, ""]
    expert_counts: LayerStack
    dropped: Float32[Array, ""]


def token_losses(
    model: KimiLinear,
    hidden: Float[Array, "batch seq hidden_size"],
    targets: Int[Array, "batch seq"],
    axes: Axes = ONE_DEVICE,
) -> tuple[Float32[Array, "batch seq"], Float32[Array, "batch seq"]]:
    """Cross entropy of every token in nats, and the log-sum-exp of its logits.

    As many tokens go through the output head at a time as have 16 million logits together; gradients compute them anew.
    On one TPU, tokamax's fused kernel does it: see `kimi_zoo.training.fused_loss`. Where the vocabulary is split over
    devices, each computes its own part of the logits, and three numbers per token are exchanged.
    """
    model = eqx.tree_at(lambda m: (m.embedding, m.head), model, whole((model.embedding, model.head)), is_leaf=_no_leaf)
    table = model.embedding if model.head is None else model.head
    if axes == ONE_DEVICE and fused_is_valid(model):
        flat = hidden.reshape(-1, hidden.shape[-1])
        losses, totals = fused_token_losses(flat, targets.reshape(-1), table.weight)
        return losses.reshape(targets.shape), totals.reshape(targets.shape)
    axis = model.vocabulary_axis(table.weight, axes)
    first = 0 if axis is None else jax.lax.axis_index(axis) * table.weight.shape[0]

    @jax.checkpoint
    def some(piece: tuple[Array, Array]) -> tuple[Array, Array]:
        hidden, targets = piece
        logits = model.logits(hidden).astype(jnp.float32)
        place = targets - first
        if axis is None:
            total = jax.nn.logsumexp(logits, axis=-1)
            return total - jnp.take_along_axis(logits, place[:, None], axis=1)[:, 0], total
        peak = jax.lax.pmax(jax.lax.stop_gradient(jnp.max(logits, axis=-1)), axis)
        total = peak + jnp.log(jax.lax.psum(jnp.sum(jnp.exp(logits - peak[:, None]), axis=-1), axis))
        wanted = jnp.take_along_axis(logits, place[:, None], axis=1, mode="fill", fill_value=0)[:, 0]
        wanted = jnp.where(place >= 0, wanted, 0.0)  # a negative place would count from the end
        return total - jax.lax.psum(wanted, axis), total

    count = targets.size
    pieces = -(-count // max(1, LOGITS_AT_ONCE // table.weight.shape[0]))
    rows = -(-count // pieces)
    flat = jnp.pad(hidden.reshape(count, -1), ((0, rows * pieces - count), (0, 0)))
    wanted = jnp.pad(targets.reshape(count), (0, rows * pieces - count))
    losses, totals = jax.lax.map(some, (flat.reshape(pieces, rows, -1), wanted.reshape(pieces, rows)))
    return losses.reshape(-1)[:count].reshape(targets.shape), totals.reshape(-1)[:count].reshape(targets.shape)


def batch_sums(
    model: KimiLinear,
    batch: Batch,
    *,
    remat: bool | Callable[..., bool] = False,
    mesh: Parallelism | Mesh | str | None = None,
) -> Sums:
    """The sums of one batch.

    **Arguments:** `remat`: see `LayerStack.scan`; `mesh`: the devices over which model and batch are split.

    **Raises:** `ValueError` for what the mesh cannot split evenly.
    """
    positions = segment_positions(batch.segment_ids)
    mesh = as_parallelism(mesh)
    if mesh is None:
        return _sums(model, batch, positions, ONE_DEVICE, remat=remat)
    run = functools.partial(_sums, remat=remat)
    return over_mesh(run, model, (batch, positions), mesh, PartitionSpec())


def _sums(
    model: KimiLinear,
    batch: Batch,
    positions: Int[Array, "batch seq"],
    axes: Axes,
    *,
    remat: bool | Callable[..., bool],
) -> Sums:
    """The sums over all devices."""
    hidden, balance, counts, dropped = _hidden_states_and_routing(model, batch, positions, axes, remat)
    losses, totals = token_losses(model, hidden, batch.targets, axes)
    weights = batch.weights.astype(jnp.float32)
    loss, z, tokens = (_sum_devices(jnp.sum(x), axes) for x in (losses * weights, totals**2 * weights, weights))
    return Sums(loss, z, balance * tokens, tokens, counts, dropped)


def _hidden_states_and_routing(
    model: KimiLinear,
    batch: Batch,
    positions: Int[Array, "batch seq"],
    axes: Axes,
    remat: bool | Callable[..., bool],
) -> tuple[Float[Array, "batch seq hidden_size"], Float32[Array, ""], LayerStack, Float32[Array, ""]]:
    """As `model.hidden_states`, and how the routers chose.

    **Returns:** hidden states; the balancing loss, averaged over the layers that route: `experts * sum_e f_e p_e` with
    `f_e` the share of choices that expert `e` got and `p_e` its mean normalised score (1 when even); the choices
    counted; and the pairs dropped. Padding does not count.

    **Source:** the balancing loss of Switch Transformers (arXiv:2101.03961, equation 4), with the normalised scores of
    DeepSeek-V3 (arXiv:2412.19437, section 2.1.2).
    """
    real = (batch.segment_ids > 0).reshape(-1).astype(jnp.float32)

    def apply(carry: tuple[Array, ...], block: Any) -> tuple[tuple[Array, ...], Array | None]:
        x, balance, layers, dropped = carry
        block = whole(block)
        options = {"segment_ids": batch.segment_ids, "axes": axes}
        if not isinstance(block, KimiBlock):
            return (apply_layer(block, x, positions=positions, **options), balance, layers, dropped), None
        x = block.mix(x, positions=positions, **options)
        normed = block.post_norm(x)
        counts = None
        if isinstance(block.mlp, MoE):
            counts, uneven, more = _routing(block.mlp, normed.reshape(-1, x.shape[-1]), real, axes)
            balance, layers, dropped = balance + uneven, layers + 1.0, dropped + more
        return (x + block.feed(normed, **options), balance, layers, dropped), counts

    zero = jnp.zeros((), jnp.float32)
    if axes.fsdp and remat is False:
        remat = keep_all_but_gathered
    carry = (model.embed(batch.tokens, axes), zero, zero, zero)
    (x, balance, layers, dropped), counts = model.layers.scan(apply, carry, remat=remat)
    return model.norm(x), balance / jnp.maximum(layers, 1.0), counts, dropped


def _routing(
    moe: MoE, x: Float[Array, "tokens hidden"], real: Float32[Array, " tokens"], axes: Axes
) -> tuple[Array, Array, Array]:
    """The choices per expert, how uneven they are, and how many are dropped."""
    router = moe.router
    expert_ids, _ = router(x)
    experts = router.weight.shape[0]
    chosen = jnp.sum(jax.nn.one_hot(expert_ids, experts, dtype=jnp.float32), axis=1)
    counts = _sum_devices(jax.lax.stop_gradient(real @ chosen), axes)
    logits = jnp.einsum("th,eh->te", x.astype(jnp.float32), router.weight.astype(jnp.float32))
    scores = jax.nn.sigmoid(logits) if router.activation == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    shares = scores / (jnp.sum(scores, axis=-1, keepdims=True) + 1e-20)
    mean = _sum_devices(real @ shares, axes) / jnp.maximum(_sum_devices(jnp.sum(real), axes), 1.0)
    dropped = jnp.zeros((), jnp.float32)
    if axes.expert is not None and axes.expert_capacity is not None:
        devices = jax.lax.axis_size(axes.expert)
        sent = without_padding(expert_ids, real > 0, experts)
        mine = dropped_pairs(sent, experts // devices, devices, axes.expert_capacity)
        dropped = _sum_devices(mine.astype(jnp.float32), axes)
    return counts, experts * jnp.sum(counts / jnp.maximum(jnp.sum(counts), 1.0) * mean), dropped


def _sum_devices(x: Array, axes: Axes) -> Array:
    """The sum over all devices that hold other tokens."""
    return jax.lax.psum(x, axes.tokens) if axes.tokens else x


def _no_leaf(node: Any) -> bool:
    return node is None
