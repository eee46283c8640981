"""Each axis of a mesh by itself: what one device gives, and no more sent than this kind of splitting needs."""

import jax
import pytest
from jax.sharding import PartitionSpec
from mesh_cases import (
    CONFIG,
    assert_same_on_mesh,
    collectives,
    packed_batch,
    parallelism_of,
)

from kimi_zoo.models.kimi_linear_partition import RULES
from kimi_zoo.parallel.axes import ROLES
from kimi_zoo.parallel.partition import partition_specs

# What each axis may send. Every mesh sums gradients and counts; MLA gathers latents,
# whose gradient is scattered, and trades halves of queries.
COLLECTIVES = {
    "data": {"all-reduce"},
    "fsdp": {"all-reduce", "all-gather", "reduce-scatter"},
    "expert": {"all-reduce", "all-to-all"},
    "context": {"all-reduce", "collective-permute", "all-gather", "reduce-scatter"},
    "heads": {"all-reduce", "all-to-all", "collective-permute", "all-gather", "reduce-scatter"},
    "tensor": {"all-reduce"},
}


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("role", ROLES)
def test_each_axis_alone(model, expected, role, size):
    """And the program sends what this kind of splitting needs, no more."""
    program = assert_same_on_mesh(model, packed_batch(), parallelism_of({role: size}), expected)
    found = collectives(program)
    assert found.keys() == COLLECTIVES[role]
    if role == "fsdp":  # embedding, head and last layer once or twice; what is scanned, forward and backward; each
        # gradient is scattered
        specs = partition_specs(model, parallelism_of({"fsdp": size}), RULES)
        split = [s for s in jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec)) if "fsdp" in s]
        scanned = [spec for spec in split if spec[0] is None and len(spec) > 2]
        assert len(split) + len(scanned) // 2 <= len(found["all-gather"]) <= 2 * len(split) - 2
        assert len(found["reduce-scatter"]) == len(split)
    elif "all-gather" in found:  # latents and numbers of documents: never a parameter
        rank = CONFIG.kv_lora_rank + CONFIG.qk_rope_head_dim
        floats = [shape for shape in found["all-gather"] if not shape.startswith("s32")]
        assert len(floats) == 1 and floats[0].startswith(f"f32[8,16,{rank}]")
