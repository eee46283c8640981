"""kimi-zoo beside transformers and mlx-lm, on the same seeded weights: prints the table of the README.

Run as `python benchmarks/compare.py --torch-python PYTHON`, where PYTHON is an interpreter that has transformers and
mlx-lm; on a machine that is otherwise idle. The three programs answer each request in turn, `--rounds` times; the table
holds medians. Before anything is timed, logits and greedy tokens are compared; every request is made once untimed.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from kimi_zoo.models.kimi_linear_config import PERIOD, KimiLinearConfig

HERE = Path(__file__).parent
CONFIG = KimiLinearConfig(
    vocab_size=8192,
    hidden_size=384,
    layer_kinds=(*PERIOD * 2, "kda"),
    mlp_kinds=("dense",) + ("moe",) * 8,
    intermediate_size=1024,
    linear_num_heads=4,
    linear_head_dim=64,
    num_attention_heads=4,
    kv_lora_rank=128,
    qk_nope_head_dim=64,
    qk_rope_head_dim=32,
    v_head_dim=64,
    num_experts=8,
    num_experts_per_token=2,
    moe_intermediate_size=128,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)


def write_model(folder: str) -> None:
    """Writes the weights. In a process of its own: what a parent has held counts as its children's peak memory."""
    import jax
    import jax.random as jr

    import kimi_zoo as kz

    model = kz.KimiLinear(CONFIG, key=jr.key(0))
    kz.save_pretrained(model, folder)
    print(f"{sum(leaf.size for leaf in jax.tree.leaves(model)) / 1e6:.1f} million parameters, float32", flush=True)


class Worker:
    """One program behind the line protocol."""

    def __init__(self, name: str, command: list[str]):
        self.name = name
        start = time.perf_counter()
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.ready = self.read()
        self.start_s = time.perf_counter() - start

    def read(self) -> dict:
        for line in self.process.stdout:
            if line.startswith("{"):  # others may be chatter of a library
                return json.loads(line)
        raise SystemExit(f"{self.name} ended with code {self.process.wait()}.")

    def ask(self, **request) -> dict:
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self.read()

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def requests(small: bool) -> dict[str, dict]:
    """What is timed: a row of the table -> a request, and how many tokens it is about."""
    random = np.random.default_rng(0)
    ids = lambda batch, seq: random.integers(3, CONFIG.vocab_size, (batch, seq)).tolist()
    prompt, steps, rows = (32, 4, 16) if small else (1024, 64, 512)
    return {
        f"prefill, {prompt} tokens": {"op": "prefill", "ids": ids(1, prompt), "count": prompt},
        "decoding, batch 1, streamed": {"op": "decode", "ids": ids(1, 16), "n": steps, "count": steps},
        "decoding, batch 8, streamed": {"op": "decode", "ids": ids(8, 16), "n": steps, "count": 8 * steps},
        f"training step, 2 x {rows} tokens": {"op": "train", "ids": ids(2, rows), "count": 2 * rows},
    }


def check_equal(workers: list[Worker], folder: Path) -> None:
    """Prints how far the logits of the others are from ours, and whether greedy tokens are equal."""
    ids = requests(True)["prefill, 32 tokens"]["ids"]
    found = []
    for worker in workers:
        answer = worker.ask(op="logits", ids=ids, out=str(folder / f"{worker.name}.npy"))
        tokens = worker.ask(op="decode", ids=ids, n=16)
        if "error" in answer | tokens:
            raise SystemExit(f"{worker.name}: {(answer | tokens)['error']}")
        found.append((np.load(folder / f"{worker.name}.npy"), tokens["tokens"]))
    ours, our_tokens = found[0]
    for worker, (logits, tokens) in zip(workers[1:], found[1:], strict=True):
        worst = np.abs(logits - ours).max() / np.abs(ours).max()
        same = "equal" if tokens == our_tokens else "different"
        print(f"{worker.name}: largest difference of logits / largest logit {worst:.1e}; greedy tokens {same}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--torch-python", help="a Python with transformers and mlx-lm")
    parser.add_argument("--write", metavar="FOLDER", help="only write the weights, to this folder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="tiny requests: to see that everything runs")
    args = parser.parse_args()
    if args.write:
        return write_model(args.write)
    if not args.torch_python:
        parser.error("--torch-python is needed")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        subprocess.run([sys.executable, __file__, "--write", str(folder)], check=True)
        other = [args.torch_python, str(HERE / "worker_elsewhere.py")]
        workers = [
            Worker("kimi-zoo", [sys.executable, str(HERE / "worker.py"), str(folder)]),
            Worker("transformers", [*other, "transformers", str(folder)]),
            Worker("mlx-lm", [*other, "mlx", str(folder)]),
        ]
        for worker in workers:
            print(worker.name, worker.ready["versions"])
        check_equal(workers, Path(scratch))
        rows = {}
        for name, request in requests(args.small).items():
            able = [worker for worker in workers if (worker.name, request["op"]) != ("mlx-lm", "train")]
            for worker in able:
                worker.ask(**request)
            answers = [{worker.name: worker.ask(**request) for worker in able} for _ in range(args.rounds)]
            rows[name] = {worker.name: text([a[worker.name] for a in answers], request) for worker in able}
        rows["process start to weights ready"] = {w.name: f"{w.start_s:.1f} s" for w in workers}
        rows["peak memory after loading"] = {w.name: f"{w.ready['rss_mib']:.0f} MiB" for w in workers}
        print_table(workers, rows)
        for worker in workers:
            worker.close()


def text(answers: list[dict], request: dict) -> str:
    """The median speed, and for training the peak memory."""
    if any("error" in answer for answer in answers):
        return next(answer["error"] for answer in answers if "error" in answer)
    speed = f"{request['count'] / statistics.median(answer['s'] for answer in answers):.0f} tokens/s"
    return speed + (f", {answers[-1]['rss_mib'] / 1024:.1f} GB" if request["op"] == "train" else "")


def print_table(workers: list[Worker], rows: dict[str, dict[str, str]]) -> None:
    print("\n| | " + " | ".join(worker.name for worker in workers) + " |")
    print("|---" * (len(workers) + 1) + "|")
    for name, cells in rows.items():
        print(f"| {name} | " + " | ".join(cells.get(worker.name, "-") for worker in workers) + " |")


if __name__ == "__main__":
    main()
