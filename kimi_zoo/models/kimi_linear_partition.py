"""How Kimi Linear is spread over a mesh: what splits each dimension of each parameter."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jax.sharding import AxisType, PartitionSpec

from kimi_zoo.models.kimi_linear_config import KimiLinearConfig
from kimi_zoo.parallel.axes import Axes, Parallelism
from kimi_zoo.parallel.partition import Rules, mark_split, name_of, partition_specs
from kimi_zoo.parallel.split import is_split

# Names below the layer; the first pattern that fits counts; a layer axis is never split. What is in no row is whole on
# every device: norms, biases and the routers' balancing biases. Heads stand together in the dimensions that `tensor`
# splits, so that each device has whole heads and gives its part of the sum over them.
RULES: Rules = {
    "embedding.weight": ("tensor", "fsdp"),
    "head.weight": ("tensor", "fsdp"),
    # both kinds of attention
    "mixer.output_proj.weight": ("fsdp", "tensor"),
    "mixer.output_proj.bias": (),
    "mixer.*_proj.bias": ("tensor",),
    "mixer.kv_down.weight": (None, "fsdp"),
    "mixer.*_proj.down.weight": (None, "fsdp"),
    "mixer.*_proj.up.weight": ("tensor", "fsdp"),
    "mixer.*_proj.weight": ("tensor", "fsdp"),
    "mixer.kv_up.weight": ("tensor", "fsdp"),
    # Kimi Delta Attention
    "mixer.*_conv.*": ("tensor",),
    "mixer.a_log": ("tensor",),
    "mixer.dt_bias": ("tensor",),
    # dense, shared and routed SwiGLU blocks
    "mlp.router.weight": (None, "fsdp"),
    "mlp.experts.gate_proj": ("expert", "tensor", "fsdp"),
    "mlp.experts.up_proj": ("expert", "tensor", "fsdp"),
    "mlp.experts.down_proj": ("expert", "fsdp", "tensor"),
    "mlp*.gate_proj.weight": ("tensor", "fsdp"),
    "mlp*.up_proj.weight": ("tensor", "fsdp"),
    "mlp*.down_proj.weight": ("fsdp", "tensor"),
}


def check_mesh(config: KimiLinearConfig, parallelism: Parallelism) -> None:
    """**Raises:** `ValueError` for heads, channels or experts that the mesh cannot split evenly."""
    tensor, heads, expert = (parallelism.size(role) for role in ("tensor", "heads", "expert"))
    shared = config.moe_intermediate_size * (config.num_shared_experts or 0)
    kinds, mlps = config.layer_kinds, config.mlp_kinds
    checks = [
        ("kda" in kinds, "linear_num_heads", config.linear_num_heads, "tensor", tensor),
        ("kda" in kinds, "linear_num_heads / tensor", config.linear_num_heads // tensor, "heads", heads),
        ("mla" in kinds, "num_attention_heads", config.num_attention_heads, "tensor", tensor),
        ("dense" in mlps, "intermediate_size", config.intermediate_size, "tensor", tensor),
        ("moe" in mlps, "moe_intermediate_size", config.moe_intermediate_size, "tensor", tensor),
        ("moe" in mlps and shared > 0, "the shared experts' width", shared, "tensor", tensor),
        ("moe" in mlps, "num_experts", config.num_experts, "expert", expert),
    ]
    for applies, name, size, axis, parts in checks:
        if applies and size % parts:
            raise ValueError(
                f"{name} is {size}, which {axis}={parts} does not divide: choose a size of the axis {axis} that does."
            )


def over_mesh(
    function: Callable[..., Any],
    model: Any,
    arrays: tuple[Any, ...],
    parallelism: Parallelism,
    out_specs: Any,
) -> Any:
    """`function(model, *arrays, axes)` on every device, with its part of the model's parameters and of the tokens.

    **Arguments:** `arrays`: trees of arrays `[batch, seq, ...]`, or `None`; `out_specs`: as of `jax.shard_map`.

    **Raises:** `ValueError`, before anything is compiled, for a model or a batch that the mesh cannot split evenly.
    """
    axes = parallelism.axes
    if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
        raise ValueError(
            "A mesh with axes of Explicit type is set (`jax.set_mesh`), in which arrays carry how they are split. Call "
            "the model outside of it, or set a mesh made with `axis_types=(jax.sharding.AxisType.Auto,) * n`."
        )
    check_mesh(model.config, parallelism)
    _check_biases(model, axes)
    for array in jax.tree.leaves(arrays):
        parallelism.check_tokens(*array.shape[:2])
    parameters, static = eqx.partition(model, eqx.is_array)
    specs = partition_specs(parameters, parallelism, RULES)
    token_specs = jax.tree.map(lambda _: axes.token_spec(), arrays)

    def local(parameters: Any, arrays: tuple[Any, ...]) -> Any:
        parts = mark_split(parameters, specs, axes)
        return function(eqx.combine(parts, static, is_leaf=is_split), *arrays, axes)

    run = jax.shard_map(local, mesh=parallelism.mesh, in_specs=(specs, token_specs), out_specs=out_specs)
    return run(parameters, arrays)


def _check_biases(model: Any, axes: Axes) -> None:
    """**Raises:** `ValueError` for a bias that every device would add to its part of a sum."""
    for path, _ in jax.tree_util.tree_leaves_with_path(model):
        if axes.tensor and name_of(path)[0].endswith("output_proj.bias"):
            raise ValueError(
                f"{name_of(path)[0]} would be added once by every device along {axes.tensor!r}: a model with this bias "
                "cannot be split over tensor."
            )


def logit_spec(config: KimiLinearConfig, parallelism: Parallelism) -> PartitionSpec:
    """How logits `[batch, seq, vocab_size]` are split: also along the vocabulary, where `tensor` divides it."""
    axes = parallelism.axes
    return axes.token_spec(axes.tensor if config.vocab_size % parallelism.size("tensor") == 0 else None)
