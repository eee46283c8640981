"""Time and peak memory of conversions, beside copying the same bytes and beside torch's own loader.

Run as `python benchmarks/convert.py [--gigabytes 4] [--torch PYTHON] [--folder DIR]`: makes a random model of that
size, converts it to Megatron checkpoints (distributed and legacy, TP 2, EP 2) and back, each in a fresh process. With
`--sparse` the model's file is full of holes, so that it can be far larger than memory and takes no time to make.
`--torch` names a Python that has torch and safetensors: it loads the distributed checkpoint whole and saves it.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np

import kimi_zoo as kz
from kimi_zoo.checkpoints.configs import write_config
from kimi_zoo.checkpoints.files import write_json
from kimi_zoo.checkpoints.megatron_output import published_shapes
from kimi_zoo.checkpoints.safetensors_saving import LazyTensor, write_file

CHILD = """
import json, resource, sys, time
import kimi_zoo as kz
from kimi_zoo.checkpoints.convert import convert
before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
done = convert(sys.argv[1], sys.argv[2], layout=kz.MegatronLayout(**json.loads(sys.argv[3])), verify=sys.argv[4] == "1")
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"seconds": time.perf_counter() - start, "peak": peak * 1024, "jax": "jax" in sys.modules}))
"""

TORCH = """
import json, resource, sys, time
import torch, torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
start = time.perf_counter()
reader = dcp.FileSystemReader(sys.argv[1])
entries = {k: e for k, e in reader.read_metadata().state_dict_metadata.items() if hasattr(e, "size")}
state = {k: torch.empty(tuple(e.size), dtype=e.properties.dtype) for k, e in entries.items()}
dcp.load(state, storage_reader=reader, no_dist=True)
save_file(state, sys.argv[2])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"seconds": time.perf_counter() - start, "peak": peak * 1024}))
"""


def config(gigabytes: float) -> kz.KimiLinearConfig:
    """A model of about that size in bfloat16, most of it experts, as in the published one."""
    layers = max(4, round(gigabytes * 1e9 / 2 / 0.41e9) // 4 * 4)
    return kz.KimiLinearConfig(
        vocab_size=32768,
        hidden_size=2048,
        layer_kinds=tuple("mla" if i % 4 == 3 else "kda" for i in range(layers)),
        mlp_kinds=("dense",) + ("moe",) * (layers - 1),
        intermediate_size=8192,
        linear_num_heads=16,
        linear_head_dim=128,
        num_attention_heads=16,
        num_experts=64,
        num_experts_per_token=8,
        moe_intermediate_size=1024,
    )


def write(folder: Path, settings: kz.KimiLinearConfig, *, sparse: bool) -> int:
    """The model in published layout, one file; returns the bytes of its weights."""
    noise = np.random.default_rng(0).standard_normal(1 << 22, np.float32).astype(ml_dtypes.bfloat16).view(np.uint8)
    tensors = {}
    for name, shape in published_shapes(settings).items():
        wide = name.endswith(("A_log", "dt_bias", "e_score_correction_bias"))
        dtype = np.dtype(np.float32 if wide else ml_dtypes.bfloat16)
        stream = partial(_repeat, noise, _nbytes(shape, dtype))
        tensors[name] = LazyTensor(shape, dtype, lambda: None, stream)
    folder.mkdir(parents=True)
    total = sum(_nbytes(tensor.shape, tensor.dtype) for tensor in tensors.values())
    if sparse:
        names = {n: LazyTensor(t.shape, t.dtype, lambda: None, lambda: iter(())) for n, t in tensors.items()}
        _write_holes(folder / "model.safetensors", names)
    else:
        write_file(folder / "model.safetensors", list(tensors), tensors, {"format": "pt"})
    write_json(folder / "config.json", write_config(settings, None, "bfloat16"))
    return total


def _write_holes(path: Path, tensors: dict[str, LazyTensor]) -> None:
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + _nbytes(tensor.shape, tensor.dtype)
        kind = "F32" if tensor.dtype == np.float32 else "BF16"
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def _nbytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize


def _repeat(noise: np.ndarray, nbytes: int):
    for start in range(0, nbytes, noise.size):
        yield noise[: min(noise.size, nbytes - start)]


def child(program: str, *arguments: str, python: str = sys.executable) -> dict:
    run = subprocess.run([python, "-c", program, *arguments], capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(run.stderr)
    return json.loads(run.stdout)


def copy(source: Path, target: Path) -> float:
    start = time.perf_counter()
    subprocess.run(["cp", "-r", "--sparse=never", str(source), str(target)], check=True)
    seconds = time.perf_counter() - start
    subprocess.run(["rm", "-rf", str(target)], check=True)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--sparse", action="store_true")
    parser.add_argument("--torch", metavar="PYTHON")
    parser.add_argument("--folder")
    args = parser.parse_args()
    settings = config(args.gigabytes)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        root = Path(folder)
        size = write(root / "published", settings, sparse=args.sparse)
        largest = max(settings.vocab_size * settings.hidden_size * 2, 0)
        print(f"model of {size / 1e9:.2f} GB; largest published tensor {largest / 1e9:.3f} GB; best of {args.repeat}")
        ways = [
            ("published", "torch_dist", {"format": "torch_dist", "tp": 2, "ep": 2}),
            ("torch_dist", "published2", {}),
            ("published", "legacy", {"format": "legacy", "tp": 2, "ep": 2}),
            ("legacy", "published3", {}),
        ]
        for source, target, layout in ways:
            copied = min(copy(root / source, root / "copy") for _ in range(args.repeat))
            runs = {}
            for verify in ("0", "1"):
                times = []
                for _ in range(args.repeat):
                    subprocess.run(["rm", "-rf", str(root / target)], check=True)
                    times.append(child(CHILD, str(root / source), str(root / target), json.dumps(layout), verify))
                runs[verify] = min(times, key=lambda run: run["seconds"])
            plain, checked = runs["0"], runs["1"]
            print(
                f"{source:>10} -> {target:<10} {plain['seconds']:6.2f} s, reading back {checked['seconds']:6.2f} s,"
                f" cp {copied:6.2f} s: {plain['seconds'] / copied:.2f} and {checked['seconds'] / copied:.2f} times cp;"
                f" peak {checked['peak'] / 1e6:.0f} MB"
            )
            if target.startswith("published"):
                subprocess.run(["rm", "-rf", str(root / target)], check=True)
            if source == "torch_dist" and args.torch:
                (iteration,) = (root / source).glob("[ir]*e*/")
                found = child(TORCH, str(iteration), str(root / "torch.safetensors"), python=args.torch)
                print(f"{'':>10}    torch      {found['seconds']:6.2f} s; peak {found['peak'] / 1e6:.0f} MB")
                (root / "torch.safetensors").unlink()
            if target.startswith("published"):
                subprocess.run(["rm", "-rf", str(root / source)], check=True)


if __name__ == "__main__":
    main()
