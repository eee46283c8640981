"""Generation with a real, tiny Kimi Linear: KDA, latent attention and experts together.

Compiling is nearly all of the time here, so the tests share a few shapes: one or two rows, caches of 256 tokens.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from helpers import tiny

import kimi_zoo as kz
from kimi_zoo.generation import unstack
from kimi_zoo.generation.loop import generate, stream_generate

PROMPTS = [[7], [60, 3], [5, 11, 17], [1, 44, 9, 2, 30, 8, 51]]


@pytest.fixture(scope="module")
def model():
    config = tiny(layer_kinds=("kda", "kda", "mla"), mlp_kinds=("moe",) * 3)
    return kz.KimiLinear(config, key=jr.key(2))


@eqx.filter_jit
def full_pass(model, tokens, segment_ids):
    return model(tokens, segment_ids=segment_ids)


def greedy_reference(model, prompt, steps):
    """Greedy tokens by one full pass per token, without a cache; the row is padded so that it compiles once."""
    tokens = list(prompt)
    for _ in range(steps):
        padding = 32 - len(tokens)
        row, real = jnp.asarray([tokens + [0] * padding]), jnp.asarray([[1] * len(tokens) + [0] * padding])
        tokens.append(int(full_pass(model, row, real)[0, len(tokens) - 1].argmax()))
    return tokens[len(prompt) :]


def test_prompts_shorter_than_the_convolution_together_and_alone(model):
    expected = [greedy_reference(model, prompt, 8) for prompt in PROMPTS]
    for rows in ([0, 3], [2, 1]):
        together = generate(model, [PROMPTS[row] for row in rows], max_new_tokens=8, eos_ids=())
        assert together == [expected[row] for row in rows]
    assert [generate(model, [prompt], max_new_tokens=8, eos_ids=())[0] for prompt in PROMPTS] == expected


@pytest.mark.parametrize("size", [8, 9, 17])
def test_prefill_in_pieces(model, size):
    prompts = [[(7 * i + 3) % 61 for i in range(size)], [4, 2]]
    expected = [greedy_reference(model, prompt, 4) for prompt in prompts]
    assert generate(model, prompts, max_new_tokens=4, eos_ids=(), prefill_chunk_size=8) == expected


def test_rows_that_stop_early_leave_the_others_alone(model):
    free = generate(model, PROMPTS[1::2], max_new_tokens=10, eos_ids=())
    eos = free[1][2]
    expected = [row[: row.index(eos) + 1] if eos in row else row for row in free]
    assert generate(model, PROMPTS[1::2], max_new_tokens=10, eos_ids=eos) == expected
    assert len(expected[0]) != len(expected[1])


def test_carried_and_restored_cache_equals_the_joined_prompt(model, tmp_path):
    first, second = [PROMPTS[2], PROMPTS[3]], [[12], [33, 6, 21]]
    stream = stream_generate(model, first, max_new_tokens=5, eos_ids=(), cache=model.init_cache(2, 256))
    replies = [[], []]
    for event in stream:
        replies[event.row].append(event.token)
    joined = [a + b + c for a, b, c in zip(first, replies, second, strict=True)]
    expected = generate(model, joined, max_new_tokens=6, eos_ids=())
    assert generate(model, second, max_new_tokens=6, eos_ids=(), cache=stream.cache) == expected
    eqx.tree_serialise_leaves(tmp_path / "cache.eqx", stream.cache)
    restored = eqx.tree_deserialise_leaves(tmp_path / "cache.eqx", model.init_cache(2, 256))
    assert generate(model, second, max_new_tokens=6, eos_ids=(), cache=restored) == expected
    assert generate(model, second, max_new_tokens=6, eos_ids=(), cache=stream.cache) == expected


def test_one_trace_for_prefill_and_one_for_twenty_steps(model, monkeypatch):
    traces = []
    original = kz.KimiLinear.decode_hidden_states

    def counting(self, tokens, cache, *, lengths=None):
        traces.append(tokens.shape)
        return original(self, tokens, cache, lengths=lengths)

    monkeypatch.setattr(kz.KimiLinear, "decode_hidden_states", counting)
    settings = dict(max_new_tokens=21, eos_ids=(), prefill_chunk_size=7, steps_per_dispatch=3)  # shapes of their own
    generate(model, [PROMPTS[3]], **settings)
    assert traces == [(1, 7), (1, 1)]
    list(stream_generate(model, [PROMPTS[0]], **settings))
    assert traces == [(1, 7), (1, 1)]


def test_layers_taken_apart_give_the_same(model, monkeypatch):
    """What large models do on CPU: the cache still comes back in the form the model makes."""

    def run():
        stream = stream_generate(model, PROMPTS[2:], max_new_tokens=7, eos_ids=(), cache=model.init_cache(2, 256))
        return [(event.row, event.token) for event in stream], stream.cache

    events, cache = run()
    assert unstack.stack_plan(model) is None
    monkeypatch.setattr(unstack, "LARGE_STACK_BYTES", 0)
    plan = unstack.stack_plan(model)
    assert plan is not None
    assert any(count > 1 for _, count in plan)
    apart_events, apart_cache = run()
    assert apart_events == events
    assert jax.tree.structure(apart_cache) == jax.tree.structure(model.init_cache(2, 256))
    same = jax.tree.map(lambda a, b: bool(jnp.allclose(a, b, atol=1e-5)), apart_cache, cache)
    assert all(jax.tree.leaves(same))
    assert jax.tree.all(jax.tree.map(lambda leaf: not leaf.is_deleted(), eqx.filter(model, eqx.is_array)))


def test_parts_of_a_stack_are_the_layers_and_no_copies(model):
    apart = unstack.unstack_views(model)
    assert apart.layers.repeats == (1, 1, 1)
    plan = tuple((len(unit), count) for unit, count in zip(model.layers.sections, model.layers.repeats, strict=True))
    assert eqx.tree_equal(eqx.filter_jit(unstack.restack)(apart, plan), model)
    whole = model.layers.sections[0][0].mlp.experts.gate_proj
    part = apart.layers.sections[1][0].mlp.experts.gate_proj
    assert part.unsafe_buffer_pointer() == whole.unsafe_buffer_pointer() + whole[1].nbytes


def test_nan_in_a_norm_weight_is_named(model):
    broken = eqx.tree_at(lambda m: m.norm.weight, model, model.norm.weight.at[3].set(jnp.nan))
    with pytest.raises(FloatingPointError, match="row 0 are not finite at step 1 of 8"):
        generate(broken, [PROMPTS[2]], max_new_tokens=8)


def test_model_and_cache_stay_usable(model):
    """A first prompt, another one, the first again: nothing is carried over, nothing of the caller's is donated."""
    cache = model.init_cache(1, 256)
    first = generate(model, [PROMPTS[3]], max_new_tokens=6, cache=cache)
    generate(model, [PROMPTS[2]], max_new_tokens=6, cache=cache)
    assert generate(model, [PROMPTS[3]], max_new_tokens=6, cache=cache) == first
    assert generate(model, [PROMPTS[3]], max_new_tokens=6) == first
