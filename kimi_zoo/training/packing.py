"""Many examples in one row, told apart by `segment_ids`; batches of rows in an order that a seed fixes."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from kimi_zoo.training.dataset import Dataset

OPEN_ROWS = 64  # rows that may still be filled: with more, rows fill better and epochs are shuffled less


class Batch(NamedTuple):
    """Rows to learn from: `targets` are the next tokens in the same document, `weights` 1 where they are learned."""

    tokens: Any  # Int32[Array, "*batch seq"], numpy's or JAX's, and so all four
    targets: Any
    weights: Any  # Float32
    segment_ids: Any


def pack(lengths: Int[np.ndarray, " examples"], order: Sequence[int], seq_length: int) -> list[list[int]]:
    """Rows of examples with at most `seq_length` tokens together. Each goes where it leaves the least room, among the
    rows that are open; the fullest is closed when too many are.

    **Raises:** `ValueError` for an example that fits no row.
    """
    closed: list[list[int]] = []
    rows: list[tuple[int, list[int]]] = []  # room left, members
    for index in order:
        length = int(lengths[index])
        if length > seq_length:
            raise ValueError(f"Example {index} has {length} tokens; a row has room for {seq_length}.")
        fitting = [place for place, (room, _) in enumerate(rows) if room >= length]
        if fitting:
            place = min(fitting, key=lambda place: rows[place][0])
            room, members = rows.pop(place)
        else:
            room, members = seq_length, []
        members.append(int(index))
        if room > length:
            rows.append((room - length, members))
        else:
            closed.append(members)
        if len(rows) > OPEN_ROWS:
            closed.append(rows.pop(min(range(len(rows)), key=lambda place: rows[place][0]))[1])
    return closed + [members for _, members in rows]


def fill_row(dataset: Dataset, members: Sequence[int], seq_length: int) -> Batch:
    """One row: its examples one after another, padding behind them."""
    row = Batch(
        *(np.zeros(seq_length, kind) for kind in (np.int32, np.int32, np.float32, np.int32)),
    )
    start = 0
    for segment, index in enumerate(members, start=1):
        tokens, learned = dataset.example(index)
        end = start + len(tokens)
        row.tokens[start:end] = tokens
        row.targets[start : end - 1] = tokens[1:]
        row.weights[start : end - 1] = learned[1:]
        row.segment_ids[start:end] = segment
        start = end
    return row


@dataclasses.dataclass(frozen=True)
class Batches:
    """The batches of a run: number `i` is always the same, so that a run can go on anywhere.

    - `indices`: the examples to learn from; `shape`: leading axes of a batch, such as `(accumulate, rows)`.
    - `packed`: many examples in a row; otherwise one.
    """

    dataset: Dataset
    indices: Int[np.ndarray, " examples"]
    seq_length: int
    shape: tuple[int, ...]
    seed: int
    packed: bool = True

    def epoch_rows(self, epoch: int) -> list[list[int]]:
        """The examples in every row of an epoch, shuffled."""
        random = np.random.default_rng([self.seed, epoch])
        order = self.indices[random.permutation(len(self.indices))].tolist()
        rows = pack(self.dataset.lengths, order, self.seq_length) if self.packed else [[index] for index in order]
        return [rows[place] for place in random.permutation(len(rows))]

    def steps_in(self, epochs: int) -> int:
        """Batches that `epochs` passes over the data make; the last may have empty rows."""
        return -(-sum(len(self.epoch_rows(epoch)) for epoch in range(epochs)) // int(np.prod(self.shape)))

    def efficiency(self) -> float:
        """The share of an epoch's places that hold a token."""
        return float(self.dataset.lengths[self.indices].sum()) / (len(self.epoch_rows(0)) * self.seq_length)

    def read(self, start: int, stop: int, *, last_epoch: int | None = None) -> Iterator[Batch]:
        """Yields batches `start` to `stop`; rows past the end of `last_epoch` are empty."""
        count = int(np.prod(self.shape))
        epoch, rows, first = 0, self.epoch_rows(0), 0
        for number in range(start, stop):
            batch = []
            for place in range(number * count, (number + 1) * count):
                while place >= first + len(rows) and (last_epoch is None or epoch < last_epoch):
                    first += len(rows)
                    epoch += 1
                    rows = self.epoch_rows(epoch)
                members = rows[place - first] if place < first + len(rows) else []
                batch.append(fill_row(self.dataset, members, self.seq_length))
            yield Batch(*(np.stack(part).reshape(*self.shape, self.seq_length) for part in zip(*batch, strict=True)))


def in_order(dataset: Dataset, indices: Sequence[int], seq_length: int, rows: int, *, packed: bool) -> Iterator[Batch]:
    """All examples once, for evaluation: batches of `rows` rows, the last filled up with empty ones."""
    lengths = dataset.lengths
    members = pack(lengths, indices, seq_length) if packed else [[int(index)] for index in indices]
    for start in range(0, len(members), rows):
        group = members[start : start + rows]
        group += [[] for _ in range(rows - len(group))]
        yield Batch(*map(np.stack, zip(*(fill_row(dataset, row, seq_length) for row in group), strict=True)))
