"""Tokenised examples on disk: written once in a pass over the data, then mapped into memory and read in any order."""

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int, Int32

from kimi_zoo.tokenizers import Tokenizer
from kimi_zoo.training.examples import SHOWN, DataError, data_files, read_examples

Overlong = Literal["split", "truncate", "drop"]


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Examples in one array each of tokens and of what is learned; example `i` is `[offsets[i], offsets[i + 1])`.

    `counts` tells what became of the rows: `rows`, `examples`, `tokens`, `learned_tokens`, `overlong`, `unlearnable`.
    """

    tokens: Int32[np.ndarray, " total"]
    learned: Bool[np.ndarray, " total"]
    offsets: Int[np.ndarray, " examples_plus_1"]
    counts: dict[str, int]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Int[np.ndarray, " examples"]:
        """Tokens in each example."""
        return np.diff(self.offsets)

    def example(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Its tokens, and which of them are learned."""
        part = slice(self.offsets[index], self.offsets[index + 1])
        return self.tokens[part], self.learned[part]


def prepare(
    paths: Iterable[str | Path],
    tokenizer: Tokenizer,
    folder: Path,
    *,
    seq_length: int,
    overlong: Overlong = "split",
    progress: Callable[[int], None] = lambda tokens: None,
    warn: Callable[[str], None] = lambda message: None,
) -> Dataset:
    """Tokenises all rows of the data files into `folder`, or takes what is there from the same files and options.

    Only one row is in memory at a time.

    **Arguments:**

    - `seq_length`: the longest example. Longer ones are split into several, truncated, or dropped; all are counted.
    - `progress`: called with the number of tokens written so far; `warn`: with what should be known.

    **Raises:** `DataError` that names every file and line which cannot be used (the first 20), or if there is nothing
    to learn.
    """
    files = data_files(paths)
    mark = _fingerprint(files, tokenizer, seq_length, overlong)
    if not _prepared(folder, mark):
        _write(files, tokenizer, folder, mark, seq_length, overlong, progress)
    dataset = _load(folder)
    counts = dataset.counts
    if counts["overlong"]:
        done = {"split": "were split", "truncate": "were cut off", "drop": "were dropped"}[overlong]
        warn(f"{counts['overlong']} of {counts['rows']} rows are longer than {seq_length} tokens and {done}.")
    if counts["unlearnable"]:
        named = ", ".join(json.loads((folder / "unlearnable.json").read_text()))
        warn(f"{counts['unlearnable']} of {counts['rows']} rows have nothing to learn and were left out: {named}.")
    return dataset


def split(count: int, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices for training and for validation: a share drawn at random, at least one example of each if there are two.

    A fraction of 0 keeps everything for training.
    """
    order = np.random.default_rng([seed, 0x5EED]).permutation(count)
    held = min(max(round(count * fraction), 1), count - 1) if fraction > 0 else 0
    return np.sort(order[held:]), np.sort(order[:held])


def _fingerprint(files: Sequence[Path], tokenizer: Tokenizer, seq_length: int, overlong: str) -> str:
    digest = hashlib.sha256()
    for file in files:
        state = file.stat()
        digest.update(f"{file.resolve()}|{state.st_size}|{state.st_mtime_ns}\n".encode())
    digest.update(f"{tokenizer.fingerprint}|{seq_length}|{overlong}|1".encode())
    return digest.hexdigest()


def _prepared(folder: Path, mark: str) -> bool:
    try:
        return json.loads((folder / "dataset.json").read_text())["fingerprint"] == mark
    except (OSError, ValueError, KeyError):
        return False


def _write(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    folder: Path,
    mark: str,
    seq_length: int,
    overlong: Overlong,
    progress: Callable[[int], None],
) -> None:
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    problems: list[str] = []
    unlearnable: list[str] = []
    lengths: list[int] = []
    counts = dict.fromkeys(("rows", "examples", "tokens", "learned_tokens", "overlong", "unlearnable"), 0)
    with open(temporary / "tokens.bin", "wb") as tokens_file, open(temporary / "learned.bin", "wb") as learned_file:
        for example in read_examples(files, tokenizer, problems):
            counts["rows"] += 1
            length = len(example.tokens)
            counts["overlong"] += length > seq_length
            starts = range(0, max(length, 1), seq_length) if overlong == "split" else (0,)
            if overlong == "drop" and length > seq_length:
                continue
            if not example.learned[1:].any():  # the first token is predicted from nothing
                counts["unlearnable"] += 1
                unlearnable += [example.where] if len(unlearnable) < SHOWN else []
                continue
            for start in starts:
                tokens, learned = (part[start : start + seq_length] for part in (example.tokens, example.learned))
                if not learned[1:].any():
                    continue
                tokens_file.write(tokens.tobytes())
                learned_file.write(learned.tobytes())
                lengths.append(len(tokens))
                counts["tokens"] += len(tokens)
                counts["learned_tokens"] += int(learned[1:].sum())
            progress(counts["tokens"])
    if problems:
        shutil.rmtree(temporary)
        more = f"\n- and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise DataError("The data cannot be used:\n- " + "\n- ".join(problems[:SHOWN]) + more)
    if not lengths:
        shutil.rmtree(temporary)
        samples = ", such as " + ", ".join(unlearnable[:3]) if unlearnable else ""
        raise DataError(
            f"There is nothing to learn in {counts['rows']} rows: {counts['unlearnable']} have no token that is "
            f"learned{samples}; {counts['overlong']} are longer than {seq_length} tokens."
        )
    counts["examples"] = len(lengths)
    np.save(temporary / "offsets.npy", np.concatenate([[0], np.cumsum(lengths)]))
    (temporary / "unlearnable.json").write_text(json.dumps(unlearnable))
    (temporary / "dataset.json").write_text(json.dumps({"fingerprint": mark, "counts": counts}))
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(temporary, folder)


def _load(folder: Path) -> Dataset:
    return Dataset(
        np.memmap(folder / "tokens.bin", np.int32, "r"),
        np.memmap(folder / "learned.bin", bool, "r"),
        np.load(folder / "offsets.npy"),
        json.loads((folder / "dataset.json").read_text())["counts"],
    )
