"""The shell lines of the fine-tuning guide, in order and as they stand, on a tiny model of the same name."""

import importlib
import json
import re
import shlex
import shutil
from pathlib import Path

import equinox as eqx
import jax
import jax.random as jr
from helpers import tiny

import kimi_zoo as kz
from kimi_zoo.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
NAME = "kimi-linear-stdlib-5m"


def test_shell_lines_of_the_guide(tmp_path, monkeypatch, capsys):
    tokenizer = kz.find_weights(NAME)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KIMI_ZOO_CACHE", str(tmp_path / "cache"))
    config = tiny(
        layer_kinds=("mla",),
        mlp_kinds=("dense",),
        vocab_size=4096,
        hidden_size=8,
        intermediate_size=8,
        model_max_length=512,
    )
    kz.save_pretrained(kz.KimiLinear(config, key=jr.key(0)), NAME)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(tokenizer / name, Path(NAME) / name)
    Path("examples/data").mkdir(parents=True)
    rows = [{"prompt": f"def f{i}(x):\n", "completion": f"    return x + {i}\n"} for i in range(9)]
    Path("examples/data/docstrings.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shell = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    commands = [shlex.split(line)[1:] for block in shell for line in block.splitlines()]
    assert {words[0] for words in commands} == {"finetune", "generate", "fuse", "evaluate"}
    for words in commands:
        with jax.numpy_dtype_promotion("standard"):
            assert main(words) == 0, (words, capsys.readouterr().err)
        assert capsys.readouterr().out.strip() or words[0] in ("finetune", "fuse")


def test_memory_table(monkeypatch):
    """The guide shows what the script prints; what is counted from shapes is what a run holds."""
    monkeypatch.syspath_prepend(PAGE.parents[1] / "benchmarks")
    script = importlib.import_module("memory_table")
    shown = PAGE.read_text().split("<!-- memory -->\n")[1].split("\n<!-- end of memory -->")[0]
    assert shown.startswith(script.table(first=2) + "\n")  # the larger ones take half a minute
    config = tiny(layer_kinds=("mla",), mlp_kinds=("moe",), vocab_size=64)
    for mode in ("full", "nf4"):
        monkeypatch.setattr(script, "activations", lambda *_args, **_kwargs: 0)
        model, wanted = script.build(config, mode, "float32")
        with jax.numpy_dtype_promotion("standard"):
            state, frozen = kz.training.start(model, wanted, kz.training.make_optimizer("adamw", 1e-3))
        held = sum(
            leaf.on_device_size_in_bytes() for leaf in jax.tree.leaves(eqx.filter((state, frozen), eqx.is_array))
        )
        gradient = 4 * script.count(state.trainable)
        layer = 4 * script.largest_layer(config) if mode in ("int8", "nf4") else 0
        said = script.training(config, mode, dtype="float32") - gradient - layer
        assert abs(said - held) <= 64, (mode, said, held)  # two counters of steps, and the routers' bias
