"""What commands share in talking to a terminal: messages, numbers, tables, a status line."""

import os
import shutil
import sys
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

# Text of a model or of a file may hold codes that a terminal would obey: they are shown, not sent.
_CONTROL = {code: "�" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


@runtime_checkable
class Stream(Protocol):
    """A file that may be a terminal."""

    def isatty(self) -> bool:
        """Whether it is one."""
        ...


class UsageError(Exception):
    """The command line or its input cannot be used; the message says why and what to do."""


def complain(message: str) -> None:
    """Prints one message on stderr."""
    print(f"kimi-zoo: {printable(message)}", file=sys.stderr)


def printable(text: str) -> str:
    """`text` with every control character but line ends and tabs replaced by U+FFFD."""
    return text.translate(_CONTROL)


def one_line(text: str) -> str:
    """As `printable`, with line ends and tabs replaced too."""
    return printable(text).translate({ord("\n"): "�", ord("\t"): "�"})


def is_terminal(stream: Stream) -> bool:
    """Whether a person reads the stream as it is written."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def dim(text: str) -> str:
    """`text` in faint letters; unchanged where `NO_COLOR` is set."""
    return text if os.environ.get("NO_COLOR") else f"\x1b[2m{text}\x1b[22m"


def drop_output() -> None:
    """Sends what is left of stdout nowhere, so that the interpreter does not complain when it closes it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def line_width(stream: Stream) -> int | None:
    """Columns of the terminal; `None` if the stream is a file or a pipe, whose lines must not be cut."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def byte_text(count: int) -> str:
    """`1234567` -> `"1.23 MB"` (powers of 1000)."""
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{count} B" if unit == "B" else f"{value:.3g} {unit}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, width: int | None = None) -> str:
    """Text in columns: the first left-aligned, the others right-aligned. With `width`, the first is cut in its middle
    so that lines fit."""
    rows = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    if width is not None:
        widths[0] = min(widths[0], max(12, width - sum(widths[1:]) - 2 * (len(widths) - 1)))
    lines = []
    for first, *rest in (header, *rows):
        cells = [shorten(first, widths[0]).ljust(widths[0])]
        cells += [cell.rjust(size) for cell, size in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def shorten(text: str, width: int) -> str:
    """`text` with an ellipsis in its middle if it is longer than `width`."""
    if len(text) <= width:
        return text
    left = (width - 1) // 2
    return text[:left] + "…" + text[len(text) - (width - 1 - left) :]


class Status:
    """A line on stderr that says what is going on, on a terminal only; it disappears again, at the latest on exit."""

    def __init__(self, *, wanted: bool):
        self._wanted = wanted and is_terminal(sys.stderr)
        self._shown = False

    def __enter__(self) -> "Status":
        return self

    def __exit__(self, *_error: object) -> None:
        self.clear()

    def show(self, text: str) -> None:
        """Replaces the line."""
        if self._wanted:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
            self._shown = True

    def clear(self) -> None:
        """Removes the line."""
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._shown = False
