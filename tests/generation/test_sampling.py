"""Sampling: each part against a plain float64 definition, and distributions against their probabilities."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kimi_zoo.generation.sampling import NON_FINITE, make_sampling, penalise, restrict, sample, temper

VOCAB = 13


def kept_reference(scores, *, top_k=0, top_p=1.0, min_p=0.0):
    """Which tokens stay, one row, by sorting in float64. Ties with the last kept token stay too."""
    scores = np.asarray(scores, np.float64)
    kept = np.ones(scores.shape, bool)
    if top_k:
        kept &= scores >= np.sort(scores)[::-1][min(top_k, scores.size) - 1]
    if top_p < 1:
        probabilities = np.where(kept, np.exp(scores - scores.max()), 0.0)
        probabilities /= probabilities.sum()
        order = np.argsort(-scores)
        enough = np.flatnonzero(np.cumsum(probabilities[order]) >= top_p)[0]
        kept &= scores >= scores[order][enough]
    return kept & (np.exp(scores - scores.max()) >= min_p)


rows = hnp.arrays(
    np.float32,
    (2, VOCAB),
    elements=st.floats(-30, 30, width=32).map(lambda x: np.float32(round(x, 2))),  # roundings make ties likely
)


@settings(deadline=None, max_examples=60)
@given(
    rows,
    st.integers(0, VOCAB + 2),
    st.sampled_from([1.0, 0.937, 0.51, 0.13, 1e-6]),
    st.sampled_from([0.0, 0.0917, 0.7]),
)
@example(np.float32([[0.0] * VOCAB, [0.0] * (VOCAB - 1) + [-0.0]]), 0, 0.51, 0.0)  # 0.0 and -0.0 tie
def test_restrictions_keep_what_sorting_keeps(logits, top_k, top_p, min_p):
    sampling = make_sampling(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
    kept = np.isfinite(eqx.filter_jit(restrict)(jnp.asarray(logits), sampling))
    for row, got in zip(logits, kept, strict=True):
        np.testing.assert_array_equal(got, kept_reference(row, top_k=top_k, top_p=top_p, min_p=min_p))
        assert got[row.argmax()]


def test_top_p_counts_after_top_k():
    probabilities = jnp.asarray([[0.4, 0.3, 0.2, 0.1]], jnp.float32)
    sampling = make_sampling(temperature=1.0, top_k=2, top_p=0.5)  # of 4/7 and 3/7 the first is enough
    assert np.isfinite(restrict(jnp.log(probabilities), sampling)).tolist() == [[True, False, False, False]]


@pytest.mark.parametrize("temperature", [1e-30, 0.5, 3.0, 1e30])
def test_no_temperature_overflows(temperature):
    logits = jnp.asarray([[3e38, -3e38, 1.0]], jnp.float32)
    scores = temper(logits, jnp.float32(temperature))
    assert scores[0, 0] == 0
    assert not np.isnan(scores).any()


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"top_p": 1e-38}, [False, False, True, False]),  # below the normal range of float32
        ({"top_p": 1e-50}, [False, False, True, False]),
        ({"top_k": 10**10}, [True] * 4),
        ({"min_p": 1e-50}, [True] * 4),
        ({"temperature": 1e40}, [True] * 4),
        ({"temperature": 1e-50}, [False, False, True, False]),
    ],
)
def test_extreme_settings_keep_the_most_likely_token(settings, kept):
    sampling = make_sampling(**{"temperature": 1.0} | settings)
    scores = restrict(temper(jnp.asarray([[0.0, -5.0, 3.0, 1.0]], jnp.float32), sampling.temperature), sampling)
    assert (np.asarray(scores) > -1e30).tolist() == [kept]
    tokens, log_probs = sample(jnp.zeros((1, VOCAB)).at[0, 6].set(9.0), sampling, keys=jr.split(jr.key(0), 1))
    assert tokens[0] == 6 or settings.get("temperature") == 1e40
    assert np.isfinite(log_probs).all()


@pytest.mark.parametrize("penalty", [1e40, 1e-50])
def test_extreme_penalties_give_no_nan(penalty):
    seen = jnp.asarray([[True, True, False]])
    penalised = penalise(
        jnp.asarray([[-20.0, 20.0, 1.0]]), seen, make_sampling(repetition_penalty=penalty).repetition_penalty
    )
    assert np.isfinite(penalised).all()


def test_sampled_frequencies_are_the_probabilities(getkey):
    logits = jr.normal(getkey(), (1, 7)) * 2
    draws = 20_000
    tokens, _ = sample(
        jnp.broadcast_to(logits, (draws, 7)),
        make_sampling(temperature=1.6, top_k=5),
        keys=jr.split(jr.key(0), draws),
    )
    frequencies = np.bincount(tokens, minlength=7) / draws
    scores = np.asarray(logits[0], np.float64) / 1.6
    expected = np.where(kept_reference(scores, top_k=5), np.exp(scores), 0)
    expected /= expected.sum()
    assert (frequencies[expected == 0] == 0).all()
    # a frequency of 20,000 draws has a standard deviation of at most 0.0035
    np.testing.assert_allclose(frequencies, expected, atol=4 * 0.0035)


def test_greedy_is_argmax_and_log_probs_are_unmodified(getkey):
    logits = jr.normal(getkey(), (5, VOCAB)).astype(jnp.bfloat16)
    seen = jr.bernoulli(getkey(), 0.5, (5, VOCAB))
    keys = jr.split(jr.key(0), 5)
    tokens, log_probs = sample(logits, make_sampling(repetition_penalty=1.4), keys=keys, seen=seen)
    penalised = penalise(logits.astype(jnp.float32), seen, jnp.float32(1.4))
    np.testing.assert_array_equal(tokens, penalised.argmax(-1))
    expected = jax.nn.log_softmax(logits.astype(jnp.float32))[jnp.arange(5), tokens]
    np.testing.assert_allclose(log_probs, expected, atol=1e-6)
    assert tokens.dtype == jnp.int32
    assert log_probs.dtype == jnp.float32


def test_penalty_sign_rule():
    logits = jnp.asarray([[2.0, -2.0, 2.0, -2.0, 0.0]], jnp.float32)
    seen = jnp.asarray([[True, True, False, False, True]])
    np.testing.assert_allclose(penalise(logits, seen, jnp.float32(1.25)), [[1.6, -2.5, 2.0, -2.0, 0.0]])


def test_penalty_needs_seen():
    with pytest.raises(ValueError, match="needs `seen`"):
        sample(jnp.zeros((1, VOCAB)), make_sampling(repetition_penalty=2.0), keys=jr.split(jr.key(0), 1))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_rows_are_marked(value, temperature):
    logits = jnp.zeros((3, VOCAB)).at[1, 6].set(value)
    tokens, _ = sample(logits, make_sampling(temperature=temperature), keys=jr.split(jr.key(0), 3))
    assert (tokens == NON_FINITE).tolist() == [False, True, False]


def test_parameters_without_effect_are_left_out():
    off = make_sampling()
    assert jax.tree.leaves(off) == []
    assert jax.tree.leaves(make_sampling(temperature=0.0, top_k=5, top_p=0.5, min_p=0.1)) == []  # greedy: none matters
    assert (
        len(jax.tree.leaves(make_sampling(temperature=0.5, top_k=5, top_p=0.5, min_p=0.1, repetition_penalty=2))) == 5
    )


def test_greedy_neither_sorts_nor_draws():
    text = str(
        jax.make_jaxpr(lambda x, k: sample(x, make_sampling(), keys=k))(jnp.zeros((2, 5)), jr.split(jr.key(0), 2))
    )
    assert not any(name in text for name in (" sort[", "random", "threefry", " while[", " scan["))
