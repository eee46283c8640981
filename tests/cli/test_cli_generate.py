import argparse
import json
from pathlib import Path

import pytest
from tiny_checkpoint import TINY

from kimi_zoo import cli, load_tokenizer
from kimi_zoo.cli import generate, runtime, streaming
from kimi_zoo.cli.terminal import Status, UsageError
from kimi_zoo.generation.loop import GeneratedToken


def test_streams_text_and_reports_json(run_command):
    streamed = run_command("generate", TINY, "--prompt-file", "-", "--seed", 3, input="def \n")
    assert streamed.returncode == 0, streamed.stderr
    (closing,) = streamed.stderr.splitlines()  # no progress, no log lines
    assert closing.startswith("[5 tokens, ") and "tokens/s; first token after " in closing
    done = run_command("generate", TINY, "def ", "--seed", "3", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    (sample,) = report["samples"]
    tokenizer = load_tokenizer(TINY)
    assert report["prompt_tokens"] == tokenizer.encode("def ")
    assert sample["text"] + "\n" == streamed.stdout
    assert sample["text"] == tokenizer.decode(sample["tokens"])
    assert sample["finish_reason"] == "length" and sample["seed"] == 3
    assert len(sample["tokens"]) == len(sample["log_probs"]) == 5  # `max_new_tokens` of generation_config.json
    assert report["settings"] == {
        "max_new_tokens": 5,
        "temperature": 0.7,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "stop": [],
        "dtype": "float32",
    }
    timings = report["timings"]
    assert timings["load_s"] > 0 and timings["first_token_s"] > 0 and 0 < timings["compile_s"] < timings["total_s"]
    assert timings["load_s"] + timings["first_token_s"] <= timings["total_s"] + 1e-3


def arguments(*extra):
    return cli.build_parser().parse_args(["generate", str(TINY), *extra])


def test_prompt_comes_from_one_place(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"one\r\ntwo\n\n")
    assert generate.read_prompt(arguments("--prompt-file", str(path))) == "one\ntwo\n"
    assert generate.read_prompt(arguments("--", "-x")) == "-x"
    assert generate.read_prompt(arguments()) == ""
    with pytest.raises(UsageError, match="not both"):
        generate.read_prompt(arguments("text", "--prompt-file", str(path)))
    with pytest.raises(UsageError, match=r"absent.txt: No such file"):
        generate.read_prompt(arguments("--prompt-file", str(tmp_path / "absent.txt")))
    path.write_bytes(b"ab\xff")
    with pytest.raises(UsageError, match=r"is not UTF-8 text: byte 2"):
        generate.read_prompt(arguments("--prompt-file", str(path)))


def test_begin_of_text_where_it_is_asked_for(tmp_path):
    tokenizer = load_tokenizer(TINY)
    plain = tokenizer.encode("ab")
    assert generate.encode_prompt("ab", tokenizer, TINY) == plain
    assert generate.encode_prompt("", tokenizer, TINY) == [256]
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": true}')
    assert generate.encode_prompt("ab", tokenizer, tmp_path) == [256, *plain]
    tokenizer.bos_id = None
    with pytest.raises(UsageError, match="names no begin-of-text token"):
        generate.encode_prompt("", tokenizer, TINY)


def test_command_line_wins_over_generation_config():
    settings = generate.read_settings(arguments("--temperature", "0", "--max-new-tokens", "9"), TINY)
    assert (settings.temperature, settings.max_new_tokens, settings.eos_token_ids) == (0.0, 9, (257,))
    assert generate.read_settings(arguments(), TINY).temperature == 0.7
    with pytest.raises(UsageError, match="--num-samples 3 at temperature 0"):
        generate.read_settings(arguments("--temperature", "0", "--num-samples", "3"), TINY)


def test_empty_stop_string_is_refused(capsys):
    assert cli.main(["generate", str(TINY), "x", "--stop", ""]) == 2
    assert "--stop needs some text" in capsys.readouterr().err


def event(row, text, token=1, finish_reason=None):
    return GeneratedToken(row, token, text, -0.5, finish_reason)


def test_samples_are_printed_in_order_as_they_come(capsys):
    shown = []

    def events():
        for new in (
            event(0, "a"),
            event(1, "x"),
            event(1, "y", finish_reason="length"),
            event(0, "b"),
            event(0, "", token=None, finish_reason="stop_string"),
            event(2, "z", finish_reason="eos"),
        ):
            yield new
            shown.append(capsys.readouterr().out)

    streaming.print_stream(events(), "prompt", 3, Status(wanted=False))
    assert shown == [
        "--- sample 1 of 3 ---\na",
        "",
        "",
        "b",
        "\n--- sample 2 of 3 ---\nxy\n--- sample 3 of 3 ---\n",
        "z\n",
    ]


def test_terminal_gets_the_prompt_dimmed_and_no_control_codes(monkeypatch, capsys):
    monkeypatch.setattr(streaming, "is_terminal", lambda stream: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    streaming.print_stream(iter([event(0, "\x1b]0;title", finish_reason="eos")]), "p\x1b", 1, Status(wanted=False))
    assert capsys.readouterr().out == "\x1b[2mp�\x1b[22m�]0;title\n"


def test_collected_samples():
    events = [event(1, "x", token=7), event(0, "a", token=5), event(0, "b", token=None, finish_reason="stop_string")]
    samples = streaming.collect([*events, event(1, "", token=9, finish_reason="eos")], 2, seed=40)
    assert samples == [
        {"text": "ab", "tokens": [5], "log_probs": [-0.5], "finish_reason": "stop_string", "seed": 40},
        {"text": "x", "tokens": [7, 9], "log_probs": [-0.5, -0.5], "finish_reason": "eos", "seed": 41},
    ]


def test_compile_time_counts_nested_spans_once():
    clock = object.__new__(runtime.CompileClock)
    clock._spans = [(1.0, 4.0), (2.0, 3.0), (3.5, 5.0), (7.0, 9.0)]
    assert clock.between(0.0, 10.0) == 6.0
    assert clock.between(2.0, 8.0) == 3.0 + 1.0


@pytest.mark.parametrize(
    "variables, expected",
    [
        ({"KIMI_ZOO_CACHE": "/c"}, Path("/c/xla")),
        ({"KIMI_ZOO_CACHE": "off", "XDG_CACHE_HOME": "/x"}, None),
        ({"XDG_CACHE_HOME": "/x"}, Path("/x/kimi-zoo/xla")),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, Path("/h/.cache/kimi-zoo/xla")),
    ],
)
def test_cache_folder(monkeypatch, variables, expected):
    monkeypatch.delenv("KIMI_ZOO_CACHE", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert runtime.cache_folder() == expected


def test_input_errors_are_told_from_failures():
    with pytest.raises(UsageError, match="too long"), generate.bad_input():
        raise ValueError("too long")
    assert isinstance(arguments(), argparse.Namespace)
