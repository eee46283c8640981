"""Packing: every example once in every epoch, rows that fit, batches that are the same from wherever one starts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_zoo.training.dataset import Dataset
from kimi_zoo.training.packing import Batches, fill_row, in_order, pack


def dataset_of(lengths):
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = np.arange(1, offsets[-1] + 1, dtype=np.int32)
    return Dataset(tokens, np.ones(len(tokens), bool), offsets, {})


@given(st.lists(st.integers(2, 9), min_size=1, max_size=300), st.integers(9, 20))
def test_every_example_in_one_row_that_has_room(lengths, room):
    rows = pack(np.asarray(lengths), range(len(lengths)), room)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in row) <= room for row in rows)
    assert len(rows) <= 2 * -(-sum(lengths) // room) + 1  # no two rows that are closed could have been one


def test_an_example_that_fits_nowhere():
    with pytest.raises(ValueError, match="Example 1 has 9 tokens; a row has room for 8"):
        pack(np.asarray([3, 9]), [0, 1], 8)


def test_a_row_names_its_documents_and_learns_within_them():
    row = fill_row(dataset_of([3, 2]), [1, 0], 7)
    assert row.tokens.tolist() == [4, 5, 1, 2, 3, 0, 0]
    assert row.targets.tolist() == [5, 0, 2, 3, 0, 0, 0]
    assert row.weights.tolist() == [1, 0, 1, 1, 0, 0, 0]
    assert row.segment_ids.tolist() == [1, 1, 2, 2, 2, 0, 0]


def test_batches_are_the_same_from_wherever_one_starts():
    batches = Batches(dataset_of([2, 3, 4, 5, 6, 7] * 3), np.arange(18), 8, (2, 2), seed=1)
    steps = batches.steps_in(2)
    every = list(batches.read(0, steps, last_epoch=1))
    for start in range(steps):
        for late, early in zip(batches.read(start, steps, last_epoch=1), every[start:], strict=True):
            for a, b in zip(late, early, strict=True):
                np.testing.assert_array_equal(a, b)
    seen = np.concatenate([batch.tokens[batch.segment_ids > 0] for batch in every])
    assert np.array_equal(np.sort(seen), np.sort(np.tile(batches.dataset.tokens, 2)))  # two passes over everything
    assert every[0].tokens.shape == (2, 2, 8)
    assert batches.epoch_rows(0) != batches.epoch_rows(1)
    assert Batches(batches.dataset, np.arange(18), 8, (2, 2), seed=2).epoch_rows(0) != batches.epoch_rows(0)


def test_steps_beyond_one_epoch_go_on_with_the_next():
    batches = Batches(dataset_of([2, 3, 4]), np.arange(3), 8, (1, 1), seed=1)
    tokens = sum(int((batch.segment_ids > 0).sum()) for batch in batches.read(0, 20))
    assert tokens > 9 * 5


@pytest.mark.parametrize("packed", [True, False])
def test_in_order_gives_everything_once(packed):
    dataset = dataset_of([2, 3, 4, 5])
    batches = list(in_order(dataset, range(4), 8, 3, packed=packed))
    seen = np.concatenate([batch.tokens[batch.segment_ids > 0] for batch in batches])
    assert sorted(seen.tolist()) == dataset.tokens.tolist() and {batch.tokens.shape for batch in batches} == {(3, 8)}
