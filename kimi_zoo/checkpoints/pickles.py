"""Reads pickles without running anything in them.

A pickle is a program for a small stack machine. Python's own machine imports what the program names and calls it; this
one never imports or calls: plain containers are built, objects of known harmless classes become `StandIn`s that only
hold what was said about them, and any other name is refused.
"""

import codecs
import struct
from collections.abc import Callable, Mapping
from typing import Any, no_type_check  # of checks at run time, as the tests make them: all this is called very often

from kimi_zoo.checkpoints.files import CheckpointError
from kimi_zoo.checkpoints.pickle_names import PLAIN, Maker, Name, StandIn, UnsafePickle, check_key, check_name

__all__ = ["Name", "StandIn", "UnsafePickle", "read_pickle"]

MAX_PICKLE_BYTES = 1 << 30
MAX_OPERATIONS = 40_000_000  # each makes at most one small object, so this bounds memory


def read_pickle(
    data: bytes,
    where: str,
    *,
    makers: Mapping[str, Maker] | None = None,
    persistent: Callable[[Any], Any] | None = None,
    start: int = 0,
) -> tuple[Any, int]:
    """The value of a pickle that begins at `start`, and the position behind it.

    **Arguments:**

    - `where`: what errors call the pickle.
    - `makers`: functions that make a value from the arguments of a named class or function, beside `PLAIN`.
    - `persistent`: makes a value from what the pickle says of something stored outside of it.

    **Raises:** `UnsafePickle` for a name that is not known to be harmless; `CheckpointError` for damage.
    """
    if len(data) - start > MAX_PICKLE_BYTES:
        raise CheckpointError(f"{where} is a pickle of {len(data) - start:,} bytes; more than 1 GiB is not read.")
    machine = _Machine(data, where, {**PLAIN, **(makers or {})}, persistent, start)
    try:
        return machine.run(), machine.position
    except CheckpointError:
        raise
    except (IndexError, KeyError, ValueError, TypeError, struct.error, OverflowError, AttributeError) as error:
        reason = f"{type(error).__name__} {error!s:.80}"
        raise CheckpointError(
            f"{where} is damaged: not a complete pickle (byte {machine.position}: {reason})."
        ) from None
    except (RecursionError, MemoryError) as error:
        raise CheckpointError(f"{where} cannot be read: {type(error).__name__}.") from None


_MARK = object()


@no_type_check
class _Machine:
    """One run over one pickle."""

    def __init__(
        self, data: bytes, where: str, makers: Mapping[str, Maker], persistent: Callable | None, start: int
    ) -> None:
        self.data, self.where, self.makers, self.persistent, self.position = data, where, makers, persistent, start
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        data, operations = self.data, _OPERATIONS
        for _ in range(MAX_OPERATIONS):
            code = data[self.position]
            self.position += 1
            if code == 0x2E:  # STOP
                return self.pop()
            operation = operations.get(code)
            if operation is None:
                raise ValueError(f"operation {code:#04x} is not known")
            operation(self)
        raise CheckpointError(f"{self.where} is a pickle of more than {MAX_OPERATIONS:,} operations; not read.")

    # reading the program

    def take(self, size: int) -> bytes:
        end = self.position + size
        if size < 0 or end > len(self.data):
            raise ValueError("cut off")
        part = self.data[self.position : end]
        self.position = end
        return part

    def number(self, layout: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def line(self) -> bytes:
        end = self.data.index(b"\n", self.position)
        part = self.data[self.position : end]
        self.position = end + 1
        return part

    def text(self) -> str:
        return self.line().decode()

    # the stack

    def pop(self) -> Any:
        value = self.stack.pop()
        if value is _MARK:
            raise ValueError("a mark where a value is expected")
        return value

    def pop_mark(self) -> list[Any]:
        place = len(self.stack) - 1
        while self.stack[place] is not _MARK:
            place -= 1
            if place < 0:
                raise ValueError("no mark")
        items = self.stack[place + 1 :]
        del self.stack[place:]
        return items

    def name(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise ValueError("a name that is not text")
        self.stack.append(check_name(module, name, self.where))

    def make(self, kind: Any, args: Any) -> Any:
        """What stands for `kind(*args)`."""
        if not isinstance(kind, Name) or not isinstance(args, tuple):
            raise ValueError(f"a call of {type(kind).__name__}")
        if str(kind) in ("copyreg._reconstructor", "copy_reg._reconstructor") and args and isinstance(args[0], Name):
            return StandIn(args[0], ())
        maker = self.makers.get(str(kind))
        return StandIn(kind, args) if maker is None else maker(*args)

    def build(self) -> None:
        state = self.pop()
        target = self.stack[-1]
        if isinstance(target, StandIn):
            target.state = state
        elif not isinstance(target, dict | list | set):  # attributes of an OrderedDict and the like do not matter
            raise ValueError(f"state for a {type(target).__name__}")

    def append(self, items: list[Any]) -> None:
        target = self.stack[-1]
        into = target.items if isinstance(target, StandIn) else target
        if not isinstance(into, list):
            raise ValueError(f"items for a {type(target).__name__}")
        into.extend(items)

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        pairs = zip(items[::2], items[1::2], strict=True)
        if isinstance(target, StandIn):
            target.items.extend(pairs)
        elif isinstance(target, dict):
            for key, value in pairs:
                if check_key(key) in target:
                    raise ValueError(f"the key {str(key)[:80]!r} appears twice")
                target[key] = value
        else:
            raise ValueError(f"items for a {type(target).__name__}")

    def add_items(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], set):
            raise ValueError("members of something else than a set")
        self.stack[-1].update(map(check_key, items))

    def outside(self, reference: Any) -> None:
        if self.persistent is None:
            raise ValueError("a reference to something outside")
        self.stack.append(self.persistent(reference))

    def remember(self, place: int) -> None:
        if self.stack[-1] is _MARK:
            raise ValueError("a mark where a value is expected")
        self.memo[place] = self.stack[-1]


def _push(value: Callable[[_Machine], Any]) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(value(m))


def _long(size: Callable[[_Machine], int]) -> Callable[[_Machine], None]:
    return _push(lambda m: int.from_bytes(m.take(size(m)), "little", signed=True))


@no_type_check
def _integer(m: _Machine) -> None:
    text = m.text()
    m.stack.append({"00": False, "01": True}.get(text) if text in ("00", "01") else int(text))


@no_type_check
def _string(m: _Machine) -> None:
    text = m.line()
    if len(text) < 2 or text[:1] != text[-1:] or text[:1] not in (b"'", b'"'):
        raise ValueError("a string without quotes")
    m.stack.append(codecs.escape_decode(text[1:-1])[0].decode("latin1"))


@no_type_check
def _call(m: _Machine) -> None:
    args = m.pop()
    kind = m.pop()
    m.stack.append(m.make(kind, args))


@no_type_check
def _call_with_keywords(m: _Machine) -> None:
    keywords, args = m.pop(), m.pop()
    kind = m.pop()
    made = m.make(kind, args)
    if keywords and isinstance(made, StandIn):
        made.state = dict(keywords)
    m.stack.append(made)


@no_type_check
def _object(m: _Machine) -> None:
    kind, *args = m.pop_mark()
    m.stack.append(m.make(kind, tuple(args)))


@no_type_check
def _instance(m: _Machine) -> None:
    module, name, args = m.text(), m.text(), m.pop_mark()
    m.stack.append(m.make(check_name(module, name, m.where), tuple(args)))


@no_type_check
def _global_from_stack(m: _Machine) -> None:
    name, module = m.pop(), m.pop()
    m.name(module, name)


@no_type_check
def _dict(m: _Machine) -> None:
    items = m.pop_mark()
    m.stack.append({})
    m.set_items(items)


def _top(count: int) -> Callable[[_Machine], None]:
    def make(m: _Machine) -> None:
        items = [m.pop() for _ in range(count)]
        m.stack.append(tuple(reversed(items)))

    return make


@no_type_check
def _pair(m: _Machine) -> None:
    value, key = m.pop(), m.pop()
    m.set_items([key, value])


@no_type_check
def _protocol(m: _Machine) -> None:
    if m.take(1)[0] > 5:
        raise ValueError("a protocol above 5")


def _text(size: str) -> Callable[[_Machine], None]:
    return _push(lambda m: m.take(m.number(size)).decode("utf-8", "surrogatepass"))


def _raw(size: str) -> Callable[[_Machine], None]:
    return _push(lambda m: m.take(m.number(size)))


_OPERATIONS: dict[int, Callable[[_Machine], Any]] = {
    ord(code): operation
    for code, operation in {
        "\x80": _protocol,
        "\x95": lambda m: m.take(8),  # FRAME: how much belongs together, of no use here
        "(": lambda m: m.stack.append(_MARK),
        "0": lambda m: m.stack.pop(),
        "1": lambda m: m.pop_mark(),
        "2": _push(lambda m: m.stack[-1]),
        "N": _push(lambda m: None),
        "\x88": _push(lambda m: True),
        "\x89": _push(lambda m: False),
        "I": _integer,
        "L": _push(lambda m: int(m.text().removesuffix("L"))),
        "J": _push(lambda m: m.number("<i")),
        "K": _push(lambda m: m.take(1)[0]),
        "M": _push(lambda m: m.number("<H")),
        "\x8a": _long(lambda m: m.take(1)[0]),
        "\x8b": _long(lambda m: m.number("<i")),
        "F": _push(lambda m: float(m.text())),
        "G": _push(lambda m: m.number(">d")),
        "S": _string,
        "T": _push(lambda m: m.take(m.number("<i")).decode("latin1")),
        "U": _push(lambda m: m.take(m.take(1)[0]).decode("latin1")),
        "B": _raw("<I"),
        "C": _raw("<B"),
        "\x8e": _raw("<Q"),
        "\x96": _raw("<Q"),
        "V": _push(lambda m: m.line().decode("raw-unicode-escape")),
        "X": _text("<I"),
        "\x8c": _text("<B"),
        "\x8d": _text("<Q"),
        "]": _push(lambda m: []),
        ")": _push(lambda m: ()),
        "}": _push(lambda m: {}),
        "\x8f": _push(lambda m: set()),
        "l": _push(lambda m: m.pop_mark()),
        "t": _push(lambda m: tuple(m.pop_mark())),
        "d": _dict,
        "\x91": _push(lambda m: frozenset(map(check_key, m.pop_mark()))),
        "\x85": _top(1),
        "\x86": _top(2),
        "\x87": _top(3),
        "a": lambda m: m.append([m.pop()]),
        "e": lambda m: m.append(m.pop_mark()),
        "s": _pair,
        "u": lambda m: m.set_items(m.pop_mark()),
        "\x90": lambda m: m.add_items(m.pop_mark()),
        "c": lambda m: m.name(m.text(), m.text()),
        "\x93": _global_from_stack,
        "R": _call,
        "\x81": _call,
        "\x92": _call_with_keywords,
        "o": _object,
        "i": _instance,
        "b": lambda m: m.build(),
        "P": lambda m: m.outside(m.text()),
        "Q": lambda m: m.outside(m.pop()),
        "p": lambda m: m.remember(int(m.text())),
        "q": lambda m: m.remember(m.take(1)[0]),
        "r": lambda m: m.remember(m.number("<I")),
        "\x94": lambda m: m.remember(len(m.memo)),
        "g": _push(lambda m: m.memo[int(m.text())]),
        "h": _push(lambda m: m.memo[m.take(1)[0]]),
        "j": _push(lambda m: m.memo[m.number("<I")]),
    }.items()
}
