"""Memory of a Kimi Linear 48B training step on TPU meshes, compiled ahead of time without a TPU.

Run as `python benchmarks/scaling.py [--case v6e:16x16:fsdp=32,context=8:131072:1 ...]` with `libtpu` installed:
topology, mesh, tokens in a row, rows per device group (data, fsdp and expert together). Prints, for one device: what
parameters and optimizer hold, and XLA's peak (bfloat16, full rematerialisation, AdamW in float32, room for 1.25 times
an even share of the experts' tokens). A compiler's figures, not measurements.
"""

import argparse
import dataclasses
import math
import os
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # no TPU is asked for its name
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v6e-4")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from jax.experimental import topologies
from jax.sharding import NamedSharding

import kimi_zoo as kz
from kimi_zoo.parallel.axes import Parallelism, make_mesh
from kimi_zoo.training.packing import Batch
from kimi_zoo.training.step import StepOptions, TrainState, state_shardings, train_step
from kimi_zoo.training.trainable import BALANCING_BIAS, decays, place_of

CASES = (
    "v6e:16x16:fsdp=32,expert=8:8192:1",
    "v6e:16x16:fsdp=4,expert=8,context=8:131072:1",
    "v6e:16x16:expert=8,context=32:1048576:1",
    "tpu7x:4x4x4:fsdp=16,expert=8:8192:1",
    "tpu7x:4x4x4:fsdp=2,expert=8,context=8:131072:1",
)


def abstract_state(config, parallelism, optimizer):
    """A training state and the frozen rest, as shapes that say how they are spread."""
    model = eqx.filter_eval_shape(lambda: kz.KimiLinear(config, key=jr.key(0)))
    is_bias = jax.tree_util.tree_map_with_path(lambda path, _: place_of(path)[2].endswith(BALANCING_BIAS), model)
    score_biases, trainable = eqx.partition(model, is_bias)
    with jax.numpy_dtype_promotion("standard"):
        moments = jax.eval_shape(optimizer.init, trainable)
    state = TrainState(trainable, moments, jax.ShapeDtypeStruct((), jnp.int32), score_biases)
    spread = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    frozen = jax.tree.map(lambda _: None, model)
    return jax.tree.map(spread, state, state_shardings(state, parallelism)), frozen


def held(state) -> float:
    """Gigabytes of a state on one device."""
    parts = ((leaf.sharding.shard_shape(leaf.shape), leaf.dtype.itemsize) for leaf in jax.tree.leaves(state))
    return sum(math.prod(shape) * size for shape, size in parts) / 1e9


def measure(case: str, layers: int | None, compiling: bool) -> None:
    """Compiles a case, if wanted, and prints its line."""
    kind, topology, sizes, seq, rows = case.split(":")
    description = topologies.get_topology_desc(f"{kind}:{topology}", platform="tpu")
    parallelism = Parallelism(make_mesh(sizes, description.devices), expert_capacity=1.25)
    config = kz.KIMI_LINEAR_48B_A3B
    if layers:
        config = dataclasses.replace(
            config, layer_kinds=config.layer_kinds[:layers], mlp_kinds=config.mlp_kinds[:layers]
        )
    optimizer = optax.adamw(1e-4, mask=decays)
    state, frozen = abstract_state(config, parallelism, optimizer)
    if not compiling:
        print(f"{case}: held {held(state):.2f} GB", flush=True)
        return
    groups = math.prod(parallelism.size(role) for role in ("data", "fsdp", "expert"))
    shape = (1, groups * int(rows), int(seq))
    spec = parallelism.axes.token_spec()
    sharding = NamedSharding(parallelism.mesh, type(spec)(None, *spec))
    batch = Batch(
        *(jax.ShapeDtypeStruct(shape, kind, sharding=sharding) for kind in ("int32", "int32", "float32", "int32"))
    )
    options = StepOptions(compute_dtype="bfloat16", remat=True, mesh=parallelism)

    def step(batch, state):
        return train_step((frozen, batch, optimizer, options), state)

    started = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=1).lower(batch, state).compile()
    seconds = time.perf_counter() - started
    memory = compiled.memory_analysis()
    peak = memory.peak_memory_in_bytes / 1e9
    print(f"{case}: held {held(state):.2f} GB, peak {peak:.2f} GB, compiled in {seconds:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", help="topology:mesh:tokens:rows; several may be given")
    parser.add_argument("--layers", type=int, help="of the first N layers only")
    parser.add_argument("--held", action="store_true", help="only what parameters and optimizer hold: compiles nothing")
    args = parser.parse_args()
    for case in args.case or CASES:
        measure(case, args.layers, not args.held)


if __name__ == "__main__":
    main()
