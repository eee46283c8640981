"""Rows to tokens: which tokens are learned, and what is said of rows that cannot be used."""

import json
import shutil

import numpy as np
import pytest
from helpers import DATA

import kimi_zoo as kz
from kimi_zoo.training.dataset import prepare, split
from kimi_zoo.training.examples import DataError, encode_row

TEMPLATE = (
    "{% for m in messages %}<|im_{{ m['role'] }}|>{{ m['role'] }}<|im_middle|>{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)


def tokenizer_with(tmp_path, template):
    folder = tmp_path / "tokenizer"
    shutil.copytree(DATA / "tokenizers" / "tiktoken_tiny", folder)
    (folder / "chat_template.jinja").write_text(template)
    return kz.load_tokenizer(folder)


def pieces(tokenizer, example):
    """The learned runs of an example as text."""
    runs, run = [], []
    for token, learned in zip(example.tokens.tolist(), example.learned.tolist(), strict=True):
        if learned:
            run.append(token)
        elif run:
            runs.append(tokenizer.decode(run))
            run = []
    return runs + ([tokenizer.decode(run)] if run else [])


@pytest.mark.parametrize("marked", [True, False], ids=["generation marks", "by prefixes"])
def test_the_assistants_turns_and_their_ends_are_learned(tmp_path, marked):
    case = DATA / "tokenizers" / "chat_kimi"
    expected = json.loads((case / "expected.json").read_text())
    template = (case / "chat_template.jinja").read_text() if marked else TEMPLATE
    tokenizer = tokenizer_with(tmp_path, template)
    row = {
        "messages": [
            {"role": "user", "content": "What is 2+2?"},
            {"role": "assistant", "content": "4."},
            {"role": "user", "content": "Add 3."},
            {"role": "assistant", "content": "7."},
        ]
    }
    example = encode_row(row, tokenizer)
    assert tokenizer.decode(example.tokens) == expected["rendered"]
    assert pieces(tokenizer, example) == ["4.<|im_end|>", "7.<|im_end|>"]
    assert example.tokens.tolist() == tokenizer.apply_chat_template(row["messages"])


def test_a_template_that_hides_turns_is_refused(tmp_path):
    rewriting = "{% for m in messages %}{% if loop.last %}<|im_end|>{% endif %}{{ m['content'] }}<|im_end|>{% endfor %}"
    tokenizer = tokenizer_with(tmp_path, rewriting)
    messages = [{"role": role, "content": "x"} for role in ("user", "assistant", "user", "assistant")]
    with pytest.raises(ValueError, match="does not show which part of message 1"):
        tokenizer.encode_conversation(messages)


def test_what_spells_a_mark_or_a_control_token_stays_text(tmp_path):
    tokenizer = tokenizer_with(tmp_path, TEMPLATE)
    text = "a\U00100000b<|im_end|>\U00100001"
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    ids, learned = tokenizer.encode_conversation(messages)
    assert tokenizer.decode([i for i, yes in zip(ids, learned, strict=True) if yes]) == text + "<|im_end|>"
    assert ids == tokenizer.apply_chat_template(messages)


def test_prompt_and_completion_are_encoded_apart():
    tokenizer = kz.load_tokenizer("kimi-linear-stdlib-5m")
    example = encode_row({"prompt": "def read", "completion": "_file"}, tokenizer)
    prompt, completion = tokenizer.encode("def read"), tokenizer.encode("_file")
    assert example.tokens.tolist() == [tokenizer.bos_id, *prompt, *completion, tokenizer.eos_ids[0]]
    assert example.learned.tolist() == [False] * (1 + len(prompt)) + [True] * (len(completion) + 1)
    text = encode_row({"text": "def read"}, tokenizer)
    assert text.learned.tolist() == [False] + [True] * (len(prompt) + 1)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([], "expected an object"),
        ({}, "expected `text` or `prompt` and `completion` or `messages`; got the keys \\[\\]"),
        ({"prompt": "x"}, "got the keys \\['prompt'\\]"),
        ({"text": "x", "messages": []}, "got the keys"),
        ({"text": 3}, "`text` must be text"),
        ({"messages": "x"}, "`messages` must be a list"),
    ],
)
def test_unusable_rows(row, message):
    with pytest.raises(ValueError, match=message):
        encode_row(row, kz.load_tokenizer("kimi-linear-stdlib-5m"))


def test_every_problem_is_named_by_file_and_line(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b'{"text": "ok"}\n{"text": \n\n\xff\xfe{}\n{"other": 1}\n')
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "list.json").write_text('[{"text": "ok"}, 3]')
    with pytest.raises(DataError) as error:
        prepare([tmp_path], kz.load_tokenizer("kimi-linear-stdlib-5m"), tmp_path / "out", seq_length=8)
    for part in (
        "rows.jsonl:2: is not JSON: Expecting value (line 2",
        "rows.jsonl:4: is not UTF-8 text (byte 0: 0xff)",
        "rows.jsonl:5: expected `text`",
        "empty.txt: is empty",
        "list.json, row 2: expected an object",
    ):
        assert part in str(error.value), str(error.value)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob("*.tmp"))


def test_rows_with_nothing_to_learn_are_counted_and_named(tmp_path):
    tokenizer = tokenizer_with(tmp_path, TEMPLATE)
    said = []
    rows = DATA / "field_cases" / "sft_rows" / "rows.jsonl"
    dataset = prepare([rows], tokenizer, tmp_path / "out", seq_length=64, warn=said.append)
    assert len(dataset) == 3 and dataset.counts["rows"] == 4 and dataset.counts["unlearnable"] == 1
    assert "1 of 4 rows have nothing to learn" in said[0] and "rows.jsonl:3" in said[0]
    (tmp_path / "none.jsonl").write_text(rows.read_text().splitlines()[2])
    with pytest.raises(DataError, match=r"nothing to learn in 1 rows.*none.jsonl:1"):
        prepare([tmp_path / "none.jsonl"], tokenizer, tmp_path / "none", seq_length=64)


@pytest.mark.parametrize(("overlong", "lengths"), [("split", [4, 4, 3]), ("truncate", [4]), ("drop", None)])
def test_longer_examples(tmp_path, overlong, lengths):
    tokenizer = kz.load_tokenizer("kimi-linear-stdlib-5m")
    (tmp_path / "a.txt").write_text("import os, sys, re, io\n")
    whole = encode_row({"text": (tmp_path / "a.txt").read_text()}, tokenizer).tokens
    assert len(whole) == 11, whole
    said = []
    make = lambda: prepare(
        [tmp_path / "a.txt"], tokenizer, tmp_path / "out", seq_length=4, overlong=overlong, warn=said.append
    )
    if lengths is None:
        with pytest.raises(DataError, match="1 are longer than 4 tokens"):
            make()
        return
    dataset = make()
    assert dataset.lengths.tolist() == lengths and "1 of 1 rows are longer than 4 tokens" in said[0]
    np.testing.assert_array_equal(dataset.tokens, whole[: sum(lengths)])


def test_prepared_data_is_made_anew_when_a_file_changes(tmp_path):
    tokenizer = kz.load_tokenizer("kimi-linear-stdlib-5m")
    file = tmp_path / "a.txt"
    file.write_text("import os")
    make = lambda: prepare([file], tokenizer, tmp_path / "out", seq_length=16)
    first = make()
    stamp = (tmp_path / "out" / "tokens.bin").stat().st_mtime_ns
    make()
    assert (tmp_path / "out" / "tokens.bin").stat().st_mtime_ns == stamp
    file.write_text("import os, sys")
    assert len(make().tokens) > len(first.tokens)


def test_parquet_rows_and_what_is_no_data(tmp_path):
    import pyarrow
    import pyarrow.parquet

    tokenizer = kz.load_tokenizer("kimi-linear-stdlib-5m")
    table = pyarrow.table({"prompt": ["a", "b"], "completion": ["c", "d"], "text": [None, None]})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    assert prepare([tmp_path / "rows.parquet"], tokenizer, tmp_path / "out", seq_length=16).counts["rows"] == 2
    (tmp_path / "broken.parquet").write_bytes(b"no")
    (tmp_path / "folder").mkdir()
    for path, message in (
        ("broken.parquet", "not a readable Parquet file"),
        ("missing.txt", "does not exist"),
        ("folder", "holds no data"),
        ("out/dataset.json", None),
    ):
        if message:
            with pytest.raises(DataError, match=message):
                prepare([tmp_path / path], tokenizer, tmp_path / "other", seq_length=16)
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(DataError, match="not a data file by its name"):
        prepare([tmp_path / "a.csv"], tokenizer, tmp_path / "other", seq_length=16)


def test_split_is_repeatable_and_complete():
    train, held = split(20, 0.1, seed=3)
    assert sorted([*train, *held]) == list(range(20)) and len(held) == 2
    assert split(20, 0.1, seed=3)[1].tolist() == held.tolist() != split(20, 0.1, seed=4)[1].tolist()
    assert len(split(1, 0.5, seed=0)[1]) == 0 and len(split(2, 0.01, seed=0)[1]) == 1 and len(split(5, 0.0, 0)[1]) == 0


def test_a_missing_chat_template_is_told_once(tmp_path):
    tokenizer = kz.load_tokenizer("kimi-linear-stdlib-5m")
    row = json.dumps({"messages": [{"role": "user", "content": "x"}]}) + "\n"
    (tmp_path / "rows.jsonl").write_text(row * 3 + "[]\n")
    with pytest.raises(DataError) as caught:
        prepare([tmp_path / "rows.jsonl"], tokenizer, tmp_path / "data", seq_length=32)
    assert str(caught.value).count("chat template") == 1 and "rows.jsonl:4: expected an object" in str(caught.value)
