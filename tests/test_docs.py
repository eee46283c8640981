"""Everything in README and docs that can be run is run: Python blocks of a page in order, and the commands."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TESTS = "uv run pytest"


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_python_blocks(page, tmp_path):
    """In a process of their own, as a reader would: no checks, no strict promotion, warnings are errors."""
    code = "\n".join(blocks(page, "python"))
    (tmp_path / "page.py").write_text(code)
    run = [sys.executable, "-W", "error", str(tmp_path / "page.py")]
    done = subprocess.run(run, capture_output=True, text=True, cwd=ROOT, env=plain_environment())
    assert done.returncode == 0, done.stderr[-3000:]


def test_commands_of_the_readme():
    """The first command is run as it stands, but for the installing; the second is this test run itself."""
    commands = [line for block in blocks(ROOT / "README.md", "bash") for line in block.splitlines() if line]
    assert commands.count(TESTS) == 1 and TESTS in (ROOT / ".ci" / "run").read_text().splitlines()
    own = [shlex.split(c.removeprefix("pip install uv && ")) for c in commands if c != TESTS]
    assert own and all(words[:3] == ["uv", "run", "kimi-zoo"] for words in own)
    for words in own:
        run = [sys.executable, "-m", "kimi_zoo", *words[3:]]
        done = subprocess.run(run, capture_output=True, text=True, cwd=ROOT, env=plain_environment())
        assert done.returncode == 0 and done.stdout.strip(), done.stderr[-3000:]


def plain_environment():
    return {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), target


def test_table_of_megatron_names():
    """The page shows the table that conversion reads."""
    from kimi_zoo.checkpoints.tables.megatron import as_markdown

    page = (ROOT / "docs" / "megatron.md").read_text()
    shown = page.split("<!-- table -->\n")[1].split("\n<!-- end of table -->")[0]
    assert shown == as_markdown()
