"""Load time and peak memory of `from_pretrained` against the size of a checkpoint.

Run as `python benchmarks/load.py [--gigabytes 1]`: writes a random checkpoint of that size to a temporary folder, loads
it in a fresh process and prints seconds, bytes per second and peak resident memory above the bare import, as a multiple
of the weights.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np

import kimi_zoo as kz
from kimi_zoo.checkpoints.configs import write_config
from kimi_zoo.checkpoints.files import write_json
from kimi_zoo.checkpoints.safetensors import LazyTensor, save_tensors

CHILD = """
import json, re, resource, sys, time
import jax, kimi_zoo as kz
import kimi_zoo.checkpoints.folder
jax.devices()
def peak():  # bytes; on Linux from /proc, because getrusage counts the program that started this one too
    if sys.platform == "linux":
        return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before, start = peak(), time.perf_counter()
model = kz.from_pretrained(sys.argv[1])
jax.block_until_ready([x for x in jax.tree.leaves(model) if isinstance(x, jax.Array)])
print(json.dumps({"seconds": time.perf_counter() - start, "bytes_above_import": peak() - before}))
"""


def write(folder: Path, gigabytes: float) -> int:
    """A checkpoint of about that size in bfloat16; returns the bytes of its weights."""
    import equinox as eqx
    import jax

    hidden = 1024
    layers = max(2, round(gigabytes * 1e9 / 2 / 56e6))
    config = kz.KimiLinearConfig(
        vocab_size=16384,
        hidden_size=hidden,
        layer_kinds=tuple("mla" if i % 4 == 3 else "kda" for i in range(layers)),
        mlp_kinds=("dense",) + ("moe",) * (layers - 1),
        intermediate_size=4096,
        linear_num_heads=8,
        linear_head_dim=128,
        num_attention_heads=8,
        kv_lora_rank=256,
        num_experts=16,
        num_experts_per_token=2,
        moe_intermediate_size=1024,
    )
    skeleton = eqx.filter_eval_shape(lambda: kz.KimiLinear(config, key=jax.random.key(0)))
    shapes = jax.eval_shape(lambda: jax.tree.map(lambda x: jax.numpy.zeros(x.shape, x.dtype), skeleton))
    tensors, random = {}, np.random.default_rng(0)
    for name, leaf in jax.eval_shape(kz.to_tensors, shapes).items():
        keep = name.endswith(("A_log", "dt_bias", "e_score_correction_bias"))
        dtype = np.dtype(np.float32 if keep else ml_dtypes.bfloat16)
        load = lambda shape=leaf.shape, dtype=dtype: random.standard_normal(shape, np.float32).astype(dtype)
        tensors[name] = LazyTensor(leaf.shape, dtype, load)
    folder.mkdir(parents=True)
    save_tensors(tensors, folder, max_shard_size="500MB")
    write_json(folder / "config.json", write_config(config, None, "bfloat16"))
    return sum(int(np.prod(t.shape)) * t.dtype.itemsize for t in tensors.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        size = write(Path(folder) / "model", args.gigabytes)
        out = subprocess.run(
            [sys.executable, "-c", CHILD, f"{folder}/model"], capture_output=True, text=True, check=True
        ).stdout
    measured = json.loads(out)
    seconds, peak = measured["seconds"], measured["bytes_above_import"] / size
    print(f"weights {size / 1e9:.2f} GB: loaded in {seconds:.2f} s, {size / 1e9 / seconds:.2f} GB/s")
    print(f"peak memory above the import: {peak:.3f} times the weights")


if __name__ == "__main__":
    main()
