"""What splitting rows over devices costs: collectives and memory of one layer, from its compiled program.

Run as `python benchmarks/context.py [--tokens 8192,65536]`. A KDA layer and an MLA layer of Kimi Linear 48B
(32 heads, bfloat16), forward and gradient of parameters and input, one row of `tokens` split over 8 forced CPU devices.
Nothing is run. For each way of splitting it prints the number of collectives in the program, the bytes that a device
sends in them for activations (not the sums of parameters' gradients), and temporary memory of a device.

With `--time` it times the operator on one device, alone and as a rank of several runs it (values beside the identity).
"""

import argparse
import functools
import math
import os
import re
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import kimi_zoo as kz

RANKS = 8
HIDDEN, HEADS, DIM = 2304, 32, 128
BYTES = {"f32": 4, "i32": 4, "ui32": 4, "bf16": 2, "f16": 2, "i1": 1}
KINDS = "collective_permute|all_gather|all_reduce|reduce_scatter|all_to_all"


def kda_layer():
    return kz.KimiDeltaAttention(HIDDEN, HEADS, DIM, key=jax.random.key(0))


def mla_layer():
    sizes = dict(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    return kz.MultiHeadLatentAttention(HIDDEN, HEADS, **sizes, key=jax.random.key(0))


def sent(text: str, axes: dict[str, int]) -> dict[str, tuple[int, float]]:
    """Number of collectives of each kind in a lowered program, and bytes that a device sends in them.

    Read before compiling, since programs compiled for CPUs send bfloat16 as float32. From the size of a result: a
    permutation sends it whole, an all-to-all and an all-gather all but one of `n` parts, a reduce-scatter `n - 1` times
    its result, an all-reduce twice what a reduce-scatter of it sends.
    """
    found: dict[str, tuple[int, float]] = {}
    lines = iter(text.splitlines())
    for line in lines:
        match = re.search(rf'"stablehlo\.({KINDS})"', line)
        if match is None:
            continue
        n = math.prod(axes[name] for name in re.findall(r'axis_ref<name = "(\w+)"', line))
        while "->" not in line:  # the type stands behind the sum that a reduction is given
            line = next(lines)
        *dims, kind = re.findall(r"tensor<(.*?)>", line.split("->")[-1])[0].split("x")
        size = BYTES[kind] * int(np.prod([int(x) for x in dims]))
        part = {"collective_permute": 1, "all_to_all": 1 - 1 / n, "all_gather": 1 - 1 / n, "reduce_scatter": n - 1}
        count, total = found.get(match[1], (0, 0.0))
        found[match[1]] = (count + 1, total + size * part.get(match[1], 2 - 2 / n))
    return found


def lower_layer(layer, axes: dict[str, int], names: dict, tokens: int, packed: bool):
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    rows = P(None, tuple(axes))
    parameters, rest = eqx.partition(layer, eqx.is_array)

    def run(parameters, x, ids):
        layer = eqx.combine(parameters, rest)
        options = {} if isinstance(layer, kz.KimiDeltaAttention) else {"positions": ids}
        return layer(x, segment_ids=ids if packed else None, **options, **names)

    mapped = jax.shard_map(run, mesh=mesh, in_specs=(P(), rows, rows), out_specs=rows)
    loss = lambda parameters, x, ids: jnp.sum(mapped(parameters, x, ids).astype(jnp.float32))
    like = lambda shape, dtype, spec: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
    inputs = (like((1, tokens, HIDDEN), jnp.bfloat16, rows), like((1, tokens), jnp.int32, rows))
    parameters = jax.tree.map(lambda x: like(x.shape, x.dtype, P()), parameters)
    return jax.jit(jax.grad(loss, (0, 1))).lower(parameters, *inputs)


def time_operator() -> None:
    batch, seq, heads, programs = 1, 2048, 8, {}
    normal = lambda key, *shape: jax.random.normal(jax.random.key(key), shape)
    for width in (DIM, 2 * DIM):
        inputs = dict(query=normal(0, batch, seq, heads, DIM), key=normal(1, batch, seq, heads, DIM))
        inputs |= dict(value=normal(2, batch, seq, heads, width), gate=-jnp.abs(normal(3, batch, seq, heads, DIM)))
        inputs |= dict(beta=jax.nn.sigmoid(normal(4, batch, seq, heads)))
        attend = functools.partial(kz.ops.kimi_delta_attention, use_qk_l2norm=True, implementation="chunked")
        forward = jax.jit(lambda inputs, attend=attend: attend(**inputs)[0].sum())
        programs["forward", width] = (forward, inputs)
        programs["gradient", width] = (jax.jit(jax.grad(forward)), inputs)
    times = {name: [] for name in programs}
    for _ in range(12):  # in turns; the first round compiles
        for name, (function, inputs) in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(function(inputs))
            times[name].append(time.perf_counter() - start)
    for (name, width), all_times in times.items():
        print(f"{name}, value_dim {width}: {1e3 * min(all_times):.1f} ms, median {1e3 * np.median(all_times):.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="8192,65536")
    parser.add_argument("--time", action="store_true")
    args = parser.parse_args()
    if args.time:
        return time_operator()
    half = RANKS // 2
    ways = {
        "chunk-wise": (kda_layer, {"context": RANKS}, dict(context_axis="context")),
        "head-wise": (kda_layer, {"heads": RANKS}, dict(head_axis="heads")),
        f"{half} x 2": (kda_layer, {"context": half, "heads": 2}, dict(context_axis="context", head_axis="heads")),
        "MLA": (mla_layer, {"context": RANKS}, dict(context_axis="context")),
    }
    for tokens in map(int, args.tokens.split(",")):
        for name, (make, axes, names) in ways.items():
            for packed in (False, True):
                program = lower_layer(make(), axes, names, tokens, packed)
                found = sent(program.as_text(), axes)
                activations = sum(size for kind, (_, size) in found.items() if kind != "all_reduce")
                counts = ", ".join(f"{count} {kind}" for kind, (count, _) in found.items() if kind != "all_reduce")
                memory = program.compile().memory_analysis().temp_size_in_bytes
                rows = "packed" if packed else "one document"
                print(
                    f"{name}, {tokens} tokens, {rows}: {activations / 1e6:.1f} MB sent in {counts}; "
                    f"{memory / 1e6:.0f} MB temporary",
                    flush=True,
                )


if __name__ == "__main__":
    main()
