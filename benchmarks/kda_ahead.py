"""Memory of the chunked form compiled ahead of time for a TPU or GPU that need not be there.

Run as `python benchmarks/kda_ahead.py [--topology tpu7x:2x2x1]` with `libtpu` installed, or `--topology cuda:h100` with
`jax-cuda13-plugin`, `jax-cuda13-pjrt`, `nvidia-cuda-nvcc` and `nvidia-nvvm`. Prints XLA's peak memory for one device at
B 1, H 32, T 8192, K = V = 128, bfloat16, bounded gate: forward, and the gradients of the sum of the output.
"""

import argparse
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # no TPU is asked for its name
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v6e-4")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from kda import LOWER_BOUND, ours

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 84942979072 cuda_compute_capability { major: 9 minor: 0 }
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 } device_description_str: "NVIDIA H100 80GB HBM3"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="tpu7x:2x2x1")
    parser.add_argument("--shape", default="1,32,8192,128", help="B, H, T and K = V")
    args = parser.parse_args()
    if args.topology == "cuda:h100":
        description = topologies.get_topology_desc("1x1x1", platform="cuda", topology="1x1x1", target_config=H100)
    else:
        description = topologies.get_topology_desc(args.topology, platform="tpu")
    sharding = jax.sharding.SingleDeviceSharding(description.devices[0])
    batch, heads, seq, dim = map(int, args.shape.split(","))
    shapes = {name: (batch, seq, heads, dim) for name in ("query", "key", "value", "gate")}
    shapes |= {"beta": (batch, seq, heads), "a_log": (heads,), "dt_bias": (heads, dim)}
    inputs = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32 if len(shape) < 3 else jnp.bfloat16, sharding=sharding)
        for name, shape in shapes.items()
    }

    def forward(inputs):
        return ours(None)(**inputs, bound=LOWER_BOUND)

    gradient = jax.grad(lambda inputs: jnp.sum(forward(inputs).astype(jnp.float32)))
    for name, function in (("forward", forward), ("gradient", gradient)):
        memory = jax.jit(function).lower(inputs).compile().memory_analysis()
        peak, temporary = (x / 1e6 for x in (memory.peak_memory_in_bytes, memory.temp_size_in_bytes))
        print(
            f"{args.topology} {args.shape} {name}: peak {peak:.0f} MB, of it temporary {temporary:.0f} MB", flush=True
        )


if __name__ == "__main__":
    main()
