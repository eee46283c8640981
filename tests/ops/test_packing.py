import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_zoo.ops import segment_ids_from_cu_seqlens, segment_positions
from kimi_zoo.ops.packing import align_segments, check_segments, segment_starts

ids_of_one_row = st.lists(st.integers(0, 3), min_size=20, max_size=20)  # one length: one compilation


def test_cumulative_lengths_give_ids():
    ids = segment_ids_from_cu_seqlens([0, 3, 3, 8], 8)  # the second segment is empty
    assert ids.dtype == jnp.int32
    assert ids.tolist() == [1, 1, 1, 3, 3, 3, 3, 3]
    same = segment_ids_from_cu_seqlens(np.array([0, 3, 3, 8]), 8, cu_seqlens_kv=jnp.array([0, 3, 3, 8]))
    assert same.tolist() == ids.tolist()


@pytest.mark.parametrize(
    "bounds, message",
    [
        ([0, 7], r"end at the number of tokens, 8, got \[0, 7\]"),
        ([1, 8], r"start at 0, got \[1, 8\]"),
        ([0, 5, 3, 8], r"never fall, got \[0, 5, 3, 8\]"),
        ([8], "at least two"),
    ],
)
def test_wrong_cumulative_lengths_are_refused(bounds, message):
    bounds = np.asarray(bounds)
    with pytest.raises(ValueError, match=message):
        segment_ids_from_cu_seqlens(bounds, 8)


def test_cumulative_lengths_of_query_and_key_must_agree():
    with pytest.raises(ValueError, match=r"\[0, 3, 8\] and \[0, 4, 8\]"):
        segment_ids_from_cu_seqlens([0, 3, 8], 8, cu_seqlens_kv=[0, 4, 8])


def test_starts_and_positions_skip_padding():
    ids = jnp.array([[0, 2, 2, 0, 2, 1, 0, 2], [1, 1, 1, 2, 2, 2, 0, 0]])
    assert segment_starts(ids).astype(int).tolist() == [[0, 0, 0, 0, 0, 1, 0, 1], [0, 0, 0, 1, 0, 0, 0, 0]]
    assert segment_positions(ids).tolist() == [[0, 0, 1, 0, 2, 0, 0, 0], [0, 1, 2, 0, 1, 2, 0, 0]]


@settings(max_examples=30, deadline=None)
@given(ids_of_one_row)
def test_positions_count_the_tokens_of_each_run(ids):
    expected, last, count = [], 0, 0
    for segment in ids:
        if segment not in (0, last):
            count, last = 0, segment
        expected.append(count if segment else 0)
        count += segment != 0
    assert segment_positions(jnp.array([ids])).tolist() == [expected]


@functools.partial(jax.jit, static_argnums=1)
def aligned_and_back(ids, multiple):
    alignment = align_segments(ids, multiple, max_num_segments=5)
    tokens = jnp.where(ids > 0, jnp.arange(1, ids.shape[1] + 1), 0)
    return alignment.gather(ids), tokens, alignment.restore(alignment.gather(tokens))


@settings(max_examples=30, deadline=None)
@given(st.permutations([1, 2, 3, 4, 5]), st.lists(st.integers(0, 9), min_size=5, max_size=5), st.integers(0, 4))
def test_alignment_moves_every_segment_to_a_multiple_and_back(order, lengths, padding):
    multiple = 4
    row = [0] * padding + [i for i, n in zip(order, lengths, strict=True) for i in [i] * n]
    row += [0] * (50 - len(row))  # one length: one compilation
    ids = jnp.array([row])
    moved, tokens, restored = (np.asarray(x)[0] for x in aligned_and_back(ids, multiple))
    assert len(moved) % multiple == 0
    assert restored.tolist() == tokens.tolist()
    for block in moved.reshape(-1, multiple):
        present = [i for i in block.tolist() if i]
        assert len(set(present)) <= 1 and block[: len(present)].tolist() == present


def test_check_of_segments_names_the_largest_id():
    ids = jnp.array([[1, 1, 4, 0]])
    assert check_segments(ids, 4) is ids
    with pytest.raises(ValueError, match="hold a larger id: 4"):
        check_segments(ids, 3)
    with pytest.raises(ValueError, match="comes back"):
        check_segments(jnp.array([[1, 2, 0, 1]]), 4)


def test_check_of_segments_raises_when_traced():
    with pytest.raises(jax.errors.JaxRuntimeError, match="`max_num_segments` is 3"):
        jax.block_until_ready(jax.jit(lambda ids: check_segments(ids, 3))(jnp.array([[1, 1, 4, 0]])))
