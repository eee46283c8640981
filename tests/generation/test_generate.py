"""`generate` on a toy model: batches, pieces, stopping, seeds, traces, errors."""

from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import toy_model
from toy_model import ToyConfig, ToyModel, greedy_reference

from kimi_zoo.generation.config import GenerationConfig
from kimi_zoo.generation.loop import NonFiniteLogitsError, generate, stream_generate
from kimi_zoo.generation.prompts import check_eos_ids, row_keys

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3], [5], [8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8, 3, 2]]


@pytest.fixture
def model(getkey):
    return ToyModel(key=getkey())


def test_greedy_matches_full_passes(model):
    got = generate(model, [PROMPTS[1]], max_new_tokens=20)
    assert got == [greedy_reference(model, PROMPTS[1], 20)]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_of_a_batch_get_what_they_get_alone(model, temperature):
    settings = dict(max_new_tokens=11, temperature=temperature, key=3, repetition_penalty=1.3)
    together = generate(model, PROMPTS, **settings)
    alone = [generate(model, [prompt], **settings)[0] for prompt in PROMPTS]
    assert together == alone
    assert generate(model, PROMPTS[::-1], **settings) == alone[::-1]


@pytest.mark.parametrize("size", [8, 9, 17])
@pytest.mark.parametrize("piece", [1, 5, 8, 512])
def test_prefill_in_pieces(model, piece, size):
    prompts = [list(range(size)), [4, 2]]
    got = generate(model, prompts, max_new_tokens=4, prefill_chunk_size=piece)
    assert got == [greedy_reference(model, prompt, 4) for prompt in prompts]


def test_log_probs_are_those_of_the_model(model):
    settings = dict(max_new_tokens=6, temperature=1.7, top_k=5, repetition_penalty=1.2, key=1)
    tokens, log_probs = generate(model, PROMPTS[:2], return_log_probs=True, **settings)
    assert tokens == generate(model, PROMPTS[:2], **settings)
    for prompt, new, got in zip(PROMPTS, tokens, log_probs, strict=False):
        whole = jnp.asarray([prompt + new], jnp.int32)
        logits, _ = model.decode(whole, model.init_cache(1, whole.shape[1]))
        expected = jax.nn.log_softmax(logits[0, len(prompt) - 1 : -1])[jnp.arange(6), jnp.asarray(new)]
        np.testing.assert_allclose(got, expected, atol=2e-5)  # float32 sums over 7 channels and 23 ids, measured 1e-6


def test_stops_at_any_eos_row_by_row(getkey):
    model = ToyModel(key=getkey(), config=ToyConfig(vocab_size=90))
    free = generate(model, PROMPTS, max_new_tokens=16)
    eos = (free[0][2], free[1][7])
    expected = [greedy_reference(model, prompt, 16, eos=eos) for prompt in PROMPTS]
    assert len({len(row) for row in expected}) > 1
    assert generate(model, PROMPTS, max_new_tokens=16, eos_ids=eos) == expected
    unused = sorted(set(range(90)) - {token for row in free for token in row})
    assert generate(model, PROMPTS, max_new_tokens=16, eos_ids=[*unused[:9], *eos]) == expected
    assert generate(model, PROMPTS[:1], max_new_tokens=16, eos_ids=free[0][0]) == [free[0][:1]]  # the very first token


def test_eos_defaults(getkey, model):
    free = generate(model, [PROMPTS[0]], max_new_tokens=9)[0]
    key = getkey()
    ids = [greedy_reference(ToyModel(key=key), PROMPTS[0], 9)[at] for at in (2, 4)]
    model = ToyModel(key=key, config=ToyConfig(eos_token_id=(ids[0], 99)))
    assert generate(model, [PROMPTS[0]], max_new_tokens=9)[0][-1] == ids[0]
    config = GenerationConfig(max_new_tokens=9, eos_token_ids=(ids[1],))
    assert generate(model, [PROMPTS[0]], generation_config=config)[0][-1] == ids[1]
    assert len(generate(model, [PROMPTS[0]], generation_config=config, eos_ids=())[0]) == 9
    assert len(free) == 9


def test_explicit_arguments_win_over_the_generation_config(model):
    config = GenerationConfig(max_new_tokens=5, temperature=2.0, repetition_penalty=1.5)
    got = generate(
        model, [PROMPTS[0]], generation_config=config, temperature=0.0, repetition_penalty=1.0, max_new_tokens=7
    )
    assert got == [greedy_reference(model, PROMPTS[0], 7)]
    sampled = generate(model, [PROMPTS[0]], generation_config=config, key=4)
    assert sampled == generate(model, [PROMPTS[0]], max_new_tokens=5, temperature=2.0, repetition_penalty=1.5, key=4)


def test_seeds(model):
    settings = dict(max_new_tokens=12, temperature=1.5)
    first, again = (generate(model, [PROMPTS[0]], key=7, **settings) for _ in range(2))
    assert first == again
    assert first == generate(model, [PROMPTS[0]], key=jr.key(7), **settings)
    assert first == generate(model, [PROMPTS[0]], key=jr.PRNGKey(7), **settings)
    assert first != generate(model, [PROMPTS[0]], key=8, **settings)
    twins = generate(model, [PROMPTS[0]] * 2, key=jr.split(jr.key(7)), **settings)
    assert twins[0] != twins[1]


def test_repetition_penalty_forbids_what_was_seen(model):
    got = generate(model, [PROMPTS[0]], max_new_tokens=12, repetition_penalty=1e6)[0]
    assert len(set(got) | set(PROMPTS[0])) == 12 + 3  # every new token is new


def test_nothing_is_carried_over(model):
    first = generate(model, [PROMPTS[0]], max_new_tokens=6)
    generate(model, [PROMPTS[1]], max_new_tokens=6)
    assert generate(model, [PROMPTS[0]], max_new_tokens=6) == first


def test_no_new_tokens(model):
    assert generate(model, PROMPTS, max_new_tokens=0) == [[], [], [], []]
    assert generate(model, PROMPTS[:1], max_new_tokens=0, return_log_probs=True) == ([[]], [[]])


def test_carried_cache_equals_the_joined_prompt(model):
    first, second = [[3, 1, 4], [1, 5, 9, 2]], [[6, 5], [3]]
    stream = stream_generate(model, first, max_new_tokens=5, cache=model.init_cache(2, 40))
    replies: list[list[int]] = [[], []]
    for event in stream:
        replies[event.row].append(event.token)
    cache = stream.cache
    assert cache.lengths.tolist() == [3 + 5, 4 + 5]
    joined = [a + b + c for a, b, c in zip(first, replies, second, strict=True)]
    for _ in range(2):  # the cache that was passed is copied, so it serves again
        assert generate(model, second, max_new_tokens=6, cache=cache) == generate(model, joined, max_new_tokens=6)
    assert stream.cache is cache


def test_carried_cache_holds_the_eos(model):
    eos = greedy_reference(model, [3, 1, 4], 5)[4]
    stream = stream_generate(model, [[3, 1, 4]], max_new_tokens=9, eos_ids=eos)
    reply = [event.token for event in stream]
    assert reply[-1] == eos
    assert stream.cache.lengths.tolist() == [3 + len(reply)]


def test_prefill_only(model):
    stream = stream_generate(model, PROMPTS[:2], max_new_tokens=0, cache=model.init_cache(2, 20))
    assert list(stream) == []
    assert stream.cache.lengths.tolist() == [3, 7]


def test_cache_is_refused_while_it_would_be_wrong(model):
    stream = stream_generate(model, PROMPTS[:1], max_new_tokens=3)
    next(stream)
    with pytest.raises(RuntimeError, match="finished stream"):
        _ = stream.cache
    with pytest.raises(
        ValueError, match="room for 8 tokens; row 1 needs 10: 0 there already, 7 of the prompt and 3 new"
    ):
        generate(model, PROMPTS[:2], max_new_tokens=3, cache=model.init_cache(2, 8))
    with pytest.raises(ValueError, match="3 rows for 2 prompts"):
        generate(model, PROMPTS[:2], max_new_tokens=3, cache=model.init_cache(3, 30))


def test_one_trace_for_prefill_and_one_for_decoding(getkey):
    model, other = (ToyModel(key=getkey(), dim=11) for _ in range(2))
    toy_model.TRACES.clear()
    generate(model, [PROMPTS[1]], max_new_tokens=21, steps_per_dispatch=4)
    assert toy_model.TRACES == [(1, 16), (1, 1)]
    list(stream_generate(model, [PROMPTS[0]], max_new_tokens=13, steps_per_dispatch=4))  # blocks of other lengths
    generate(other, [PROMPTS[1]], max_new_tokens=9, eos_ids=(1, 2), steps_per_dispatch=4)  # other weights
    assert toy_model.TRACES == [(1, 16), (1, 1)]
    generate(model, [PROMPTS[1]], max_new_tokens=5, temperature=0.7, top_p=0.9, steps_per_dispatch=4)
    toy_model.TRACES.clear()
    generate(model, [PROMPTS[1]], max_new_tokens=5, temperature=0.6, top_p=0.8, key=2, steps_per_dispatch=4)
    assert toy_model.TRACES == []  # other values of the same sampling parameters


@pytest.mark.parametrize("steps", [1, 3, 16])
@pytest.mark.parametrize("ramp", [True, False])
def test_stream_gives_the_same_tokens(model, steps, ramp):
    eos = greedy_reference(model, PROMPTS[0], 4)[3]
    expected = generate(model, PROMPTS, max_new_tokens=10, eos_ids=eos)
    got: list[list[int]] = [[] for _ in PROMPTS]
    reasons = {}
    stream = stream_generate(model, PROMPTS, max_new_tokens=10, eos_ids=eos, steps_per_dispatch=steps, ramp=ramp)
    for event in stream:
        assert event.row not in reasons  # nothing after the end of a row
        got[event.row].append(event.token)
        assert event.text is None
        assert event.log_prob <= 0
        if event.finish_reason:
            reasons[event.row] = event.finish_reason
    assert got == expected
    assert reasons == {row: "eos" if tokens[-1] == eos else "length" for row, tokens in enumerate(expected)}


class PoisonedModel(ToyModel):
    """Its hidden state becomes NaN or infinite when a row has consumed `at` tokens."""

    at: int
    value: float

    def __init__(self, *, key, at, value):
        super().__init__(key=key)
        self.at, self.value = at, value

    def decode_hidden_states(self, tokens, cache, *, lengths=None):
        hidden, cache = super().decode_hidden_states(tokens, cache, lengths=lengths)
        bad = (cache.lengths == self.at)[:, None, None] & (tokens.shape[1] == 1)
        return jnp.where(bad, self.value, hidden), cache


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_logits_stop_at_the_step(getkey, value):
    model = PoisonedModel(key=getkey(), at=10, value=value)
    stream = stream_generate(model, PROMPTS[:2], max_new_tokens=8)
    got = []
    with pytest.raises(NonFiniteLogitsError, match=r"row 1 are not finite at step 4 of 8"):
        got.extend(stream)
    assert [event.row for event in got].count(1) == 3  # what came before is delivered
    with pytest.raises(RuntimeError, match="finished stream"):
        _ = stream.cache


def test_nan_weights_stop_at_the_first_step(model):
    broken = eqx.tree_at(lambda m: m.head, model, model.head.at[3, 2].set(jnp.nan))
    with pytest.raises(FloatingPointError, match="row 0 are not finite at step 1 of 8"):
        generate(broken, [PROMPTS[0]], max_new_tokens=8)


@pytest.mark.parametrize(
    ("prompts", "settings", "error", "message"),
    [
        ([], {}, ValueError, "`prompts` is empty"),
        ([[1], []], {}, ValueError, "Prompt 1 is empty"),
        ([[1, 2], [3, 23]], {}, ValueError, "Prompt 1 has the token id 23 at position 1, outside the vocabulary of 23"),
        ([[1, -4]], {}, ValueError, "Prompt 0 has the token id -4 at position 1"),
        ([[1.0, 2.0]], {}, TypeError, "Prompt 0 must hold integers; got float64"),
        ([1, 2], {}, TypeError, r"list of token lists, also for one prompt: \[\[1, 2, 3\]\]; prompt 0 is 1"),
        ("hello", {}, TypeError, "got text. Encode it"),
        (["hello"], {}, TypeError, "got text. Encode it"),
        ([[1]], dict(max_new_tokens=-1), ValueError, "`max_new_tokens` must be at least 0; got -1"),
        ([[1]], dict(prefill_chunk_size=0), ValueError, "`prefill_chunk_size` must be at least 1; got 0"),
        ([[1]], dict(steps_per_dispatch=0), ValueError, "`steps_per_dispatch` must be at least 1; got 0"),
        ([[1]], dict(temperature=-0.5), ValueError, "`temperature` must be finite and at least 0 .*got -0.5"),
        ([[1]], dict(top_p=0.0), ValueError, "`top_p` must be above 0 .*got 0.0"),
        ([[1]], dict(top_k=-3), ValueError, "`top_k` must be at least 0 .*got -3"),
        ([[1]], dict(min_p=1.5), ValueError, "`min_p` must be between 0 and 1 .*got 1.5"),
        ([[1]], dict(repetition_penalty=0.0), ValueError, "`repetition_penalty` must be finite and above 0 .*got 0.0"),
        ([[1]], dict(stop="x"), ValueError, r"`stop=\['x'\]` needs `tokenizer=`"),
        ([[1]], dict(stop=["a", ""]), ValueError, "`stop` holds an empty string"),
        ([[1]], dict(stop=b"x"), TypeError, "`stop` must be a string or a list of strings; got b'x'"),
        ([[1]], dict(stop=None), TypeError, "`stop` must be a string or a list of strings; got None"),
        ([[1]], dict(eos_ids=-1), ValueError, "`eos_ids` holds -1, outside the vocabulary of 23"),
        ([[1]], dict(eos_ids=[2, 23]), ValueError, "`eos_ids` holds 23, outside"),
        ([[1]], dict(eos_ids=[2.0]), TypeError, r"`eos_ids` must be an integer or several; got \[2.0\]"),
        ([[1]], dict(eos_ids="</s>"), TypeError, "`eos_ids` must be an integer or several; got '</s>'"),
        ([[1]], dict(eos_ids=True), TypeError, "`eos_ids` must be an integer or several; got True"),
        ([[1]], dict(key=None), TypeError, r"`key` must be a seed \(a whole number\), .* got None"),
        ([[1]], dict(key=1.5), TypeError, r"`key` must be a seed \(a whole number\), .* got 1.5"),
        ([[1]], dict(key=jr.split(jr.key(0), 3)), ValueError, r"one per prompt \(1\); got keys of shape \(3,\)"),
    ],
)
def test_bad_input_is_refused_before_any_work(unchecked, model, prompts, settings, error, message):
    toy_model.TRACES.clear()
    with pytest.raises(error, match=message):
        stream_generate(model, prompts, **settings)  # at the call, not at the first token
    assert toy_model.TRACES == []


def test_integers_of_every_kind():
    for ids in (6, np.int64(6), jnp.asarray(6), [np.int64(6)], np.array([6]), jnp.asarray([6]), range(6, 7), {6}):
        assert check_eos_ids(ids, 23) == (6,)
    assert check_eos_ids((), 23) == check_eos_ids(np.array([], int), 23) == ()
    for key in (3, np.int64(3), jnp.asarray(3), jr.key(3), jr.PRNGKey(3), jr.split(jr.key(3), 1)):
        assert row_keys(key, 1).shape == (1,)


def test_outgrowing_what_the_model_was_made_for_warns(model):
    @dataclass(frozen=True)
    class Short(ToyConfig):
        model_max_length: int = 8

    with pytest.warns(UserWarning, match="may reach 9 tokens with its 6 new ones; this model was made for 8"):
        stream_generate(ToyModel(key=jr.key(0), config=Short()), [[1], [1, 2, 3]], max_new_tokens=6)


def test_array_prompts(model):
    expected = generate(model, [PROMPTS[0]], max_new_tokens=3)
    assert generate(model, [np.array(PROMPTS[0])], max_new_tokens=3) == expected
    assert generate(model, np.array([PROMPTS[0]]), max_new_tokens=3) == expected
    assert generate(model, jnp.array([PROMPTS[0]]), max_new_tokens=3) == expected
