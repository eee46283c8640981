"""Losses and steps: exact where they must be exact, and what a step leaves alone."""

import contextlib
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
import tokamax
from helpers import DATA, TINY, assert_close, tiny
from jax.experimental.pallas import tpu as pltpu
from safetensors.numpy import load_file

import kimi_zoo as kz
from kimi_zoo.training import loss as loss_module
from kimi_zoo.training.fused_loss import fused_is_valid, fused_token_losses
from kimi_zoo.training.loss import batch_sums, token_losses
from kimi_zoo.training.optimizers import OPTIMIZERS, learning_rate, make_optimizer, masked_updates
from kimi_zoo.training.packing import Batch
from kimi_zoo.training.step import StepOptions, gradients, joined, start, train_step
from kimi_zoo.training.trainable import select, summary, trains


def batch_of(*documents, rows=None):
    """Documents packed into one row each list; `[1, rows, seq]`."""
    rows = [list(group) for group in documents]
    length = max(sum(map(len, group)) for group in rows) + 2
    parts = [np.zeros((len(rows), length), kind) for kind in (np.int32, np.int32, np.float32, np.int32)]
    batch = Batch(*parts)
    for row, group in enumerate(rows):
        at = 0
        for segment, tokens in enumerate(group, start=1):
            end = at + len(tokens)
            batch.tokens[row, at:end], batch.segment_ids[row, at:end] = tokens, segment
            batch.targets[row, at : end - 1], batch.weights[row, at : end - 1] = tokens[1:], 1
            at = end
    return Batch(*(part[None] for part in batch))


def documents(key, *lengths):
    return [
        jr.randint(k, (n,), 1, TINY.vocab_size).tolist()
        for k, n in zip(jr.split(key, len(lengths)), lengths, strict=True)
    ]


def flat(batch):
    return Batch(*(jnp.asarray(part[0]) for part in batch))


@pytest.fixture(scope="module")
def model():
    return kz.KimiLinear(TINY, key=jr.key(2))


def test_losses_in_pieces_are_those_of_all_logits(model, getkey, monkeypatch):
    tokens, targets = jr.randint(getkey(), (2, 2, 7), 0, TINY.vocab_size)
    whole = jax.nn.log_softmax(model(tokens))
    expected = -jnp.take_along_axis(whole, targets[..., None], axis=-1)[..., 0]
    for at_once in (1 << 24, 3 * TINY.vocab_size, 1):  # one piece, uneven ones, one token at a time
        monkeypatch.setattr(loss_module, "LOGITS_AT_ONCE", at_once)
        losses, totals = token_losses(model, model.hidden_states(tokens), targets)
        assert_close(losses, expected, atol=2e-6)
        assert_close(totals, jax.nn.logsumexp(model(tokens), -1), atol=2e-6)


def on_a_tpu():
    """As if there were one: tokamax asks for its sizes when it is traced."""
    stack = contextlib.ExitStack()
    device = jax.sharding.AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
    stack.enter_context(jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)))
    stack.enter_context(tokamax.config.cross_compile(True))
    stack.enter_context(jax.numpy_dtype_promotion("standard"))
    return stack


def test_fused_losses_are_those_in_pieces(getkey):
    """The kernel interpreted, gradients of losses and of log-sum-exps too; sizes are whole blocks of it."""
    wide = kz.KimiLinear(
        tiny(layer_kinds=("kda",), mlp_kinds=("dense",), hidden_size=128, vocab_size=256), key=getkey()
    )
    hidden, targets = jr.normal(getkey(), (1, 1024, 128)), jr.randint(getkey(), (1, 1024), 0, 256)
    cotangents = tuple(jr.normal(getkey(), (2, 1, 1024)))
    weight = wide.embedding.weight if wide.head is None else wide.head.weight

    def pieces(hidden, weight):
        model = eqx.tree_at(lambda m: (m.embedding if m.head is None else m.head).weight, wide, weight)
        return token_losses(model, hidden, targets)

    def fused(hidden, weight):
        losses, totals = fused_token_losses(hidden[0], targets[0], weight)
        return losses[None], totals[None]

    expected, pull_expected = jax.vjp(pieces, hidden, weight)
    with on_a_tpu(), pltpu.force_tpu_interpret_mode():
        actual, pull = jax.vjp(fused, hidden, weight)
        gradients = pull(cotangents)
    assert_close(actual, expected, atol=5e-6)
    assert_close(gradients, pull_expected(cotangents), rtol=1e-5)


def test_the_fused_kernel_is_lowered_for_tpus_alone(model, monkeypatch, getkey):
    """For any number of tokens and classes; it is chosen where one TPU is all there is."""
    assert not fused_is_valid(model)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    with on_a_tpu():
        assert fused_is_valid(model)
        loss = lambda hidden, targets: sum(map(jnp.sum, token_losses(model, hidden, targets)))
        shapes = jax.ShapeDtypeStruct((2, 7, TINY.hidden_size), jnp.float32), jax.ShapeDtypeStruct((2, 7), jnp.int32)
        lowered = jax.jit(jax.grad(loss)).trace(*shapes).lower(lowering_platforms=("tpu",)).as_text()
    assert lowered.count("tpu_custom_call") >= 2  # forward, and its derivative
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    with on_a_tpu():
        assert not fused_is_valid(model)


def test_packed_documents_give_the_losses_of_separate_ones(model, getkey):
    one, two, three = documents(getkey(), 5, 7, 3)
    sums = lambda batch: eqx.filter_jit(batch_sums)(model, flat(batch))
    packed, apart = sums(batch_of([one, two], [three])), [sums(batch_of([d])) for d in (one, two, three)]
    assert_close(packed.loss, sum(s.loss for s in apart), rtol=1e-6)
    assert float(packed.tokens) == 12 == sum(float(s.tokens) for s in apart)
    total = lambda counts: sum(np.asarray(leaf).sum() for leaf in jax.tree.leaves(counts))
    assert total(packed.expert_counts) == 15 * 3 * TINY.num_experts_per_token  # pads route nowhere that counts


def test_accumulation_is_the_large_batch(model, getkey):
    """Tokens weigh the same, so batches of different lengths need weights: a mean of means would differ."""
    rows = [[d] for d in documents(getkey(), 9, 3, 6, 2)]
    large = batch_of(*rows)
    small = Batch(*(part.reshape(2, 2, -1) for part in large))
    trainable, rest = eqx.partition(model, trains(select(model)))
    run = eqx.filter_jit(lambda batch: gradients(trainable, rest, Batch(*map(jnp.asarray, batch)), StepOptions()))
    (sums, gradient), (expected_sums, expected) = run(small), run(large)
    assert_close(sums.loss, expected_sums.loss, rtol=1e-6)
    assert_close(gradient, expected, rtol=2e-5)
    case = json.loads((DATA / "field_cases" / "grad_accum.json").read_text())
    weights = [batch["tokens"] for batch in case["micro_batches"]]
    loss = sum(w * batch["mean_loss"] for w, batch in zip(weights, case["micro_batches"], strict=True)) / sum(weights)
    assert abs(loss - case["expected_loss"]) < 1e-6  # the rule that `gradients` follows


@pytest.mark.parametrize("remat", [True, jax.checkpoint_policies.dots_with_no_batch_dims_saveable])
def test_rematerialising_changes_nothing(remat, getkey):
    model = kz.KimiLinear(
        tiny(layer_kinds=("kda",) * 6, mlp_kinds=("dense",) + ("moe",) * 5), key=getkey()
    )  # five equal layers: two groups of two, and one
    batch = batch_of(*[[d] for d in documents(getkey(), 9, 3)])
    trainable, rest = eqx.partition(model, trains(select(model)))
    run = lambda remat: eqx.filter_jit(gradients)(
        trainable, rest, Batch(*map(jnp.asarray, batch)), StepOptions(remat=remat)
    )
    assert_close(run(remat), run(False), rtol=1e-4)  # sums in another order: 3e-5 measured


def test_memory_with_remat_grows_slower_than_depth():
    """Carries kept for the gradient, beside the gradients themselves, which are as large as the parameters."""

    def kept(layers, remat):
        small = tiny(layer_kinds=("mla",) * layers, mlp_kinds=("dense",) * layers, intermediate_size=8)
        model = eqx.filter_eval_shape(lambda: kz.KimiLinear(small, key=jr.key(0)))
        arrays, static = eqx.partition(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
        kinds = (jnp.int32, jnp.int32, jnp.float32, jnp.int32)
        batch = Batch(*(jax.ShapeDtypeStruct((1, 4, 64), kind) for kind in kinds))
        run = lambda arrays, batch: gradients(arrays, static, batch, StepOptions(remat=remat))[1]
        memory = jax.jit(run).lower(arrays, batch).compile().memory_analysis()
        return memory.temp_size_in_bytes - sum(4 * leaf.size for leaf in jax.tree.leaves(arrays))

    carry = 4 * 64 * TINY.hidden_size * 4
    assert kept(64, True) - kept(4, True) < 2 * 8 * carry + 2 * carry  # 8 groups, and 8 layers of one of them
    assert kept(64, False) > 2 * kept(64, True)


def test_five_steps_of_the_goldens():
    folder = DATA / "goldens" / "kimi_linear_tiny"
    golden = load_file(folder / "golden.safetensors")
    tolerance = json.loads((folder / "golden.json").read_text())["tolerance"]
    model = kz.from_pretrained(folder, dtype="float32")
    tokens = np.asarray(golden["short.input_ids"])
    wanted = select(model)
    optimizer = make_optimizer("adamw", 1e-3, weight_decay=0.1)
    state, frozen = start(model, trains(wanted), optimizer)
    rows, length = tokens.shape
    targets = np.concatenate([tokens[:, 1:], np.zeros((rows, 1), tokens.dtype)], 1)
    weights = np.ones((rows, length), np.float32)
    weights[:, -1] = 0
    batch = Batch(
        tokens[None].astype(np.int32),
        targets[None].astype(np.int32),
        weights[None],
        np.ones((1, rows, length), np.int32),
    )
    losses = []
    for _ in range(6):
        state, metrics = train_step((frozen, batch, optimizer, StepOptions(clip=0.0)), state)
        losses.append(metrics.loss)
    assert_close(jnp.stack(losses), golden["adamw.losses"], atol=tolerance["adamw_loss_atol"], name="losses")
    before, after = kz.to_tensors(model), kz.to_tensors(joined(state, frozen))
    for name, value in before.items():  # the balancing bias takes no gradient and no decay
        assert name.endswith("e_score_correction_bias") == bool(np.array_equal(value, after[name])), name
    assert int(state.step) == 6


def test_what_is_frozen_stays_to_the_bit_and_single_layers_can_be(model, getkey):
    wanted = select(model, freeze=("model.layers.1.*", "A_log", "*norm.weight"))
    with pytest.raises(ValueError, match="'xyz' fits no parameter"):
        select(model, freeze=("xyz",))
    optimizer = optax.chain(
        make_optimizer("adamw", 1e-2, weight_decay=0.1),
        masked_updates(jax.tree.map(lambda choice: choice if np.any(choice) else None, wanted)),
    )
    state, frozen = start(model, trains(wanted), optimizer)
    batch = batch_of(*[[d] for d in documents(getkey(), 9, 9)])
    for _ in range(2):
        state, _ = train_step((frozen, batch, optimizer, StepOptions()), state)
    before, after = kz.to_tensors(model), kz.to_tensors(joined(state, frozen))
    for name in before:
        fixed = ".layers.1." in name or name.endswith(("A_log", "norm.weight", "correction_bias"))
        assert bool(np.array_equal(before[name], after[name])) == fixed, name
    rows = {name: (total, training) for name, total, training in summary(model, wanted)}
    assert rows["mixer.a_log"][1] == 0 and 0 < rows["mlp.router.weight"][1] < rows["mlp.router.weight"][0]


def test_a_step_that_is_not_finite_changes_nothing(model, getkey):
    broken = eqx.tree_at(lambda m: m.norm.weight, model, model.norm.weight.at[0].set(jnp.nan))
    optimizer = make_optimizer("adamw", 1e-2)
    state, frozen = start(broken, trains(select(broken)), optimizer)
    batch = batch_of(*[[d] for d in documents(getkey(), 5)])
    new, metrics = train_step((frozen, batch, optimizer, StepOptions()), state)
    assert not bool(metrics.finite) and int(new.step) == 0
    kept = eqx.tree_equal(joined(new, frozen).embedding, broken.embedding)
    assert bool(kept)


def test_balancing_bias_moves_towards_an_even_load_with_mean_zero(model, getkey):
    optimizer = make_optimizer("sgd", 0.0)
    state, frozen = start(model, trains(select(model)), optimizer)
    batch = batch_of(*[[d] for d in documents(getkey(), 30, 30)])
    counts = eqx.filter_jit(batch_sums)(model, flat(batch)).expert_counts
    state, _ = train_step((frozen, batch, optimizer, StepOptions(bias_rate=0.1)), state)
    moved = joined(state, frozen)
    for layer in (1, 2, 3):
        section, position, repeat = model.layers.locate(layer)
        count = np.asarray(counts.sections[section][position][repeat])
        bias = np.asarray(moved.layers[layer].mlp.router.score_bias)
        assert abs(bias.mean()) < 1e-6
        assert bias[count > count.mean()].max(initial=-1) < bias[count < count.mean()].min(initial=1)


@jax.numpy_dtype_promotion("standard")
def test_every_optimizer_lowers_the_loss(getkey):
    """On one block: the rest of the model is the same for all."""
    model = kz.KimiLinear(tiny(layer_kinds=("kda",), mlp_kinds=("dense",)), key=getkey())
    batch = batch_of(*[[d] for d in documents(getkey(), 9, 9)])
    for name in OPTIMIZERS:
        rate = {"sgd": 0.03, "lion": 1e-3}.get(name, 1e-2)
        optimizer = make_optimizer(name, rate, weight_decay=0.01)
        state, frozen = start(model, trains(select(model)), optimizer)
        losses = []
        for _ in range(4):
            state, metrics = train_step((frozen, batch, optimizer, StepOptions()), state)
            losses.append(float(metrics.loss))
        assert losses[-1] < losses[0], (name, losses)


def test_schedules():
    for schedule, end in (("cosine", 0.0), ("linear", 0.0), ("constant", 1.0)):
        rate = learning_rate(1.0, 10, warmup=2, schedule=schedule)
        assert 0 < float(rate(0)) < float(rate(1)) < float(rate(2)) == 1.0
        assert abs(float(rate(10)) - end) < 1e-6
    with pytest.raises(ValueError, match="does not fit"):
        learning_rate(1.0, 3, warmup=4)
    with pytest.raises(ValueError, match="one of adamw"):
        make_optimizer("adam", 1.0)


def test_bfloat16_computation_keeps_float32_parameters(model, getkey):
    optimizer = make_optimizer("adamw", 1e-3)
    state, frozen = start(model, trains(select(model)), optimizer)
    batch = batch_of(*[[d] for d in documents(getkey(), 9, 9)])
    expected = eqx.filter_jit(batch_sums)(model, flat(batch))
    state, metrics = train_step((frozen, batch, optimizer, StepOptions(compute_dtype="bfloat16")), state)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.trainable)} == {jnp.dtype("float32")}
    assert_close(
        metrics.loss, expected.loss / expected.tokens, rtol=3e-2
    )  # bfloat16 rounds by up to 0.4 percent, at weights of this size many times over


def test_bfloat16_ends_where_float32_does(getkey):
    """Within one percent, as 43 steps of the bundled model do (3.0036 and 3.0020 nats)."""
    model = kz.KimiLinear(tiny(layer_kinds=("kda",), mlp_kinds=("moe",)), key=getkey())
    batch = batch_of(*[[d] for d in documents(getkey(), 12, 12, 12)])
    optimizer = make_optimizer("adamw", 3e-3)
    ends = {}
    for dtype in ("float32", "bfloat16"):
        state, frozen = start(model, trains(select(model)), optimizer)
        losses = []
        for _ in range(30):
            state, metrics = train_step((frozen, batch, optimizer, StepOptions(compute_dtype=dtype)), state)
            losses.append(float(metrics.loss))
        assert losses[-1] < 0.8 * losses[0]
        ends[dtype] = losses[-1]
    assert abs(ends["bfloat16"] / ends["float32"] - 1) < 0.01, ends


def test_public_names():
    """`kimi_zoo.training` has what the guide uses."""
    assert kz.training.train_step is train_step and "training" in kz.__all__
