"""Text of token streams, and stop strings that straddle tokens."""

import jax.random as jr
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_model import ToyConfig, ToyModel

from kimi_zoo.generation.loop import generate, stream_generate
from kimi_zoo.generation.text import StopStrings, TextStream


class PieceTokenizer:
    """Token `i` stands for `pieces[i]`, some bytes: a character may be spread over tokens."""

    def __init__(self, pieces):
        self.pieces = pieces

    def decode(self, ids):
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", "replace")


BYTES = PieceTokenizer([bytes([i]) for i in range(256)])


@given(st.text(max_size=12), st.lists(st.integers(1, 4), max_size=30))
def test_pieces_join_to_the_text(text, sizes):
    raw, pieces = text.encode(), []
    for size in [*sizes, *[1] * len(raw)]:
        pieces.append(raw[:size])
        raw = raw[size:]
    tokenizer = PieceTokenizer(pieces)
    stream = TextStream(tokenizer)
    shown = [stream.push(token) for token in range(len(pieces))]
    assert "".join(shown) + stream.flush() == text
    if "�" not in text:
        assert "�" not in "".join(shown)


def test_a_character_is_shown_when_it_is_complete():
    stream = TextStream(BYTES)
    assert [stream.push(byte) for byte in "a中é".encode()] == ["a", "", "", "中", "", "é"]
    assert stream.flush() == ""


def test_broken_bytes_are_shown_at_the_end():
    stream = TextStream(BYTES)
    assert [stream.push(byte) for byte in b"a\xe4"] == ["a", ""]
    assert stream.flush() == "�"
    assert stream.flush() == ""


def test_decoding_looks_at_a_short_window_only():
    seen = []

    class Recording:
        def decode(self, ids):
            seen.append(len(ids))
            return BYTES.decode(ids)

    stream = TextStream(Recording())
    for byte in b"hello world " * 10:
        stream.push(byte)
    assert max(seen) <= 2


def stopped(pieces, stops):
    """Pushes one token per piece; returns tokens and text that come out, token by token, and whether it stopped."""
    stream = StopStrings(TextStream(PieceTokenizer([piece.encode() for piece in pieces])), stops)
    out = []
    for token in range(len(pieces)):
        released, rest = stream.push(token, -float(token))
        out.append([(r.token, r.text) for r in released])
        assert all(r.log_prob == -float(r.token) for r in released)
        if rest is not None:
            out.append([("rest", rest)])
            return out, True
    released, rest = stream.flush()
    out.append([*((r.token, r.text) for r in released), ("rest", rest)])
    return out, False


def test_stop_string_over_several_tokens_is_held_back_and_cut():
    out, stop = stopped(["a", "b<", "en", "d>c", "d"], ["<end>"])
    assert stop
    assert out == [
        [(0, "a")],
        [(1, "b")],
        [],
        [],
        [("rest", "")],
    ]  # the third and fourth token hold nothing but the stop string


def test_possible_stop_that_does_not_come_true_is_shown():
    out, stop = stopped(["a<", "en", "x"], ["<end>"])
    assert not stop
    assert out == [[(0, "a")], [], [(1, "<en"), (2, "x")], [("rest", "")]]


def test_text_held_back_is_shown_at_the_end():
    out, stop = stopped(["a", "<e"], ["<end>"])
    assert not stop
    assert out == [[(0, "a")], [], [(1, "<e"), ("rest", "")]]


def test_earliest_of_several_stops_counts():
    out, stop = stopped(["xaYbZ"], ["bZ", "aY"])
    assert stop
    assert out == [[(0, "x")], [("rest", "")]]


def test_overlapping_beginnings():
    out, stop = stopped(["a", "a", "a", "b"], ["aab"])
    assert stop
    assert out == [[], [], [(0, "a")], [], [("rest", "")]]


def test_text_held_back_from_an_earlier_token_is_shown_at_the_stop():
    out, stop = stopped(["<b", "<<"], ["<<", "ba"])
    assert stop
    assert out == [[(0, "<")], [], [("rest", "b")]]


@given(
    st.lists(st.text("ab<", min_size=1, max_size=3), min_size=1, max_size=12),
    st.lists(st.text("ab<", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_against_the_whole_text(pieces, stops):
    out, stop = stopped(pieces, stops)
    released = [item for step in out for item in step]
    shown = "".join(text for _, text in released)
    whole = "".join(pieces)
    # the first stop string to be complete ends the row; at its token the earliest in the text counts
    for end in range(1, len(pieces) + 1):
        found = [at for at in ("".join(pieces[:end]).find(text) for text in stops) if at >= 0]
        if found:
            assert stop
            assert shown == whole[: min(found)]
            starts = [len("".join(pieces[:i])) for i in range(end)]
            assert [token for token, _ in released] == [i for i, at in enumerate(starts) if at < min(found)] + ["rest"]
            return
    assert not stop
    assert shown == whole
    assert [token for token, _ in released] == [*range(len(pieces)), "rest"]


@pytest.fixture
def model(getkey):
    return ToyModel(key=getkey(), config=ToyConfig(vocab_size=23))


LETTERS = PieceTokenizer([bytes([97 + i]) for i in range(23)])


def collect(stream, rows):
    tokens, texts, reasons = [[] for _ in range(rows)], [""] * rows, [None] * rows
    for event in stream:
        assert reasons[event.row] is None
        if event.token is not None:
            tokens[event.row].append(event.token)
        texts[event.row] += event.text
        reasons[event.row] = event.finish_reason
    return tokens, texts, reasons


@pytest.mark.parametrize("steps", [1, 5])
def test_generation_stops_row_by_row(model, steps):
    prompts = [[3, 1, 4], [1, 5, 9, 2]]
    free = generate(model, prompts, max_new_tokens=14)
    texts = [LETTERS.decode(row) for row in free]
    stop = texts[0][3:6]
    ends = [text.find(stop) if stop in text else 14 for text in texts]
    settings = dict(max_new_tokens=14, stop=stop, tokenizer=LETTERS, steps_per_dispatch=steps)
    expected = [row[:end] for row, end in zip(free, ends, strict=True)]
    assert generate(model, prompts, **settings) == expected
    tokens, shown, reasons = collect(stream_generate(model, prompts, **settings), 2)
    assert tokens == expected
    assert shown == [text[:end] for text, end in zip(texts, ends, strict=True)]
    assert reasons[0] == "stop_string"
    assert len(set(ends)) == 2


def test_cache_after_a_stop_string_is_refused(model):
    free = generate(model, [[3, 1, 4]], max_new_tokens=9)[0]
    stream = stream_generate(model, [[3, 1, 4]], max_new_tokens=9, stop=LETTERS.decode(free[4:6]), tokenizer=LETTERS)
    list(stream)
    with pytest.raises(RuntimeError, match="ended at a stop string"):
        _ = stream.cache


def test_streamed_text_of_eos_and_length(model):
    free = generate(model, [[3, 1, 4]], max_new_tokens=9)[0]
    first = free.index(free[4])
    tokens, texts, reasons = collect(stream_generate(model, [[3, 1, 4]], max_new_tokens=9, tokenizer=LETTERS), 1)
    assert (tokens, texts, reasons) == ([free], [LETTERS.decode(free)], ["length"])
    stream = stream_generate(model, [[3, 1, 4]], max_new_tokens=9, eos_ids=free[4], stop="?", tokenizer=LETTERS)
    tokens, texts, reasons = collect(stream, 1)
    assert (tokens, texts, reasons) == ([free[: first + 1]], [LETTERS.decode(free[:first])], ["eos"])


def test_stop_string_that_is_the_first_token(getkey):
    model = ToyModel(key=jr.key(3))
    first = generate(model, [[3]], max_new_tokens=1)[0]
    events = list(stream_generate(model, [[3]], stop=LETTERS.decode(first), tokenizer=LETTERS))
    assert [(e.token, e.text, e.finish_reason) for e in events] == [(None, "", "stop_string")]
