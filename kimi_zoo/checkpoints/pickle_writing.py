"""Writes pickles of objects whose classes need not be importable here: what `pickles.py` reads, the other way round."""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, no_type_check  # of checks at run time: these are called very often

from kimi_zoo.checkpoints.pickles import Name


@dataclass(frozen=True, eq=False)
class Made:
    """`kind(*args)`, made by calling a function or class (`new`: without its `__init__`), then given `state`."""

    kind: Name
    args: tuple = ()
    state: Any = None
    new: bool = False


@dataclass(frozen=True, eq=False)
class Outside:
    """A reference to something that is stored outside the pickle."""

    reference: tuple


@dataclass(frozen=True, eq=False)
class Pairs:
    """A dictionary whose keys need not be hashable here."""

    items: list[tuple[Any, Any]] = field(default_factory=list)


def instance(module: str, name: str, **state: Any) -> Made:
    """An object with these attributes, made without its `__init__`, as dataclasses are pickled."""
    return Made(Name(module, name), (), state or None, new=True)


def write_pickle(value: Any, replace: Callable[[Any], Any] = lambda value: value) -> bytes:
    """A pickle, protocol 2, of plain containers, numbers, text, `Name`, `Made`, `Outside` and `Pairs`.

    **Arguments:** `replace`: called for every value first; gives what to write in its place.

    **Raises:** `TypeError` for anything else.
    """
    out: list[bytes] = [b"\x80\x02"]
    _write(value, out.append, replace)
    out.append(b".")
    return b"".join(out)


@no_type_check
def _write(value: Any, put: Callable[[bytes], None], replace: Callable[[Any], Any]) -> None:
    value = replace(value)
    write = lambda item: _write(item, put, replace)
    if value is None or isinstance(value, bool):
        put({None: b"N", True: b"\x88", False: b"\x89"}[value])
    elif isinstance(value, int):
        put(_integer(value))
    elif isinstance(value, float):
        put(b"G" + struct.pack(">d", value))
    elif isinstance(value, str):
        text = value.encode("utf-8", "surrogatepass")
        put(b"X" + struct.pack("<I", len(text)) + text)
    elif isinstance(value, tuple):
        put(b"(")
        for item in value:
            write(item)
        put(b"t")
    elif isinstance(value, list):
        put(b"](")
        for item in value:
            write(item)
        put(b"e")
    elif isinstance(value, Mapping | Pairs):
        put(b"}(")
        for key, item in value.items if isinstance(value, Pairs) else value.items():
            write(key)
            write(item)
        put(b"u")
    elif isinstance(value, Name):
        put(b"c" + f"{value.module}\n{value.name}\n".encode())
    elif isinstance(value, Outside):
        write(value.reference)
        put(b"Q")
    elif isinstance(value, Made):
        write(value.kind)
        write(value.args)
        put(b"\x81" if value.new else b"R")
        if value.state is not None:
            write(value.state)
            put(b"b")
    else:
        raise TypeError(f"{type(value).__name__} cannot be written")


@no_type_check
def _integer(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes([value])
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    size = value.bit_length() // 8 + 1
    return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)
