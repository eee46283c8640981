"""`kimi-zoo finetune`, `evaluate` and `fuse` through real processes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import jax.random as jr
import pytest
from helpers import tiny

import kimi_zoo as kz
from kimi_zoo.bundled import find_weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("training")
    small = tiny(layer_kinds=("kda",), mlp_kinds=("moe",), vocab_size=4096, hidden_size=8, initializer_range=0.05)
    kz.save_pretrained(kz.KimiLinear(small, key=jr.key(0)), folder / "model")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(find_weights("kimi-linear-stdlib-5m") / name, folder / "model" / name)
    rows = [{"prompt": f"def f{i}(x):\n", "completion": f"    return x + {i}\n"} for i in range(20)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def start(folder, *words):
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment["KIMI_ZOO_CACHE"] = str(folder / "cache")
    command = [sys.executable, "-m", "kimi_zoo", *map(str, words)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, cwd=folder, stdout=pipe, stderr=pipe, text=True)


def run(folder, *words, code=0):
    process = start(folder, *words)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == code, errors
    return output, errors


def test_adapter_evaluated_fused_and_generated_with(folder):
    short = ("--seq-length", 48, "--batch-size", 2)
    words = ("finetune", "model", "--data", "rows.jsonl", "--output", "run", "--lora", 2, "--steps", 4, *short)
    output, _ = run(folder, *words, "--learning-rate", 0.05, "--lora-targets", "q_proj", "w1", "--json", "--quiet")
    summary = json.loads(output)
    assert summary["steps"] == 4 and summary["validation_loss_after"] < summary["validation_loss_before"]
    evaluate = lambda *more: json.loads(run(folder, "evaluate", *more, "--data", "rows.jsonl", *short, "--json")[0])
    plain, tuned = evaluate("model"), evaluate("model", "--adapter", "run/adapter")
    assert tuned["loss"] < plain["loss"] and plain["examples"] == 20
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert plain["bytes"] == sum(len(row["completion"].encode()) for row in rows)
    assert evaluate("model", "--no-packing")["bits_per_byte"] == pytest.approx(plain["bits_per_byte"], rel=1e-6)
    run(folder, "fuse", "model", "run/adapter", "fused")
    assert evaluate("fused")["loss"] == pytest.approx(tuned["loss"], rel=1e-5)
    assert run(folder, "generate", "fused", "def", "--max-new-tokens", 3, "--json")[0]


def test_bad_input_is_told_before_any_work(folder):
    (folder / "bad.jsonl").write_text('{"text": "x"}\n{"txt": "y"}\n')
    for words, message in (
        (("--data", "bad.jsonl"), "bad.jsonl:2: expected `text`"),
        (("--data", "missing.jsonl"), "missing.jsonl does not exist"),
        (("--data", "rows.jsonl", "--lora", 2, "--lora-targets", "xyz"), "'xyz' matches no linear layer"),
        (("--data", "rows.jsonl", "--freeze", "xyz"), "'xyz' fits no parameter"),
        (("--data", "rows.jsonl", "--steps", 0), "`steps` is at least 1"),
    ):
        output = "refused"  # the same for all: what is refused leaves no run behind
        _, errors = run(folder, "finetune", "model", *words, "--output", output, code=2)
        assert message in errors and "Traceback" not in errors
        assert not (folder / output / "run.json").exists()


def test_interrupt_saves_and_resume_finishes(folder):
    words = ("finetune", "model", "--data", "rows.jsonl", "--output", "stopped", "--steps", 60, "--batch-size", 2)
    process = start(folder, *words, "--seq-length", 48)
    metrics = folder / "stopped" / "metrics.jsonl"
    while process.poll() is None and (not metrics.exists() or metrics.read_bytes().count(b"\n") < 10):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130 and "go on with --resume" in errors, errors
    assert list((folder / "stopped" / "checkpoints").iterdir()) and not (folder / "stopped" / "model").exists()
    _, errors = run(folder, *words, "--seq-length", 48, code=2)
    assert "holds a run already" in errors
    _, errors = run(folder, *words, "--seq-length", 48, "--resume")
    assert "Resuming behind step" in errors and "held-out loss" in errors
