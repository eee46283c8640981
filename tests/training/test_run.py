"""Whole runs: what they write, and that stopping them, in whatever way, changes nothing."""

import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import equinox as eqx
import jax
import jax.random as jr
import numpy as np
import pytest
from helpers import tiny

import kimi_zoo as kz
from kimi_zoo.bundled import find_weights
from kimi_zoo.checkpoints.files import CheckpointError
from kimi_zoo.checkpoints.safetensors import open_checkpoint
from kimi_zoo.training.checkpoints import RunCheckpoints
from kimi_zoo.training.options import RunOptions
from kimi_zoo.training.run import NonFiniteError, Report, finetune

STEPS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of one layer with the bundled tokenizer, and data."""
    folder = tmp_path_factory.mktemp("model")
    small = tiny(
        layer_kinds=("kda",),
        mlp_kinds=("dense",),
        vocab_size=4096,
        hidden_size=8,
        intermediate_size=8,
        initializer_range=0.05,
        model_max_length=64,
    )
    kz.save_pretrained(kz.KimiLinear(small, key=jr.key(0)), folder / "model")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(find_weights("kimi-linear-stdlib-5m") / name, folder / "model" / name)
    rows = [{"prompt": f"def f{i}(x):\n", "completion": f"    return x + {i}\n"} for i in range(30)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def options(folder, **changes):
    defaults = {"steps": STEPS, "rows": 2, "seq_length": 32, "learning_rate": 1e-2, "evaluate_every": 5}
    return RunOptions(model=str(folder / "model"), data=(str(folder / "rows.jsonl"),), **(defaults | changes))


def tensors(path):
    with open_checkpoint(path) as checkpoint:
        return {name: checkpoint.read(name).tobytes() for name in checkpoint}


def numbers(path):
    """What a run computed: its lines without the times."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("seconds", "tokens_per_second")} for line in lines]


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    """A run from start to end."""
    output = tmp_path_factory.mktemp("whole") / "run"
    summary = finetune(options(folder), output, save_every=4)
    return output, summary


def test_a_run_writes_everything_in_its_folder(whole):
    output, summary = whole
    lines = numbers(output / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert all(line.keys() >= {"step", "loss", "tokens", "learning_rate"} for line in lines)
    assert [line["step"] for line in lines if "validation_loss" in line] == [5, 10, 12]
    assert summary["validation_loss_after"] < summary["validation_loss_before"] == lines[0]["initial_validation_loss"]
    assert (output / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(int(entry.name) for entry in (output / "checkpoints").iterdir()) == [8, 12]
    tuned = kz.from_pretrained(summary["output"])
    assert kz.load_tokenizer(summary["output"]).encode("def") and tuned.config.hidden_size == 8


@pytest.mark.parametrize("stop", [1, 6, 9])
def test_an_interrupted_run_goes_on_to_the_same_result(folder, whole, tmp_path, stop):
    def interrupt(line, _steps):
        if line["step"] == stop:
            raise KeyboardInterrupt

    said = []
    with pytest.raises(KeyboardInterrupt):
        finetune(options(folder), tmp_path / "run", save_every=4, report=Report(said.append, interrupt))
    assert f"Stopped behind step {stop} of {STEPS}, which is saved" in said[-1]
    summary = finetune(options(folder), tmp_path / "run", save_every=4, resume=True, report=Report(said.append))
    assert f"Resuming behind step {stop}." in said
    assert numbers(tmp_path / "run" / "metrics.jsonl") == numbers(whole[0] / "metrics.jsonl")
    assert tensors(summary["output"]) == tensors(whole[1]["output"])
    again = finetune(options(folder), tmp_path / "run", resume=True)  # nothing is left to do
    assert tensors(again["output"]) == tensors(whole[1]["output"])


def test_a_run_is_not_mixed_with_another(folder, whole, tmp_path):
    with pytest.raises(CheckpointError, match="holds a run already"):
        finetune(options(folder), whole[0])
    with pytest.raises(CheckpointError, match=r"other options:\n- learning_rate: 0.01 then, 0.02 now"):
        finetune(options(folder, learning_rate=2e-2), whole[0], resume=True)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="is not empty and holds no run"):
        finetune(options(folder), tmp_path)
    with pytest.raises(ValueError, match="exceeds the model's 64 tokens"):
        finetune(options(folder, seq_length=65), tmp_path / "new")
    for wrong, message in (
        ({"steps": 1, "epochs": 1}, "not both"),
        ({"rows": 0}, "`rows` is at least 1"),
        ({"remat": "some"}, "`remat` is one of none, full, dots"),
        ({"validation": 1.0}, "`validation` is a share"),
        ({"clip": -1.0}, "`clip` is a number, at least 0; got -1"),
        ({"weight_decay": float("inf")}, "`weight_decay` is a number"),
        ({"bias_rate": float("nan")}, "`bias_rate` is a number"),
        ({"lora": -1}, "`lora` is a number, at least 0"),
        ({"learning_rate": 0.0}, "`learning_rate` is a number above 0"),
        ({"lora_alpha": float("nan")}, "`lora_alpha` is a number above 0"),
        ({"warmup": 1.5}, "`warmup` is a share of the steps"),
        ({"dtype": "int8"}, "`dtype` is one of float32, bfloat16; got 'int8'"),
        ({"on_nonfinite": "ignore"}, "`on_nonfinite` is one of stop, skip"),
        ({"optimizer": "adam"}, "`optimizer` is one of adamw"),
    ):
        with pytest.raises(ValueError, match=message):
            options(folder, **wrong)


def test_a_checkpoint_that_lacks_something_is_refused(whole, tmp_path):
    shutil.copytree(whole[0] / "checkpoints", tmp_path / "checkpoints")
    with RunCheckpoints(tmp_path / "checkpoints") as checkpoints:
        like = {"a": jax.numpy.zeros(3)}
        with pytest.raises(CheckpointError, match=r"is not one of this run: it lacks a; it also has .*optimizer"):
            checkpoints.restore(12, like)
        checkpoints.save(20, {"trainable": np.ones(2)})
        checkpoints.wait()
        with pytest.raises(CheckpointError, match="it lacks optimizer"):
            checkpoints.restore(20, {"trainable": np.ones(2), "optimizer": np.ones(2)})
        with pytest.raises(CheckpointError, match=r"trainable has shape \(2,\), not \(3,\)"):
            checkpoints.restore(20, {"trainable": np.ones(3)})


def test_a_checkpoint_that_cannot_be_written_is_no_bad_input(tmp_path, monkeypatch):
    absl = logging.getLogger("absl")
    before = absl.level
    absl.setLevel(logging.CRITICAL)
    with RunCheckpoints(tmp_path / "checkpoints") as checkpoints:
        assert absl.level == logging.CRITICAL  # never lowered
        absl.setLevel(before)

        def full(*_arguments, **_options):
            raise ValueError("RESOURCE_EXHAUSTED: no space")  # as of tensorstore

        monkeypatch.setattr(type(checkpoints._manager), "wait_until_finished", full)
        with pytest.raises(OSError, match=r"cannot be written: RESOURCE_EXHAUSTED: no space: '.*checkpoints'"):
            checkpoints.wait()
        monkeypatch.undo()


def test_what_is_not_finite_stops_or_is_skipped(folder, tmp_path):
    with pytest.raises(NonFiniteError, match=r"Step 1 \(rows 0 to 1 of the shuffled data, seed 0\): loss not finite"):
        broken_run(folder, tmp_path, "stop")
    said = []
    summary = broken_run(folder, tmp_path, "skip", Report(said.append))
    assert summary["skipped_steps"] == 2 and sum("The step is skipped" in text for text in said) == 2
    rates = {line["learning_rate"] for line in numbers(tmp_path / "skip" / "metrics.jsonl")}
    assert len(rates) == 1  # the schedule goes by the steps that counted


def broken_run(folder, tmp_path, on_nonfinite, report=None):
    """A run of a model with a NaN among its weights."""
    model = kz.from_pretrained(folder / "model")
    weight = model.norm.weight.at[0].set(jax.numpy.nan)
    broken = tmp_path / "broken"
    kz.save_pretrained(eqx.tree_at(lambda m: m.norm.weight, model, weight), broken, overwrite=True)
    run = RunOptions(
        model=str(broken),
        data=(str(folder / "rows.jsonl"),),
        steps=2,
        rows=2,
        seq_length=32,
        validation=0.0,
        on_nonfinite=on_nonfinite,
    )
    return finetune(run, tmp_path / on_nonfinite, report=report)


def test_lora_run_writes_an_adapter(folder, tmp_path):
    summary = finetune(options(folder, lora=2, steps=3), tmp_path / "run")
    assert summary["output"].endswith("adapter")
    config = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert config["r"] == 2 and config["base_model_name_or_path"] == str(folder / "model")


def test_freezing_is_checked_and_excludes_deltas(folder, tmp_path):
    for wrong, message in (
        ({"freeze": ("*",)}, "Nothing trains"),
        ({"freeze": ("*",), "lora": 2}, "Nothing trains"),
        ({"freeze": ("nothing_such",), "lora": 2}, "fits no parameter"),
    ):
        with pytest.raises(ValueError, match=message):
            finetune(options(folder, **wrong), tmp_path / "wrong")
    with pytest.raises(ValueError, match="`keep` is at least 1"):
        finetune(options(folder), tmp_path / "wrong", keep=0)
    said = []
    run = options(folder, lora=2, steps=2, freeze=("q_proj",))
    output = finetune(run, tmp_path / "run", report=Report(said.append))["output"]
    with open_checkpoint(f"{output}/adapter_model.safetensors") as checkpoint:
        zero = {name: not checkpoint.read(name).any() for name in checkpoint if "lora_B" in name}
    assert {name for name in zero if zero[name]} == {"base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"}
    (table,) = (text for text in said if text.startswith("trains "))
    assert "of 6" in table and "mixer.key_proj.delta.a" in table and "query_proj" not in table
    assert len(table.splitlines()) <= 12


def test_what_trains_beside_deltas_is_in_the_adapter(folder, tmp_path):
    """Evaluating the adapter gives the loss that the run reported, and so does the fused model."""
    train = ("A_log", "model.norm.weight", "q_proj")
    run = options(folder, lora=2, steps=3, train=train, validation_data=(str(folder / "rows.jsonl"),))
    summary = finetune(run, tmp_path / "run")
    adapter, reported = summary["output"], summary["validation_loss_after"]
    shared = {"data": [folder / "rows.jsonl"], "seq_length": 32, "rows": 2}
    evaluated = kz.training.evaluate(folder / "model", adapter=adapter, **shared)["loss"]
    assert evaluated == pytest.approx(reported, rel=1e-6)
    config = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert config["modules_to_save"] == ["model.norm"]  # q_proj has a delta too; A_log is no module
    kz.training.fuse(folder / "model", adapter, tmp_path / "fused")
    assert kz.training.evaluate(tmp_path / "fused", **shared)["loss"] == pytest.approx(reported, rel=1e-5)


def test_killed_at_any_moment(folder, tmp_path):
    """A real process, killed more than twenty times while it starts, trains, evaluates or saves, gives the same."""
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "HYPOTHESIS_PROFILE")}
    environment["KIMI_ZOO_CACHE"] = str(tmp_path / "cache")
    steps, chance, kills = 40, random.Random(0), 0

    def start(output, *more):
        command = [sys.executable, "-m", "kimi_zoo", "finetune", folder / "model", "--data", folder / "rows.jsonl"]
        command += ["--output", output, "--steps", steps, "--batch-size", 2, "--seq-length", 32, "--save-every", 3]
        command += ["--evaluate-every", 10, "--learning-rate", "0.01", "--quiet", *more]
        with open(tmp_path / "errors", "wb") as errors:
            return subprocess.Popen([str(word) for word in command], env=environment, stderr=errors)

    told = lambda: (tmp_path / "errors").read_text()

    reference = start(tmp_path / "reference")
    assert reference.wait() == 0, told()
    metrics = tmp_path / "run" / "metrics.jsonl"
    lines = lambda: metrics.read_bytes().count(b"\n") if metrics.exists() else 0
    while kills < 22:
        process = start(tmp_path / "run", "--resume")
        before, more = lines(), chance.randint(1, 3)
        early = time.monotonic() + chance.uniform(0.5, 3.0) if kills % 5 == 0 else None
        while process.poll() is None and lines() < before + more and (early is None or time.monotonic() < early):
            if lines() < before:  # it has thrown away what stands behind the last checkpoint
                before = lines()
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.03))
        process.send_signal(signal.SIGKILL)
        if process.wait() == 0:
            break
        assert process.returncode == -signal.SIGKILL, told()
        kills += 1
    assert kills >= 22, kills
    last = start(tmp_path / "run", "--resume")
    assert last.wait() == 0, told()
    assert numbers(tmp_path / "run" / "metrics.jsonl") == numbers(tmp_path / "reference" / "metrics.jsonl")
    assert tensors(tmp_path / "run" / "model") == tensors(tmp_path / "reference" / "model")
