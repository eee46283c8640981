"""The scripts that make the bundled model's text, tokenizer and baselines, on little text."""

import importlib
import itertools
import json
import math
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "weights" / "train"))
corpus, tokenizer, baselines = (importlib.import_module(name) for name in ("corpus", "tokenizer", "baselines"))
Document = corpus.Document


def unlike(n, lines=9):
    return "".join(f"line {i} of text {n} and {n * i}\n" for i in range(lines))


@pytest.fixture
def documents():
    return [Document(f"file{n}.py", unlike(n)) for n in range(60)]


@pytest.fixture
def built(tmp_path, monkeypatch, documents):
    monkeypatch.setattr(corpus, "collect", lambda: documents)
    corpus.build(tmp_path / "corpus")
    tokenizer.build(tmp_path / "corpus", tmp_path, vocab_size=300)
    return tmp_path


def test_sources_leave_out_tests_tables_and_data(tmp_path):
    texts = {
        "b/kept.py": "x = 1\n",
        "a.py": "y = 2\n",
        "test/test_x.py": "",
        "idlelib/idle_test/z.py": "",
        "site-packages/p.py": "",
        "_sysconfigdata_linux.py": "",
        "encodings/cp1.py": "decoding_table = ()\n",
        "data.py": "z" * 1001,
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert list(corpus.source_documents(tmp_path)) == [Document("a.py", "y = 2\n"), Document("b/kept.py", "x = 1\n")]


def test_near_copies_go():
    longer = unlike(2) + unlike(3, lines=8)  # 9 of its 17 lines stand in the first document
    documents = [Document("2", unlike(2)), Document("3", longer), Document("4", unlike(4)), Document("5", "\n")]
    assert [document.name for document in corpus.without_near_copies(documents)] == ["2", "4"]


def test_split_depends_on_the_name_alone(documents, monkeypatch, tmp_path):
    held_out = {document.name for document in documents if corpus.is_held_out(document.name)}
    assert 1 <= len(held_out) <= 9  # 5 % of 60
    monkeypatch.setattr(corpus, "collect", lambda: documents)
    report = corpus.build(tmp_path / "a")
    train, rest = (corpus.read(tmp_path / "a" / f"{part}.jsonl") for part in ("train", "held_out"))
    assert {document.name for document in rest} == held_out
    assert sorted(train + rest) == sorted(documents)
    assert report["train"]["bytes"] == sum(len(document.text) for document in train)
    assert report == corpus.build(tmp_path / "b") == json.loads((tmp_path / "a" / "corpus.json").read_text())


def test_builtin_documents_show_no_addresses():
    documents = {document.name: document.text for document in corpus.builtin_documents()}
    assert "math.sin(x, /)\n    Return the sine of x" in documents["builtin/math.txt"]
    assert not any("object at 0x7" in text for text in documents.values())


def test_token_ids_have_marks_around_documents(built):
    model = importlib.import_module("tokenizers").Tokenizer.from_file(str(built / "tokenizer" / "tokenizer.json"))
    report = json.loads((built / "tokens.json").read_text())
    for part in ("train", "held_out"):
        ids = np.load(built / f"{part}.npy")
        texts = [document.text for document in corpus.read(built / "corpus" / f"{part}.jsonl")]
        assert ids.dtype == np.uint16 and len(ids) == report[part]["tokens"]
        marks = np.flatnonzero(ids == report["end_of_text_id"])
        assert marks[0] == 0 and marks[-1] == len(ids) - 1
        assert [model.decode(ids[a + 1 : b]) for a, b in itertools.pairwise(marks)] == texts


def test_tokenizer_is_reproducible_and_takes_any_text(documents):
    texts = [document.text for document in documents]
    first, second = (tokenizer.train_tokenizer(texts, 290) for _ in range(2))
    assert first.to_str() == second.to_str()
    for text in ("\0\r\n\t ünïcödé 中文 🎲\n\n    def  f(x_1):  # 12345 ", "  \n  \n\n\n "):
        assert first.decode(first.encode(text).ids) == text
    assert first.encode("if  x:\n        y_1 = a.b\n").tokens[0] in ("if", "i")


def naive_probability(counts, length, units, discounts, context, unit):
    """The same model written as its recursive definition."""
    if length == 0:
        return 1 / units
    context = context[len(context) - length + 1 :]
    shorter = naive_probability(counts, length - 1, units, discounts, context, unit)
    followers = {gram[-1]: count for gram, count in counts[length].items() if gram[:-1] == context}
    total = sum(followers.values())
    if not total:
        return shorter
    taken = {unit: discounts[length][min(count, 3)] for unit, count in followers.items()}
    own = followers.get(unit, 0) - taken.get(unit, 0)
    return own / total + sum(taken.values()) / total * shorter


def naive_counts(ids, length):
    counts = {length: Counter(tuple(ids[i : i + length]) for i in range(len(ids) - length + 1))}
    for shorter in range(length - 1, 0, -1):
        counts[shorter] = Counter(gram[1:] for gram in counts[shorter + 1])
    discounts = {}
    for size, grams in counts.items():
        n = [sum(count == times for count in grams.values()) for times in range(5)]
        if all(n[1:4]):
            y = n[1] / (n[1] + 2 * n[2])
            discounts[size] = [0] + [max(0, k - (k + 1) * y * n[k + 1] / n[k]) for k in (1, 2, 3)]
        else:  # single units, each of which follows many others here
            discounts[size] = [0, 0.5, 1, 1.5]
    return counts, discounts


def test_ngrams_match_their_definition():
    rng = np.random.default_rng(3)
    ids = np.minimum(rng.geometric(0.2, 400), 20).astype(np.uint16)
    model = baselines.NGrams(ids, length=3, bits=5, units=21)
    counts, discounts = naive_counts([int(i) for i in ids], 3)
    text = [*map(int, ids[:5]), 0, 3, 20, 1, 0, 1, 2]
    expected = [
        naive_probability(counts, min(i + 1, 3), 21, discounts, tuple(text[max(0, i - 2) : i]), text[i])
        for i in range(1, len(text))
    ]
    np.testing.assert_allclose(model.probabilities(np.asarray(text)), expected, rtol=1e-12)  # float64 on both sides


def test_ngram_probabilities_sum_to_one():
    rng = np.random.default_rng(4)
    ids = np.minimum(rng.geometric(0.15, 900), 30).astype(np.uint16)
    model = baselines.NGrams(ids, length=4, bits=5, units=32)
    for context in ([1, 2, 1], [31, 31, 31], [1, 30, 2]):
        total = sum(model.probabilities(np.asarray([*context, unit]))[-1] for unit in range(32))
        assert math.isclose(total, 1, rel_tol=1e-12)


def test_baselines_report_all_methods(built):
    report = baselines.compare(built / "corpus", built)
    assert report["held_out_bytes"] == json.loads((built / "tokens.json").read_text())["held_out"]["bytes"]
    assert {"xz -9", "5-gram of tokens", "5-gram of bytes"} <= report["bits_per_byte"].keys()
    assert all(0 < value < 10 for value in report["bits_per_byte"].values())
    assert report == json.loads((built / "baselines.json").read_text())
