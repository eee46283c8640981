"""torch reads the Megatron checkpoints that are written here, and gets what was meant.

Run as `python benchmarks/torch_reads.py --torch PYTHON [--megatron]`, where PYTHON has torch and safetensors, and
megatron-core for `--megatron`. A random model is converted to every layout below; torch loads each with
`torch.distributed.checkpoint` or `torch.load`, or megatron-core with its `dist_checkpointing`, and puts the ranks'
pieces together in a way of its own; what comes out must equal the model bit for bit.
"""

import argparse
import itertools
import json
import subprocess
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np

import kimi_zoo as kz
from kimi_zoo.checkpoints.configs import write_config
from kimi_zoo.checkpoints.files import CheckpointError, write_json
from kimi_zoo.checkpoints.megatron_output import published_shapes
from kimi_zoo.checkpoints.safetensors import save_tensors

READER = Path(__file__).with_name("torch_reader.py")


def random_model(folder: Path) -> None:
    config = kz.KimiLinearConfig(
        vocab_size=122, hidden_size=32, layer_kinds=("kda", "kda", "kda", "mla"),
        mlp_kinds=("dense", "moe", "moe", "moe"), intermediate_size=48,
        linear_num_heads=4, linear_head_dim=8, num_attention_heads=4, kv_lora_rank=12,
        qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=6, num_experts=4, num_experts_per_token=2,
        moe_intermediate_size=16,
    )  # fmt: skip
    draw = np.random.default_rng(0)
    tensors = {}
    for name, shape in published_shapes(config).items():
        wide = name.endswith(("A_log", "dt_bias", "e_score_correction_bias"))
        tensors[name] = draw.standard_normal(shape).astype(np.float32 if wide else ml_dtypes.bfloat16)
    save_tensors(tensors, folder)
    write_json(folder / "config.json", write_config(config, None, "bfloat16"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", metavar="PYTHON", required=True)
    parser.add_argument("--megatron", action="store_true", help="load with megatron-core, torch_dist only")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        random_model(root / "published")
        jobs = []
        grid = itertools.product(
            ["torch_dist"] if args.megatron else ["torch_dist", "legacy"],
            (1, 2, 4), (1, 2), (1, 2, 4), (None, 1), (1, 2), ("gpt", "hybrid"),
        )  # fmt: skip
        styles = itertools.cycle(["te_grouped", "sequential", "grouped"])
        for form, tp, pp, ep, etp, vpp, stack in grid:
            style = next(styles)
            layout = {"format": form, "tp": tp, "pp": pp, "ep": ep, "etp": etp, "vpp": vpp, "stack": stack}
            layout["experts"] = style
            folder = root / f"m{len(jobs)}"
            try:
                kz.convert(root / "published", folder, layout=kz.MegatronLayout(**layout), verify=False)
            except CheckpointError as error:
                assert "must be divisible" in str(error), error
                continue
            jobs.append({"folder": str(folder), "layout": layout})
        command = [args.torch, str(READER), str(root / "published"), str(int(args.megatron))]
        lines = "\n".join(map(json.dumps, jobs))
        done = subprocess.run(command, input=lines, capture_output=True, text=True)
        equal = done.stdout.count("equal")
        print(f"{equal} of {len(jobs)} checkpoints equal")
        if done.returncode or equal != len(jobs):
            raise SystemExit(done.stderr[-3000:])


if __name__ == "__main__":
    main()
