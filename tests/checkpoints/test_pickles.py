"""The pickle reader: what it reads, what it refuses, and that damage is always its own error."""

import argparse
import collections
import contextlib
import pathlib
import pickle
import random
import struct
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_zoo.checkpoints.files import CheckpointError
from kimi_zoo.checkpoints.pickle_writing import Made, Pairs, instance, write_pickle
from kimi_zoo.checkpoints.pickles import Name, StandIn, UnsafePickle, read_pickle

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.text(), st.integers()), inner, max_size=4)
        | st.sets(st.integers() | st.text(), max_size=4)
        | st.frozensets(st.integers(), max_size=4)
    ),
    max_leaves=12,
)


def load(data):
    value, end = read_pickle(data, "it")
    assert end == len(data)
    return value


@given(value=PLAIN, protocol=st.integers(0, 5))
@settings(max_examples=150, deadline=None)
def test_plain_values_come_back(value, protocol):
    assert load(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", range(6))
def test_objects_become_stand_ins(protocol):
    namespace = argparse.Namespace(layers=3, nested={"a": (1, 2)}, path=pathlib.PurePosixPath("a/b"))
    found = load(pickle.dumps({"args": namespace, "ordered": collections.OrderedDict(x=1)}, protocol))
    args = found["args"]
    assert isinstance(args, StandIn) and args.kind == Name("argparse", "Namespace")
    assert args.fields["layers"] == 3 and args.fields["nested"] == {"a": (1, 2)}
    assert found["ordered"] == {"x": 1}


class Call:
    """Pickles as a call of anything."""

    def __init__(self, function, *args):
        self.function, self.args = function, args

    def __reduce__(self):
        return self.function, self.args


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "call",
    [
        Call(open, "PWNED", "w"),
        Call(eval, "open('PWNED', 'w')"),
        Call(exec, "open('PWNED', 'w')"),
        Call(__import__, "os"),
        Call(getattr, "x", "y"),
        Call(pathlib.Path.touch, pathlib.Path("PWNED")),
        Call(time.sleep, 1000),
    ],
    ids=lambda call: call.function.__name__,
)
def test_calls_are_refused_and_never_made(call, protocol, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnsafePickle, match="Nothing of it was run"):
        read_pickle(pickle.dumps({"weights": [1, call]}, protocol), "it")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("posix", "system"),
        ("subprocess", "Popen"),
        ("builtins", "open"),
        ("builtins", "getattr"),
        ("torch", "load"),
        ("torch.hub", "load"),
        ("torch.utils.cpp_extension", "load_inline"),
        ("numpy", "load"),
        ("numpy.testing", "runstring"),
        ("torch.serialization", "load"),
        ("functools", "reduce"),
        ("operator", "attrgetter"),
        ("types", "FunctionType"),
        ("pip", "main"),
        ("mine", "Config"),
    ],
)
@pytest.mark.parametrize("opcode", ["c", "stack", "i"])
def test_names_are_refused(module, name, opcode):
    text = lambda value: b"\x8c" + bytes([len(value)]) + value.encode()
    data = {
        "c": f"c{module}\n{name}\n.".encode(),
        "stack": b"\x80\x04" + text(module) + text(name) + b"\x93.",
        "i": f"(i{module}\n{name}\n.".encode(),
    }[opcode]
    with pytest.raises(UnsafePickle, match=rf"names '{module}\.{name}'"):
        read_pickle(data, "it")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "IndexError"),
        (b"N", "IndexError"),
        (b"\x80\x06N.", "protocol above 5"),
        (b"\xff.", "0xff is not known"),
        (b"t.", "no mark|IndexError"),
        (b"(.", "a mark"),
        (b"h\x05.", "KeyError"),
        (b"X\xff\xff\xff\x7fabc.", "cut off"),
        (b"\x96" + struct.pack("<Q", 2**62) + b".", "cut off"),
        (b"\x8b\xff\xff\xff\xff.", "cut off"),
        (b"}(K\x01K\x02K\x01K\x03u.", "appears twice"),
        (b"}(]K\x02u.", "a list as a key"),
        (b"}(K\x01u.", "zip"),
        (b"K\x01K\x02a.", "items for a int"),
        (b"cargparse\nNamespace\nK\x01R.", "a call of Name"),
        (b"K\x01)R.", "a call of int"),
        (b"U\x03abcQ.", "outside"),
        (b"cbuiltins\nbytearray\nJ\x00\x00\x00\x7f\x85R.", "bytes of something else"),
        (b"cbuiltins\nlist\nJ\x00\x00\x00\x7f\x85R.", "list of a int"),
        (b"I" + b"9" * 5000 + b"\n.", "ValueError"),
        (b"}(" + b")" + b"\x85" * 200_000 + b"Nu.", "tuple as a key"),
        (b"\x8f(" + b")" + b"\x85" * 200_000 + b"\x90.", "tuple as a key"),
    ],
    ids=lambda value: value[:12].hex() if isinstance(value, bytes) else None,
)
def test_damage_is_one_error(data, why):
    with pytest.raises(CheckpointError, match=f"it is damaged.*(?:{why})"):
        read_pickle(data, "it")


def test_memo_numbers_cost_no_memory():
    assert load(b"Nr\xff\xff\xff\xff.") is None  # Python's own machine makes room for four thousand million entries


def test_random_programs_end_in_a_value_or_our_error():
    """Valid pickles with random changes, and random bytes."""
    draw = random.Random(7)
    seeds = [
        pickle.dumps({"a": [1, 2.5, "text", (1, 2, 3)], "b": argparse.Namespace(x={1, 2}, y=b"bytes")}, protocol)
        for protocol in range(6)
    ]
    for turn in range(6000):
        data = bytearray(draw.choice(seeds))
        if turn % 10 == 0:
            data = bytearray(draw.randbytes(draw.randrange(80)))
        for _ in range(draw.randrange(1, 5)):
            place = draw.randrange(len(data) + 1)
            change = draw.randrange(4)
            if change == 0:
                data[place : place + 1] = draw.randbytes(1)
            elif change == 1:
                del data[place:]
            elif change == 2:
                data[place:place] = draw.randbytes(draw.randrange(4))
            else:
                data[place:place] = data[: draw.randrange(20)]
        with contextlib.suppress(CheckpointError):
            read_pickle(bytes(data), "it")


WRITABLE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=12,
)


@given(value=WRITABLE)
@settings(max_examples=100, deadline=None)
def test_what_is_written_is_read_by_python(value):
    assert pickle.loads(write_pickle(value)) == value


def test_only_what_can_be_read_is_written():
    with pytest.raises(TypeError, match="set cannot be written"):
        write_pickle({1})


def test_objects_are_written():
    namespace = Made(Name("argparse", "Namespace"), (), {"a": 1, "big": 2**70, "small": -300}, new=True)
    path = Made(Name("pathlib", "PurePosixPath"), ("a", "b"))
    found = pickle.loads(write_pickle({"args": namespace, "path": path, "pairs": Pairs([(path, 1)])}))
    assert found["args"] == argparse.Namespace(a=1, big=2**70, small=-300)
    assert found["path"] == pathlib.PurePosixPath("a/b") and list(found["pairs"].values()) == [1]
    assert load(write_pickle(instance("torch", "Storage", size=3))).fields == {"size": 3}
