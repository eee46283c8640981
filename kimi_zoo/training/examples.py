"""Rows of text, JSON and Parquet files -> tokens, and which of them are learned.

A row has `text` (all of it is learned), `prompt` and `completion` (the completion), or `messages` (what the assistant
wrote, and the token that ends each of its turns).
"""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32

from kimi_zoo.tokenizers import Tokenizer

SUFFIXES = (".txt", ".jsonl", ".json", ".parquet")
KINDS = (("text",), ("prompt", "completion"), ("messages",))
SHOWN = 20  # problems named in one error


class DataError(ValueError):
    """Training data that cannot be used; the message names files and lines."""


@dataclasses.dataclass(frozen=True)
class Example:
    """The tokens of one row, which of them are learned, and where the row stands (`rows.jsonl:3`)."""

    tokens: Int32[np.ndarray, " length"]
    learned: Bool[np.ndarray, " length"]
    where: str


def data_files(paths: Iterable[str | Path]) -> list[Path]:
    """The data files that the paths name; folders stand for all data files below them, in the order of their names.

    **Raises:** `DataError` for a path that does not exist, has another suffix, or holds no data file.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            found = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
            if not found:
                raise DataError(f"{path} holds no data: no file ends in {', '.join(SUFFIXES)}.")
            files += found
        elif not path.exists():
            raise DataError(f"{path} does not exist.")
        elif path.suffix not in SUFFIXES:
            raise DataError(f"{path} is not a data file by its name: give one that ends in {', '.join(SUFFIXES)}.")
        else:
            files.append(path)
    if not files:
        raise DataError("No data: give at least one file or folder.")
    return files


def read_examples(files: Iterable[Path], tokenizer: Tokenizer, problems: list[str]) -> Iterator[Example]:
    """Yields the example of every row, reading as it goes. Rows that cannot be used are told in `problems`; that the
    tokenizer has no chat template, once."""
    told = False
    for file in files:
        for where, row in _rows(file, problems):
            if tokenizer.chat_template is None and isinstance(row, Mapping) and _kinds(row) == [("messages",)]:
                if not told:
                    told = True
                    problems.append(
                        f"{where}: `messages` need a chat template, and the model's folder has none (rows of them are "
                        "told of once): put its publisher's chat_template.jinja there, or give `prompt` and "
                        "`completion`"
                    )
                continue
            try:
                yield encode_row(row, tokenizer, where)
            except ValueError as error:
                problems.append(f"{where}: {error}")


def encode_row(row: Any, tokenizer: Tokenizer, where: str = "row") -> Example:
    """The tokens of a row: begin-of-text where the tokenizer has it, the text, and the token that ends it.

    Prompt and completion are encoded apart, as they are when the model is used: no token spans both.

    **Raises:** `ValueError` for a row of none or several of the known kinds, or with a value of the wrong type.
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"expected an object with {_kinds_text()}; got {type(row).__name__}")
    kinds = _kinds(row)
    if len(kinds) != 1 or any(row.get(name) is None for name in kinds[0]):
        raise ValueError(f"expected {_kinds_text()}; got the keys {sorted(map(str, row))}")
    if kinds[0] == ("messages",):
        messages = row["messages"]
        if not isinstance(messages, list | tuple) or not all(isinstance(message, Mapping) for message in messages):
            raise ValueError("`messages` must be a list of objects with `role` and `content`")
        tokens, learned = tokenizer.encode_conversation(messages)
    else:
        texts = [row[name] for name in kinds[0]]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{' and '.join(f'`{name}`' for name in kinds[0])} must be text")
        pieces = [tokenizer.encode(text) for text in texts]
        begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        pieces[-1] = pieces[-1] + list(tokenizer.eos_ids[:1])
        tokens = [*begin, *(token for piece in pieces for token in piece)]
        learned = [False] * (len(tokens) - len(pieces[-1])) + [True] * len(pieces[-1])
    return Example(np.asarray(tokens, np.int32), np.asarray(learned, bool), where)


def _kinds(row: Mapping[Any, Any]) -> list[tuple[str, ...]]:
    return [kind for kind in KINDS if any(row.get(name) is not None for name in kind)]


def _kinds_text() -> str:
    return " or ".join(" and ".join(f"`{name}`" for name in kind) for kind in KINDS)


def _rows(file: Path, problems: list[str]) -> Iterator[tuple[str, Any]]:
    """Every row of a file, and where it stands. Empty lines are passed over."""
    try:
        if file.suffix == ".parquet":
            yield from _parquet_rows(file)
        elif file.suffix == ".jsonl":
            yield from _lines(file, problems)
        else:
            text = _decode(file.read_bytes(), file.name, problems)
            if text is not None and not text.strip():
                problems.append(f"{file}: is empty")
            elif text is not None and file.suffix == ".txt":
                yield str(file), {"text": text}
            elif text is not None:
                rows = _parse(text, str(file), problems)
                rows = rows if isinstance(rows, list) else [] if rows is None else [rows]
                yield from ((f"{file}, row {number}", row) for number, row in enumerate(rows, start=1))
    except OSError as error:
        problems.append(f"{file}: cannot be read: {error.strerror or error}")


def _lines(file: Path, problems: list[str]) -> Iterator[tuple[str, Any]]:
    seen = False
    with open(file, "rb") as stream:
        for number, line in enumerate(stream, start=1):
            where = f"{file}:{number}"
            text = _decode(line, where, problems)
            if text is None or not text.strip():
                continue
            seen = True
            row = _parse(text, where, problems)
            if row is not None:
                yield where, row
    if not seen:
        problems.append(f"{file}: has no rows")


def _decode(data: bytes, where: str, problems: list[str]) -> str | None:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        problems.append(f"{where}: is not UTF-8 text (byte {error.start}: 0x{data[error.start]:02x})")
        return None


def _parse(text: str, where: str, problems: list[str]) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        problems.append(f"{where}: is not JSON: {error.msg} (line {error.lineno}, column {error.colno})")
    except RecursionError:
        problems.append(f"{where}: is not usable JSON: nested too deeply")
    return None


def _parquet_rows(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow.lib
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{file}: Parquet files are read by pyarrow: pip install 'kimi-zoo[parquet]'.") from None
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            number = 0
            for batch in table.iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{file}, row {number}", row
    except pyarrow.lib.ArrowException as error:
        raise DataError(f"{file} is not a readable Parquet file: {error}.") from None
