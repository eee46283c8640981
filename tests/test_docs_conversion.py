"""The lines of README, docs and help that convert and inspect checkpoints, run as they stand on a small model."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from helpers import tiny

import kimi_zoo as kz
from kimi_zoo.checkpoints.configs import write_config
from kimi_zoo.checkpoints.files import write_json
from kimi_zoo.checkpoints.megatron_output import published_shapes
from kimi_zoo.checkpoints.safetensors import open_checkpoint, save_tensors
from kimi_zoo.cli import main
from kimi_zoo.cli.convert import EPILOG

ROOT = Path(__file__).parent.parent
PAGES = ("docs/cli.md", "docs/megatron.md")
LINE = re.compile(r"^ +kimi-zoo ((?:convert|inspect) \./.*)$", re.MULTILINE)


def lines(text):
    """What is typed, without what explains it."""
    return [re.split(r"\s{2,}", found)[0] for found in LINE.findall(text)]


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A model that can be split as the lines say."""
    folder = tmp_path_factory.mktemp("published")
    config = tiny(
        layer_kinds=("kda", "kda", "kda", "mla"), mlp_kinds=("dense", "moe", "moe", "moe"), intermediate_size=16,
        linear_num_heads=2, linear_head_dim=4, num_attention_heads=2, num_experts=8, num_experts_per_token=2,
        moe_intermediate_size=6, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    draw = np.random.default_rng(0)
    save_tensors({n: draw.standard_normal(s, np.float32) for n, s in published_shapes(config).items()}, folder)
    write_json(folder / "config.json", write_config(config, None, "float32"))
    return folder


@pytest.fixture
def place(tmp_path, published, monkeypatch):
    """A folder with what the lines find: the checkpoints of a training run."""
    kz.convert(published, tmp_path / "run" / "checkpoints", layout=kz.MegatronLayout(tp=2, iteration=30))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def assert_equal(one, other):
    with open_checkpoint(one) as mine, open_checkpoint(other) as theirs:
        assert set(mine) == set(theirs)
        for name in mine:
            np.testing.assert_array_equal(mine.read(name), theirs.read(name), err_msg=name)


@pytest.mark.parametrize("page", PAGES)
def test_lines_of_a_page(page, place, published, capsys):
    """In order, one after another."""
    found = lines((ROOT / page).read_text())
    assert len(found) >= 2
    for line in found:
        assert main(shlex.split(line)) == 0, line
        assert capsys.readouterr().out.strip(), line
    assert_equal(place / "published", published)


def test_lines_of_the_readme_are_among_them():
    found = lines((ROOT / "README.md").read_text())
    assert found and set(found) <= set(lines((ROOT / "docs" / "megatron.md").read_text()))


@pytest.mark.parametrize("line", lines(EPILOG))
def test_examples_of_the_help(line, place, published, capsys):
    """Each by itself."""
    (place / "config.json").write_bytes((published / "config.json").read_bytes())
    if line.split()[1] == "./published":
        kz.convert("run/checkpoints", "published")
    words = shlex.split(line)
    assert main(words) == 0, line
    assert Path(words[2]).exists() != ("--plan" in words)


def test_keys_that_the_help_names(place, capsys):
    assert main(["convert", "./run/checkpoints", "./published", "--json"]) == 0
    named = re.split(r"[,\s]+", EPILOG.split("with the keys\n")[1].strip())
    assert sorted(json.loads(capsys.readouterr().out)) == sorted(named)
