"""What the tests of meshes share: a tiny model that every axis can split, packed batches, and the comparison."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from helpers import assert_close, tiny

import kimi_zoo as kz
from kimi_zoo.models.kimi_linear_partition import RULES
from kimi_zoo.parallel.axes import Parallelism, make_mesh
from kimi_zoo.parallel.partition import place
from kimi_zoo.parallel.processes import spread_tokens
from kimi_zoo.training.loss import batch_sums
from kimi_zoo.training.packing import Batch
from kimi_zoo.training.step import StepOptions, joined, start, train_step
from kimi_zoo.training.trainable import decays, select, trains

# 8 of everything that an axis splits; other sizes differ from one another
CONFIG = tiny(
    layer_kinds=("kda", "kda", "mla"),
    mlp_kinds=("moe", "moe", "dense"),
    vocab_size=72,
    hidden_size=24,
    intermediate_size=40,
    linear_num_heads=8,
    linear_head_dim=6,
    num_attention_heads=8,
    num_experts=8,
    num_experts_per_token=3,
    moe_intermediate_size=16,
)
# forward and backward through three layers in float32, sums over devices taken in another order: up to 5e-5 was seen;
# what is left out or counted twice changes a gradient by more than a hundredth
TOLERANCE = 1e-4


def packed_batch():
    """Eight rows of 16 tokens: padding, one document, several that begin where 2, 4 and 8 devices are parted or not."""
    rows = [runs(9, 5, padding=2), runs(16), runs(3, 3, 4, 6), runs(8, 8), runs(7, 2, 7), runs(1, 6, padding=9)]
    return batch_of_segments(np.stack([*rows, np.roll(runs(4, 6, padding=6), 4), runs(2, 2, 12)]))


def model_of(config=CONFIG, seed=0):
    model = kz.KimiLinear(config, key=jr.key(seed))
    # a balancing bias that matters, and norms that are not all one
    move = lambda leaf: leaf + 0.1 * jr.normal(jr.key(leaf.size), leaf.shape) if leaf.ndim <= 2 else leaf
    return jax.tree.map(move, model)


def parallelism_of(sizes: dict, **names) -> Parallelism:
    count = int(np.prod(list(sizes.values())))
    return Parallelism(make_mesh(sizes, jax.devices()[:count]), **names)


def batch_of_segments(rows, vocab=CONFIG.vocab_size, seed=3) -> Batch:
    """A batch from segment ids `[rows, seq]`; the last token of each document is not learned."""
    ids = np.asarray(rows, np.int32)
    random = np.random.default_rng(seed)
    tokens = np.where(ids > 0, random.integers(1, vocab, ids.shape), 0).astype(np.int32)
    same = np.pad(ids[:, 1:] == ids[:, :-1], ((0, 0), (0, 1))) & (ids > 0)
    targets = np.where(same, np.roll(tokens, -1, 1), 0).astype(np.int32)
    return Batch(*map(jnp.asarray, (tokens, targets, same.astype(np.float32), ids)))


def runs(*lengths, padding=0):
    """Segment ids 1, 2, ... of these lengths, and padding behind them."""
    return np.concatenate([np.full(n, i + 1) for i, n in enumerate(lengths)] + [np.zeros(padding, int)])


def compiled_loss_and_gradients(model, batch, mesh=None, **options):
    """A program from model and batch to the loss, its parts, and its gradient for every parameter."""

    def run(model, batch):
        def objective(model):
            sums = batch_sums(model, batch, mesh=mesh, **options)
            return (sums.loss + 0.01 * sums.z + 0.1 * sums.balance) / sums.tokens, sums

        (loss, sums), gradient = eqx.filter_value_and_grad(objective, has_aux=True)(model)
        return loss, sums, gradient

    return eqx.filter_jit(run).lower(model, batch).compile()


def loss_and_gradients(model, batch, mesh=None, **options):
    return compiled_loss_and_gradients(model, batch, mesh, **options)(model, batch)


def collectives(program) -> dict[str, list[str]]:
    """The collectives of a compiled program, and the shapes of what they give."""
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    found: dict[str, list[str]] = {}
    for shape, kind in re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", program.compiled.as_text()):
        found.setdefault(kind, []).append(shape)
    return found


def assert_same_on_mesh(model, batch, parallelism, expected=None, **options):
    loss, sums, gradient = expected or loss_and_gradients(model, batch)
    placed = place(model, parallelism, RULES)
    program = compiled_loss_and_gradients(placed, batch, parallelism, **options)
    got_loss, got_sums, got_gradient = program(placed, batch)
    assert_close(got_loss, loss, rtol=TOLERANCE, name="loss")
    assert_close(got_sums, sums, rtol=TOLERANCE, name="sums")
    for (path, want), got in zip(
        jax.tree_util.tree_leaves_with_path(gradient), jax.tree.leaves(got_gradient), strict=True
    ):
        assert_close(got, want, rtol=TOLERANCE, atol=1e-7, name=jax.tree_util.keystr(path))
    return program


def steps_of(model, batches, mesh=None, **options):
    """Losses of AdamW steps, and the model behind them."""
    wanted = select(model)
    optimizer = optax.adamw(1e-2, mask=decays)
    step_options = StepOptions(mesh=mesh, balance_loss=0.01, bias_rate=0.001, **options)
    state, frozen = start(model, trains(wanted), optimizer, mesh)
    losses = []
    for batch in batches:
        batch = spread_tokens(Batch(*(np.asarray(part)[None] for part in batch)), mesh, leading=1)
        state, metrics = train_step((frozen, batch, optimizer, step_options), state)
        losses.append(float(metrics.loss))
    return losses, state, joined(state, frozen)
