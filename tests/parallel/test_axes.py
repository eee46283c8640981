"""Meshes from text, what their axes mean, and what is refused before anything is compiled."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from helpers import tiny
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import TypeCheckError
from mesh_cases import CONFIG, batch_of_segments, model_of, parallelism_of, runs

import kimi_zoo as kz
from kimi_zoo.models.kimi_linear_partition import RULES
from kimi_zoo.parallel.axes import Parallelism, as_parallelism, make_mesh
from kimi_zoo.parallel.partition import partition_specs
from kimi_zoo.training.lora import add_lora
from kimi_zoo.training.loss import batch_sums


def test_meshes_are_made_from_text():
    mesh = make_mesh("tensor=2, fsdp=-1")
    assert dict(mesh.shape) == {"fsdp": 4, "tensor": 2}  # the nearest devices share tensors, whatever the order
    assert dict(make_mesh("context=8").shape) == {"context": 8}
    assert as_parallelism(None) is None
    assert as_parallelism("data=8").axes.batch == ("data",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fsdp=3", r"takes 3 devices; there are 8"),
        ("fsdp=3,data=-1", r"a multiple of 3 devices; there are 8"),
        ("pipeline=8", r"no mesh axis 'pipeline': the axes are data, fsdp"),
        ("fsdp", r"written as `fsdp=4,context=2`; 'fsdp'"),
        ("fsdp=0,data=8", r"fsdp needs a size of at least 1"),
        ("fsdp=-1,data=-1", r"Only one mesh axis may have the size -1"),
        ("fsdp=2,fsdp =4", r"names the axis fsdp twice"),
        ("", r"names no axis"),
    ],
)
def test_meshes_that_make_no_sense(text, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(text)


def test_names_of_axes_are_free_but_must_mean_something():
    mesh = jax.make_mesh((4, 2), ("cp", "dp"))
    with pytest.raises(ValueError, match=r"'cp' has no meaning.*Parallelism\(mesh, context='cp'\)"):
        Parallelism(mesh)
    with pytest.raises(ValueError, match=r"cannot mean two things: cp"):
        Parallelism(mesh, context="cp", data="cp")
    axes = Parallelism(mesh, context="cp", data="dp").axes
    assert (axes.context, axes.data, axes.tokens, axes.tensor) == ("cp", "dp", ("dp", "cp"), None)


def test_capacities_that_make_no_sense():
    mesh = make_mesh("expert=8")
    for capacity in (0, -1.0, float("nan"), float("inf"), "1.5"):
        with pytest.raises((ValueError, TypeCheckError), match=r"expert_capacity"):
            Parallelism(mesh, expert_capacity=capacity)
    with pytest.raises(ValueError, match=r"which this mesh lacks"):
        Parallelism(make_mesh("fsdp=8"), expert_capacity=1.0)


def test_a_bias_of_the_output_is_refused_with_tensor():
    """Every device would add it to its part of the sum over heads."""
    model = model_of()
    layer = kz.KimiDeltaAttention(24, 8, 6, bias=True, key=jr.key(0))
    model = kz.replace_layer(model, 0, lambda block: eqx.tree_at(lambda b: b.mixer, block, layer))
    ids = jnp.ones((4, 16), jnp.int32)
    with pytest.raises(ValueError, match=r"mixer.output_proj.bias would be added once by every device"):
        model(ids, mesh=parallelism_of({"tensor": 2}))


class Doubled(eqx.Module):
    """A layer that knows nothing of axes."""

    weight: jax.Array

    def __call__(self, x, *, positions, segment_ids=None):
        return x * self.weight


def test_layers_of_others_run_where_only_rows_are_split():
    model = kz.replace_layer(model_of(), 1, Doubled(jnp.asarray(2.0)))
    batch = batch_of_segments([runs(16)] * 4)
    on_mesh = batch_sums(model, batch, mesh=parallelism_of({"fsdp": 2, "expert": 2}))
    assert jnp.allclose(on_mesh.loss, batch_sums(model, batch).loss, rtol=1e-5)
    with pytest.raises(TypeError, match=r"a Doubled, is no `KimiBlock`.*use data, fsdp and expert"):
        batch_sums(model, batch, mesh=parallelism_of({"tensor": 2}))


def test_axes_of_size_one_change_nothing():
    assert Parallelism(jax.make_mesh((8, 1), ("fsdp", "tensor"))).axes.tensor is None


def test_explicit_axes_are_taken_as_automatic_ones():
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Explicit,))
    assert Parallelism(mesh).mesh.axis_types == (AxisType.Auto,)


@pytest.mark.parametrize(
    ("changes", "sizes", "message"),
    [
        ({"linear_num_heads": 6}, {"tensor": 4}, r"linear_num_heads is 6, which tensor=4 does not divide"),
        ({"num_attention_heads": 6}, {"tensor": 4}, r"num_attention_heads is 6, which tensor=4"),
        ({}, {"tensor": 4, "heads": 2, "context": 1}, None),
        ({"linear_num_heads": 4}, {"tensor": 4, "heads": 2}, r"linear_num_heads / tensor is 1, which heads=2"),
        ({"num_experts": 6}, {"expert": 4}, r"num_experts is 6, which expert=4 does not divide"),
        ({"moe_intermediate_size": 18}, {"tensor": 4}, r"moe_intermediate_size is 18, which tensor=4"),
        ({}, {"fsdp": 8}, r"4 rows cannot be split into 8 equal parts \(fsdp=8\): make it a multiple of 8, such as 8"),
        ({}, {"context": 8}, r"20 tokens in a row cannot be split into 8 equal parts .* such as 24, by padding"),
    ],
)
def test_what_a_mesh_cannot_split_is_refused_before_compiling(changes, sizes, message):
    config = tiny(**(vars(CONFIG) | changes))
    model = jax.eval_shape(lambda: kz.KimiLinear(config, key=jr.key(0)))
    ids = jnp.ones((4, 20 if "context" in sizes else 16), jnp.int32)
    run = lambda: jax.eval_shape(lambda m, x: m(x, mesh=parallelism_of(sizes)), model, ids)
    if message is None:
        assert run().shape == (4, 20, 72)
        return
    with pytest.raises(ValueError, match=message):
        run()


def test_every_parameter_is_in_the_table_or_small():
    """Nothing of size is left whole by mistake: only vectors, and thin matrices beside what only `fsdp` splits, are."""
    config = tiny(**(vars(CONFIG) | {"mla_output_gate": "element_wise", "q_lora_rank": 8}))
    model = add_lora(kz.KimiLinear(config, key=jr.key(0)), rank=2, targets=("*",), key=jr.key(1))
    specs = partition_specs(model, parallelism_of({"fsdp": 2, "tensor": 2, "expert": 2}), RULES)
    whole = [
        jax.tree_util.keystr(path)
        for (path, leaf), spec in zip(
            jax.tree_util.tree_leaves_with_path(model),
            jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec)),
            strict=True,
        )
        if spec == PartitionSpec() and leaf.ndim > 2
    ]
    assert all(name.endswith("down.delta.b") for name in whole) and len(whole) == 4


def test_a_vocabulary_that_tensor_does_not_divide_stays_whole():
    model = model_of(tiny(**(vars(CONFIG) | {"vocab_size": 73})))
    batch = batch_of_segments([runs(16)], vocab=73)
    mesh = parallelism_of({"tensor": 2})
    assert partition_specs(model, mesh, RULES).embedding.weight == PartitionSpec()
    assert jnp.allclose(batch_sums(model, batch, mesh=mesh).loss, batch_sums(model, batch).loss, rtol=1e-5)
