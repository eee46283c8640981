"""The whole model on a mesh gives what one device gives: loss, what is counted, and every parameter's gradient."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close
from jax.sharding import AxisType
from mesh_cases import (
    CONFIG,
    TOLERANCE,
    assert_same_on_mesh,
    batch_of_segments,
    packed_batch,
    parallelism_of,
    runs,
)

from kimi_zoo.models.kimi_linear_partition import RULES
from kimi_zoo.parallel.axes import ROLES, Parallelism
from kimi_zoo.parallel.partition import place
from kimi_zoo.training.loss import batch_sums


@pytest.mark.parametrize("pair", list(itertools.combinations(ROLES, 2)), ids="-".join)
def test_each_pair_of_axes(model, expected, pair):
    assert_same_on_mesh(model, packed_batch(), parallelism_of(dict.fromkeys(pair, 2)), expected)


def test_boundaries_of_documents_and_of_devices(model):
    """Documents over one, two and three of four devices, beginning at, before and behind a split, and padding."""
    rows = [
        runs(6, 8, 18),
        runs(8, 8, 8, 8),
        runs(4, 22, 6),
        runs(7, 1, 1, 23),
        runs(9, 15, 8),
        runs(12, padding=20),
        np.roll(runs(10, 10, padding=12), 12),
        np.where(np.arange(32) % 3 == 1, 0, runs(15, 17)),
    ]
    assert_same_on_mesh(model, batch_of_segments(np.stack(rows)), parallelism_of({"context": 4}))


def test_without_segment_ids_and_with_logits(model):
    tokens = packed_batch().tokens
    mesh = parallelism_of({"fsdp": 2, "context": 2, "tensor": 2})
    logits = jax.jit(lambda m, t: m(t, mesh=mesh))(place(model, mesh, RULES), tokens)
    assert {shard.data.shape for shard in logits.addressable_shards} == {(4, 8, CONFIG.vocab_size // 2)}
    assert_close(logits, model(tokens), rtol=TOLERANCE)


def test_axes_of_other_names(model, expected):
    mesh = Parallelism(jax.make_mesh((2, 4), ("replica", "expert")), data="replica", context="expert", expert="none")
    assert_same_on_mesh(model, packed_batch(), mesh, expected)


@pytest.mark.parametrize("remat", [True, jax.checkpoint_policies.dots_with_no_batch_dims_saveable])
def test_rematerialising(model, expected, remat):
    assert_same_on_mesh(model, packed_batch(), parallelism_of({"fsdp": 2, "context": 2}), expected, remat=remat)


def test_padding_takes_no_room_from_tokens(model):
    """Padding is alike, so all of it goes to the same experts: with it, no place would be left for what is behind."""
    rows = np.stack([np.roll(runs(4, padding=12), 12)] * 8)
    batch = batch_of_segments(rows)
    mesh = parallelism_of({"expert": 2}, expert_capacity=1.0)
    sums = jax.jit(lambda m, b: batch_sums(m, b, mesh=mesh))(place(model, mesh, RULES), batch)
    assert sums.dropped == 0
    assert_close(sums.loss, batch_sums(model, batch).loss, rtol=TOLERANCE)


def test_a_mesh_that_the_caller_has_set(model, expected):
    run = eqx.filter_jit(lambda model, batch, mesh: batch_sums(model, batch, mesh=mesh).loss)
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        assert_close(run(model, packed_batch(), mesh), expected[1].loss, rtol=TOLERANCE)
    mesh = jax.make_mesh((8,), ("fsdp",))  # of Explicit type
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"mesh with axes of Explicit type is set"):
        run(model, packed_batch(), mesh)


def test_tokens_beyond_the_capacity_are_dropped_and_counted(model):
    """With room for everything nothing is dropped; with room for less, as many as the routing says."""
    batch = packed_batch()
    sums = {}
    for capacity in (2.0, 0.5):
        mesh = parallelism_of({"expert": 2}, expert_capacity=capacity)
        sums[capacity] = jax.jit(lambda m, b, mesh=mesh: batch_sums(m, b, mesh=mesh))(place(model, mesh, RULES), batch)
    assert sums[2.0].dropped == 0
    assert_close(sums[2.0].loss, batch_sums(model, batch).loss, rtol=TOLERANCE)
    real = int((batch.segment_ids > 0).sum())
    pairs = real * CONFIG.num_experts_per_token * CONFIG.mlp_kinds.count("moe")
    assert 0.35 * pairs < sums[0.5].dropped < 0.75 * pairs
    assert jnp.isfinite(sums[0.5].loss) and sums[0.5].loss != sums[2.0].loss
