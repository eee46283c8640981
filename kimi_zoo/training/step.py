"""One optax step: gradients of packed batches, added up over the learned tokens, and the update they make."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float32, Int32

from kimi_zoo.checkpoints.tables.kimi_linear import FLOAT32_LEAVES
from kimi_zoo.layers.stack import LayerStack
from kimi_zoo.models.kimi_linear_partition import RULES
from kimi_zoo.parallel.axes import Parallelism, as_parallelism
from kimi_zoo.parallel.partition import place, shardings, shardings_like
from kimi_zoo.training.loss import Sums, batch_sums
from kimi_zoo.training.packing import Batch
from kimi_zoo.training.quantization import Quantized
from kimi_zoo.training.trainable import place_of


class TrainState(eqx.Module):
    """What a step changes: the parameters that train, in float32; the optimizer's state; the number of steps done."""

    trainable: Any
    optimizer: Any
    step: Int32[Array, ""]
    score_biases: Any  # the routers' balancing biases, moved by their own rule; None elsewhere


class Metrics(NamedTuple):
    """What a step tells: mean loss in nats per learned token, gradient norm before clipping, and whether both are
    finite. If not, the step changed nothing."""

    loss: Float32[Array, ""]
    tokens: Float32[Array, ""]
    gradient_norm: Float32[Array, ""]
    balance: Float32[Array, ""]
    most_loaded: Float32[Array, ""]
    dropped: Float32[Array, ""]  # (token, expert) pairs without room; 0 unless a capacity is set
    finite: Bool[Array, ""]


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """What is computed in a step.

    - `compute_dtype`: of activations, and of the weights they meet; parameters and sums stay in float32.
    - `remat`: see `LayerStack.scan`. `clip`: the largest norm of a gradient; 0 for any.
    - `z_loss`, `balance_loss`: weights of the mean squared log-sum-exp, and of the balancing loss.
    - `bias_rate`: by how much the balancing bias moves per step towards an even load; 0 leaves it alone.
    - `mesh`: the devices over which parameters and rows are spread.
    """

    compute_dtype: str = "float32"
    remat: bool | Callable[..., bool] = False
    clip: float = 1.0
    z_loss: float = 0.0
    balance_loss: float = 0.0
    bias_rate: float = 0.0
    mesh: Parallelism | Mesh | str | None = None

    def __post_init__(self):
        object.__setattr__(self, "mesh", as_parallelism(self.mesh))


def start(
    model: Any, trains: Any, optimizer: optax.GradientTransformation, mesh: Parallelism | Mesh | str | None = None
) -> tuple[TrainState, Any]:
    """The state before the first step, and the frozen rest of the model.

    **Arguments:**

    - `trains`: a tree like the model that says of every leaf whether it trains.
    - `mesh`: the devices to spread both over, the optimizer's state like the parameters.
    """
    biases = jax.tree_util.tree_map_with_path(lambda path, _: place_of(path)[2].endswith("score_bias"), model)
    trainable, rest = eqx.partition(model, trains)
    score_biases, frozen = eqx.partition(rest, biases)

    # a copy: the step reuses the memory of what it is given
    def begin(trainable: Any, score_biases: Any) -> TrainState:
        trainable = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32, copy=True), trainable)
        score_biases = jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), score_biases)
        with jax.numpy_dtype_promotion("standard"):  # optax counts in integers
            return TrainState(trainable, optimizer.init(trainable), jnp.zeros((), jnp.int32), score_biases)

    mesh = as_parallelism(mesh)
    if mesh is None:
        return begin(trainable, score_biases), frozen
    trainable, score_biases, frozen = place((trainable, score_biases, frozen), mesh, RULES)
    shapes = eqx.filter_eval_shape(begin, trainable, score_biases)
    return jax.jit(begin, out_shardings=state_shardings(shapes, mesh))(trainable, score_biases), frozen


def state_shardings(state: TrainState, mesh: Parallelism) -> Any:
    """How a state is spread over a mesh: a sharding in the place of every array."""
    parts = (
        shardings(state.trainable, mesh, RULES),
        shardings_like(state.optimizer, state.trainable, mesh, RULES),
        NamedSharding(mesh.mesh, PartitionSpec()),
        shardings(state.score_biases, mesh, RULES),
    )
    where = lambda s: (s.trainable, s.optimizer, s.step, s.score_biases)
    return eqx.tree_at(where, state, parts)


def joined(state: TrainState, frozen: Any) -> Any:
    """The model as it is in this state."""
    return eqx.combine(state.trainable, state.score_biases, frozen)


def as_computed(model: Any, dtype: Any) -> Any:
    """The model with its weights in the dtype of the computation; what decides decays and routes stays float32."""
    cast = lambda path, leaf: (
        leaf.astype(dtype) if eqx.is_inexact_array(leaf) and place_of(path)[2] not in FLOAT32_LEAVES else leaf
    )
    is_quantized = lambda node: isinstance(node, Quantized)  # dequantised in float32, and rounded once
    return jax.tree_util.tree_map_with_path(cast, model, is_leaf=is_quantized)


def gradients(trainable: Any, rest: Any, batch: Batch, options: StepOptions) -> tuple[Sums, Any]:
    """Sums over all batches of an accumulation, `[accumulate, rows, seq]`, and the gradient of the mean loss.

    Every token weighs the same, in whichever batch it is: sums are added up first and divided once.
    """
    remat = options.remat

    def objective(trainable: Any, batch: Batch) -> tuple[Float32[Array, ""], Sums]:
        model = as_computed(eqx.combine(trainable, rest), jnp.dtype(options.compute_dtype))
        sums = batch_sums(model, batch, remat=remat, mesh=options.mesh)
        return sums.loss + options.z_loss * sums.z + options.balance_loss * sums.balance, sums

    def add(total: tuple[Sums, Any], batch: Batch) -> tuple[tuple[Sums, Any], None]:
        gradient, sums = jax.grad(objective, has_aux=True)(trainable, batch)
        return jax.tree.map(jnp.add, total, (sums, gradient)), None

    first = Batch(*(part[0] for part in batch))
    shapes = jax.eval_shape(lambda: jax.grad(objective, has_aux=True)(trainable, first))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), (shapes[1], shapes[0]))
    if batch.tokens.shape[0] == 1:
        (sums, gradient), _ = add(zeros, first)
    else:
        (sums, gradient), _ = jax.lax.scan(add, zeros, batch)
    tokens = jnp.maximum(sums.tokens, 1.0)
    return sums, jax.tree.map(lambda leaf: leaf / tokens, gradient)


@eqx.filter_jit(donate="all-except-first")
def train_step(
    inputs: tuple[Any, Batch, optax.GradientTransformation, StepOptions], state: TrainState
) -> tuple[TrainState, Metrics]:
    """One step. `inputs` are the frozen part of the model, a batch `[accumulate, rows, seq]`, the optimizer and the
    options; the state's memory is reused."""
    frozen, batch, optimizer, options = inputs
    batch = Batch(*map(jnp.asarray, batch))
    sums, gradient = gradients(state.trainable, eqx.combine(state.score_biases, frozen), batch, options)
    with jax.numpy_dtype_promotion("standard"):  # optax counts in integers
        norm = optax.tree.norm(gradient)
        if options.clip:
            gradient = jax.tree.map(lambda leaf: leaf * jnp.minimum(1.0, options.clip / (norm + 1e-12)), gradient)
        updates, optimizer_state = optimizer.update(gradient, state.optimizer, state.trainable)
    loss = sums.loss / jnp.maximum(sums.tokens, 1.0)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    biases = balanced(state.score_biases, sums.expert_counts, options.bias_rate)
    new = TrainState(eqx.apply_updates(state.trainable, updates), optimizer_state, state.step + 1, biases)
    state = jax.tree.map(lambda new, old: jnp.where(finite, new, old) if eqx.is_array(new) else new, new, state)
    if isinstance(options.mesh, Parallelism):
        state = jax.lax.with_sharding_constraint(state, state_shardings(state, options.mesh))
    over = lambda counts: jnp.max(counts / jnp.maximum(jnp.mean(counts, -1, keepdims=True), 1.0))
    loads = [over(counts) for counts in jax.tree.leaves(sums.expert_counts)]
    most = jnp.max(jnp.stack(loads)) if loads else jnp.ones(())
    balance = sums.balance / jnp.maximum(sums.tokens, 1.0)
    return state, Metrics(loss, sums.tokens, norm, balance, most, sums.dropped, finite)


def balanced(score_biases: Any, counts: LayerStack, rate: float) -> Any:
    """Biases moved by `rate` up where an expert got less than its share of tokens, down where more, with mean 0.

    **Source:** DeepSeek-V3 (arXiv:2412.19437), section 2.1.2, balancing without an auxiliary loss.
    """
    if not rate:
        return score_biases
    sections = []
    for unit, unit_counts in zip(score_biases.layers.sections, counts.sections, strict=True):
        blocks = []
        for block, count in zip(unit, unit_counts, strict=True):
            if count is not None:
                move = rate * jnp.sign(jnp.mean(count, -1, keepdims=True) - count)
                move = move - jnp.mean(move, -1, keepdims=True)
                block = eqx.tree_at(lambda b: b.mlp.router.score_bias, block, block.mlp.router.score_bias + move)
            blocks.append(block)
        sections.append(tuple(blocks))
    return eqx.tree_at(lambda m: m.layers.sections, score_biases, tuple(sections))
