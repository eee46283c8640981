import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from tiny_checkpoint import TINY

from kimi_zoo import cli
from kimi_zoo.cli.terminal import byte_text, printable, shorten, table

HEAVY = ("jax", "numpy", "equinox", "tokamax", "tokenizers")


@pytest.mark.parametrize(
    "arguments, allowed", [(["--help"], ()), (["generate", "--help"], ()), (["inspect", str(TINY)], ("numpy",))]
)
def test_starts_without_heavy_imports(environment, arguments, allowed):
    code = f"""
import sys
from kimi_zoo.cli import main
try:
    main({arguments!r})
except SystemExit as exit:
    assert exit.code == 0
assert not (loaded := [name for name in {HEAVY!r} if name in sys.modules and name not in {allowed!r}]), loaded
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_help_names_commands_and_exit_codes(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help"])
    out = capsys.readouterr().out
    assert all(word in out for word in (*cli.COMMANDS, "examples:", "exit codes:", "KIMI_ZOO_CACHE"))


def test_version_is_that_of_the_project(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    project = tomllib.loads((Path(cli.__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert capsys.readouterr().out == f"kimi-zoo {project['version']}\n"


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "required: COMMAND"),
        (["sing"], "invalid choice: 'sing'"),
        (["generate"], "required: MODEL"),
        (["generate", "m", "--top-p", "1.5"], "--top-p: expected a number above 0 and at most 1; got '1.5'"),
        (["generate", "m", "--top-p", "0"], "got '0'"),
        (["generate", "m", "--temperature", "nan"], "expected a number at least 0; got 'nan'"),
        (["generate", "m", "--max-new-tokens", "2.5"], "expected a whole number at least 1; got '2.5'"),
        (["generate", "m", "--seed", "-1"], "got '-1'"),
        (["generate", "m", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["generate", "m", "--temp", "1"], "unrecognized arguments: --temp"),
    ],
)
def test_bad_command_lines_exit_with_2(capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments)
    assert message in capsys.readouterr().err


def test_unknown_model_is_one_message(run_command):
    done = run_command("generate", "weights/no-such-model", "def ")
    assert (done.returncode, done.stdout) == (2, "")
    assert "'weights/no-such-model' is no file or folder here, nor the name of bundled weights" in done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) == 1


def test_failures_exit_with_1_and_debugging_raises(monkeypatch, capsys):
    def fail(_args):
        raise RuntimeError("out of\x1b[31mmemory")

    monkeypatch.setattr("kimi_zoo.cli.inspect.run", fail)
    assert cli.main(["inspect", "x"]) == 1
    message = capsys.readouterr().err
    assert "kimi-zoo: RuntimeError: out of�[31mmemory" in message and "KIMI_ZOO_DEBUG=1" in message
    monkeypatch.setenv("KIMI_ZOO_DEBUG", "1")
    with pytest.raises(RuntimeError, match="out of"):
        cli.main(["inspect", "x"])


def test_interrupt_exits_with_130(environment, tmp_path):
    fifo = tmp_path / "prompt"
    os.mkfifo(fifo)
    heed = "signal.signal(signal.SIGINT, signal.default_int_handler)"  # a test run in the background ignores it
    code = f"import runpy, signal; {heed}; runpy.run_module('kimi_zoo', run_name='__main__', alter_sys=True)"
    command = [sys.executable, "-c", code, "generate", str(TINY), "--prompt-file", str(fifo)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with open(fifo, "w"):  # opens once the command has begun to read
        time.sleep(0.5)  # a signal between opening and waiting for bytes would be looked at after the bytes
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "\n")


def test_closed_pipe_is_quiet(environment):
    command = [sys.executable, "-m", "kimi_zoo", "inspect", str(TINY), "--tensors"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=60) == 141


def test_numbers_and_tables():
    assert [byte_text(n) for n in (0, 999, 1000, 1_234_567, 999_999, 98_200_000_000)] == [
        "0 B",
        "999 B",
        "1 kB",
        "1.23 MB",
        "1 MB",
        "98.2 GB",
    ]
    assert printable("a\tb\n\x1b[2J\x9bc") == "a\tb\n�[2J�c"
    assert shorten("model.layers.0.weight", 9) == "mode…ight"
    rows = [("model.layers.10.self_attn.q_proj.weight", "7"), ("b", "12,345")]
    lines = table(("name", "n"), rows, width=24).splitlines()
    assert lines == ["name                   n", "model.l…j.weight       7", "b                 12,345"]


def test_closed_stdout_is_said(environment):
    command = f"{sys.executable} -m kimi_zoo inspect nowhere >&-"
    done = subprocess.run(["sh", "-c", command], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "kimi-zoo: stdout is closed, so there is nowhere to write to.\n")
