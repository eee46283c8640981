"""Real processes that train together: one dies, the others say so at once, and the run goes on on another mesh."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import jax.random as jr
import numpy as np
import pytest
from helpers import tiny

import kimi_zoo as kz
from kimi_zoo.bundled import find_weights

STEPS = 12
WORDS = ("--data", "rows.jsonl", "--steps", STEPS, "--batch-size", 4, "--seq-length", 48, "--save-every", 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    small = tiny(
        layer_kinds=("kda", "mla"),
        mlp_kinds=("moe", "dense"),
        num_attention_heads=2,
        num_experts=4,
        moe_intermediate_size=8,
        vocab_size=4096,
        hidden_size=8,
        initializer_range=0.05,
    )
    kz.save_pretrained(kz.KimiLinear(small, key=jr.key(0)), folder / "model")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(find_weights("kimi-linear-stdlib-5m") / name, folder / "model" / name)
    rows = [{"prompt": f"def f{i}(x):\n", "completion": f"    return x + {i}\n"} for i in range(20)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def start(folder, count, *words):
    """Starts so many processes of one device each, which find one another by variables."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    plain = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    plain |= {"KIMI_ZOO_CACHE": "off", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_PLATFORMS": "cpu"}
    processes = []
    for index in range(count):
        environment = dict(plain)
        command = [sys.executable, "-m", "kimi_zoo", *map(str, words)]
        if count > 1:
            environment |= {
                "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
                "JAX_NUM_PROCESSES": str(count),
                "JAX_PROCESS_ID": str(index),
            }
            command += ["--distributed"]
        pipe = subprocess.PIPE
        processes.append(subprocess.Popen(command, env=environment, cwd=folder, stdout=pipe, stderr=pipe, text=True))
    return processes


def finish(processes):
    """Waits for all. **Returns:** what each printed, and its complaints."""
    results = [process.communicate(timeout=400) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), [errors for _, errors in results]
    return results


def losses(folder, run):
    lines = [json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines]


def test_a_lost_process_is_told_and_the_run_goes_on_on_another_mesh(folder):
    finish(start(folder, 1, "finetune", "model", "--output", "alone", *WORDS))
    expected = losses(folder, "alone")
    words = ("finetune", "model", "--output", "together", *WORDS)
    processes = start(folder, 2, *words, "--mesh", "fsdp=2")
    metrics = folder / "together" / "metrics.jsonl"
    deadline = time.time() + 300
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 4:
        assert time.time() < deadline and processes[0].poll() is None, processes[0].communicate()
        time.sleep(0.05)
    processes[1].send_signal(signal.SIGKILL)
    _, errors = processes[0].communicate(timeout=60)  # at once, not when a time limit is over
    processes[1].communicate()
    assert processes[0].returncode == 1 and "Traceback" not in errors
    assert "Process 0 lost another process of the job in step" in errors and "goes on with --resume" in errors

    results = finish(start(folder, 4, *words, "--resume", "--json", "--mesh", "context=2,tensor=2"))
    assert json.loads(results[0][0])["steps"] == STEPS
    assert [output for output, _ in results[1:]] == [""] * 3  # one of them talks
    assert losses(folder, "together") == pytest.approx(expected, rel=1e-4)
    one, two = (kz.to_tensors(kz.from_pretrained(folder / run / "model")) for run in ("alone", "together"))
    assert one.keys() == two.keys()
    assert max(np.abs(np.asarray(one[name] - two[name])).max() for name in one) < 2e-3


def test_evaluating_and_generating_together(folder):
    evaluate = ("evaluate", "model", "--data", "rows.jsonl", "--batch-size", 4, "--seq-length", 48, "--json")
    alone = json.loads(finish(start(folder, 1, *evaluate))[0][0])
    together = finish(start(folder, 2, *evaluate, "--mesh", "expert=2"))
    assert json.loads(together[0][0])["loss"] == pytest.approx(alone["loss"], rel=1e-5) and not together[1][0]
    generate = ("generate", "model", "def", "--max-new-tokens", 6, "--temperature", 0, "--json", "--quiet")
    tokens = lambda results: json.loads(results[0][0])["samples"][0]["tokens"]
    together = tokens(finish(start(folder, 2, *generate, "--mesh", "tensor=2")))
    assert together == tokens(finish(start(folder, 1, *generate)))


def test_an_error_in_one_process_ends_all(folder):
    """Here the first one alone reads the data."""
    words = ("finetune", "model", "--data", "missing.jsonl", "--output", "none", "--mesh", "fsdp=2")
    processes = start(folder, 2, *words)
    errors = [process.communicate(timeout=60)[1] for process in processes]
    assert "missing.jsonl does not exist" in errors[0] and processes[0].returncode == 2
    assert "another process of the job" in errors[1] and processes[1].returncode == 1


def test_what_the_variables_lack_is_told(folder):
    process = start(folder, 1, "finetune", "model", "--output", "x", *WORDS, "--distributed")[0]
    assert "--distributed needs --mesh" in process.communicate(timeout=100)[1] and process.returncode == 2
    os.environ["JAX_NUM_PROCESSES"] = "2"
    try:
        process = start(folder, 1, "finetune", "model", "--output", "x", *WORDS, "--distributed", "--mesh", "fsdp=2")[0]
    finally:
        del os.environ["JAX_NUM_PROCESSES"]
    errors = process.communicate(timeout=100)[1]
    assert "is set, but not JAX_COORDINATOR_ADDRESS, JAX_PROCESS_ID" in errors and process.returncode == 2
