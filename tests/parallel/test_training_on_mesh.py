"""Steps, checkpoints and folders on a mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers import assert_close
from jax.sharding import AxisType
from mesh_cases import (
    CONFIG,
    TOLERANCE,
    batch_of_segments,
    compiled_loss_and_gradients,
    model_of,
    packed_batch,
    parallelism_of,
    runs,
    steps_of,
)

import kimi_zoo as kz
from kimi_zoo.models.kimi_linear_partition import RULES
from kimi_zoo.parallel.partition import place
from kimi_zoo.training.checkpoints import RunCheckpoints
from kimi_zoo.training.lora import add_lora, lora_leaves
from kimi_zoo.training.step import StepOptions, start, train_step


@pytest.fixture(scope="module")
def model():
    return model_of()


@pytest.fixture(scope="module")
def expected(model):
    return steps_of(model, [packed_batch()] * 5)


@pytest.mark.parametrize(
    "sizes", [{"fsdp": 4, "context": 2}, {"data": 2, "expert": 2, "tensor": 2}, {"context": 2, "heads": 2, "fsdp": 2}]
)
def test_five_steps_agree(model, expected, sizes):
    losses, _, after = steps_of(model, [packed_batch()] * 5, parallelism_of(sizes))
    assert_close(losses, expected[0], rtol=1e-4)
    # Adam divides by a gradient's own size: where that is near 0, rounding decides the direction of a step of 1e-2
    for got, want in zip(jax.tree.leaves(after), jax.tree.leaves(expected[2]), strict=True):
        assert np.quantile(np.abs(np.asarray(got) - np.asarray(want)), 0.99) < 1e-3


def test_state_falls_as_the_number_of_devices(model):
    bytes_of = lambda tree: sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))
    wide = model_of(dataclasses.replace(CONFIG, hidden_size=128, moe_intermediate_size=128))
    whole = bytes_of(steps_of(wide, [])[1])
    for size in (2, 4, 8):
        part = bytes_of(steps_of(wide, [], parallelism_of({"fsdp": size}))[1])
        assert part < 1.15 * whole / size  # norms, convolutions and the like are not split


def test_activations_fall_as_the_number_of_devices_along_a_row(model):
    """Temporary memory of the gradient, by the compiler; a small part, such as parameters' gradients, does not fall."""
    batch = batch_of_segments([runs(1000, 2000, 1000, 96)])
    temporary = {}
    for size in (2, 8):
        mesh = parallelism_of({"context": size})
        program = compiled_loss_and_gradients(place(model, mesh, RULES), batch, mesh)
        temporary[size] = program.compiled.memory_analysis().temp_size_in_bytes
    assert temporary[8] < 0.35 * temporary[2]


def test_a_checkpoint_of_one_mesh_goes_on_on_another(model, expected, tmp_path):
    batches = [packed_batch()] * 5
    _, state, _ = steps_of(model, batches[:3], parallelism_of({"fsdp": 2, "tensor": 2}))
    with RunCheckpoints(tmp_path) as checkpoints:
        checkpoints.save(3, state)
        checkpoints.wait()
        for mesh in (None, parallelism_of({"expert": 4, "context": 2})):
            _, like, _ = steps_of(model, [], mesh)
            restored = checkpoints.restore(3, like)
            same = jax.tree.map(lambda a, b: np.array_equal(np.asarray(a), np.asarray(b)), restored, state)
            assert all(jax.tree.leaves(same))
            placed = jax.tree.map(lambda a, b: a.sharding == b.sharding, restored, like)
            assert all(jax.tree.leaves(placed))


def test_lora_on_a_mesh(model):
    def run(mesh):
        import optax

        tuned = add_lora(model, rank=2, targets=("*_proj", "w1", "w3", "w2"), key=jr.key(5))
        optimizer = optax.sgd(0.5)
        state, frozen = start(tuned, lora_leaves(tuned), optimizer, mesh)
        batch = jax.tree.map(lambda part: part[None], packed_batch())
        losses = []
        for _ in range(3):
            state, metrics = train_step((frozen, batch, optimizer, StepOptions(mesh=mesh)), state)
            losses.append(float(metrics.loss))
        return losses, state.trainable

    losses, deltas = run(None)
    mesh_losses, mesh_deltas = run(parallelism_of({"fsdp": 2, "tensor": 2, "expert": 2}))
    assert losses[2] < losses[0]
    assert_close(mesh_losses, losses, rtol=TOLERANCE)
    assert_close(mesh_deltas, deltas, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_folders_are_read_and_written_spread(model, tmp_path, kind):
    kz.save_pretrained(model, tmp_path / "one")
    mesh = jax.make_mesh((2, 2, 2), ("fsdp", "tensor", "expert"), axis_types=(kind,) * 3)
    loaded = kz.from_pretrained(tmp_path / "one", mesh=mesh)
    experts = loaded.layers.sections[0][0].mlp.experts.gate_proj
    assert {shard.data.shape for shard in experts.addressable_shards} == {(2, 4, 8, 12)}
    kz.save_pretrained(loaded, tmp_path / "two")
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == (
        tmp_path / "two" / "model.safetensors"
    ).read_bytes()
    tokens = packed_batch().tokens
    assert_close(jax.jit(lambda m, t: m(t, mesh=mesh))(loaded, tokens), model(tokens), rtol=TOLERANCE)


def test_generating_with_spread_parameters(model):
    prompts = [[3, 4, 5], [6, 7, 8, 9, 10]]
    alone = kz.generate(model, prompts, max_new_tokens=5, temperature=0, eos_ids=())
    spread = place(model, parallelism_of({"fsdp": 2, "tensor": 2, "expert": 2}), RULES)
    assert kz.generate(spread, prompts, max_new_tokens=5, temperature=0, eos_ids=()) == alone
    assert jnp.asarray(alone).shape == (2, 5)
