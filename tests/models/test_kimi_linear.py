"""Properties of the model that hold for any weights: causality, packing, padding, decoding, surgery, compilation."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers import TINY, assert_close, tiny

import kimi_zoo as kz
from kimi_zoo.models.inputs import check_lengths
from kimi_zoo.models.kimi_linear import Published, with_published

# float32 rounding of logits of about 3, through four layers: the same sums in another order
ATOL = 2e-5


@pytest.fixture(scope="module")
def model():
    return kz.KimiLinear(TINY, key=jr.key(1))


@pytest.fixture(scope="module")
def tokens():
    return jr.randint(jr.key(2), (2, 12), 3, TINY.vocab_size)


@eqx.filter_jit
def apply(model, tokens, segment_ids=None, positions=None):
    return model(tokens, segment_ids=segment_ids, positions=positions)


@eqx.filter_jit
def decode(model, tokens, cache, lengths=None):
    return model.decode(tokens, cache, lengths=lengths)


def test_shapes_and_dtypes(model, tokens):
    logits = apply(model, tokens)
    assert logits.shape == (2, 12, 61) and logits.dtype == jnp.float32
    hidden = model.hidden_states(tokens[:, :1])
    assert hidden.shape == (2, 1, 16)
    assert_close(model.logits(hidden), apply(model, tokens[:, :1]), atol=ATOL)


def test_no_positions_no_effect(model, tokens):
    """Kimi Linear has no positional embedding: shifting positions changes nothing."""
    shifted = jnp.broadcast_to(jnp.arange(12) + 100, tokens.shape)
    assert np.array_equal(apply(model, tokens), apply(model, tokens, positions=shifted))


def test_causal_to_the_bit_and_without_a_mask(model, tokens):
    changed = tokens.at[:, -1].set(5)
    logits = apply(model, tokens)
    assert np.array_equal(logits[:, :-1], apply(model, changed)[:, :-1])
    assert_close(apply(model, tokens, jnp.ones_like(tokens)), logits, atol=ATOL)


def test_padding_changes_nothing(model, tokens):
    """Left, inner and right padding at batch 1 and 2: logits of the real tokens are those without it."""
    plain = apply(model, tokens)
    for real in ([0, 0, 0, 1, 2, 3, 4], [0, 1, 0, 0, 2, 3, 4], [1, 2, 3, 4, 0, 0, 0]):
        mask = jnp.asarray(real) > 0
        row = jnp.where(mask, tokens[0, jnp.asarray(real) - 1], 0)[None]
        ids = mask.astype(jnp.int32)[None]
        padded = apply(model, row, ids)
        assert_close(padded[0, mask], plain[0, :4], atol=ATOL, name=str(real))
        other = apply(model, jnp.where(mask, row, 7), ids)
        assert np.array_equal(padded[0, mask], other[0, mask]), real


def test_packed_documents_equal_separate_ones(model):
    first, second = jr.randint(jr.key(3), (1, 5), 3, 61), jr.randint(jr.key(4), (1, 7), 3, 61)
    packed = jnp.concatenate([first, second], axis=1)
    ids = jnp.asarray([[1] * 5 + [2] * 7])
    weigh = lambda logits: jnp.sum(jnp.sin(logits))

    @eqx.filter_jit
    def run(model):
        def together(model):
            logits = model(packed, segment_ids=ids)
            return weigh(logits), logits

        def apart(model):
            logits = jnp.concatenate([model(first), model(second)], axis=1)
            return weigh(logits), logits

        gradient = eqx.filter_grad(together, has_aux=True), eqx.filter_grad(apart, has_aux=True)
        return [f(model) for f in gradient]

    (grads, logits), (expected_grads, expected) = run(model)
    assert_close(logits, expected, atol=ATOL, name="logits")
    for name, want in kz.to_tensors(expected_grads).items():
        assert_close(kz.to_tensors(grads)[name], want, rtol=1e-4, atol=1e-5, name=name)


@pytest.mark.parametrize("pieces", [(12,), (1,) * 12, (2, 1, 3, 6), (5, 7)])
def test_decoding_in_pieces_equals_one_pass(model, tokens, pieces):
    cache, logits, start = model.init_cache(2, 16), [], 0
    for piece in pieces:
        out, cache = decode(model, tokens[:, start : start + piece], cache)
        logits.append(out)
        start += piece
    assert_close(jnp.concatenate(logits, axis=1), apply(model, tokens), atol=ATOL)
    assert cache.lengths.tolist() == [12, 12]


def test_rows_of_different_length(model, tokens):
    """Right-padded pieces; a row of length 0 keeps its cache to the bit."""
    lengths = jnp.asarray([3, 7])
    logits, cache = decode(model, tokens[:, :8], model.init_cache(2, 16), lengths)
    after, cache_after = decode(model, tokens[:, 8:9], cache, jnp.asarray([1, 0]))
    alone_cache = model.init_cache(1, 16)
    for row in (0, 1):
        n = int(lengths[row])
        alone, one = decode(model, tokens[row : row + 1, :n], alone_cache)
        assert_close(logits[row, :n], alone[0], atol=ATOL, name=f"row {row}")
        if row == 0:
            assert_close(after[0], decode(model, tokens[:1, 8:9], one)[0][0], atol=ATOL)
    assert cache_after.lengths.tolist() == [4, 7]
    row_1 = lambda c: [leaf[:, 1] for leaf in jax.tree.leaves(c.layers)]
    assert all(np.array_equal(a, b) for a, b in zip(row_1(cache), row_1(cache_after), strict=True))


def test_cache_holds_latents_and_states(model):
    cache = model.init_cache(3, 20)
    kda, mla = cache.layers[0], cache.layers[3]
    assert kda.state.shape == (3, 2, 8, 8) and kda.state.dtype == jnp.float32
    assert kda.key_window.shape == (3, 3, 16)
    assert mla.latent.shape[-1] + mla.key_rope.shape[-1] == TINY.kv_lora_rank + TINY.qk_rope_head_dim


def test_cache_is_saved_and_continued(model, tokens, tmp_path):
    _, cache = decode(model, tokens[:, :6], model.init_cache(2, 16))
    eqx.tree_serialise_leaves(tmp_path / "cache.eqx", cache)
    restored = eqx.tree_deserialise_leaves(tmp_path / "cache.eqx", model.init_cache(2, 16))
    assert np.array_equal(decode(model, tokens[:, 6:], cache)[0], decode(model, tokens[:, 6:], restored)[0])


def test_going_back_is_refused_or_right(model, tokens):
    _, cache = decode(model, tokens[:, :10], model.init_cache(2, 16))
    with pytest.raises(ValueError, match="recurrent states, which cannot be taken back"):
        cache.rewind(jnp.asarray([7, 7]))
    attention = kz.KimiLinear(tiny(layer_kinds=("mla",) * 4), key=jr.key(5))
    _, cache = attention.decode(tokens[:, :10], attention.init_cache(2, 16))
    again, _ = attention.decode(tokens[:, 7:], cache.rewind(jnp.asarray([7, 7])))
    assert_close(again, attention(tokens)[:, 7:], atol=ATOL)


def test_outgrowing_the_cache_is_an_error(model, tokens):
    with pytest.raises(Exception, match="outgrown its cache, made for 5 tokens"):
        jax.block_until_ready(decode(model, tokens[:, :6], model.init_cache(2, 5)))


IDS = jnp.ones((2, 3), jnp.int32)


@pytest.mark.parametrize(
    ("tokens", "beside", "error", "message"),
    [
        ([[1, 2]], {}, TypeError, r"`tokens` must be an array of integers, such as .*; got a list"),
        (jnp.ones((1, 2)), {}, TypeError, "`tokens` must be an array of integers.*got an array of float32"),
        (IDS[0], {}, ValueError, r"axes \[batch, seq\], also for one row: .*got shape \(3,\)"),
        (IDS.at[1, 2].set(61), {}, ValueError, r"holds the id 61 at \[1, 2\], outside the vocabulary of 61"),
        (-np.ones((2, 3), np.int64), {}, ValueError, r"holds the id -1 at \[0, 0\]"),
        (
            IDS,
            {"segment_ids": IDS[:, :2]},
            ValueError,
            r"`segment_ids` must have the shape of .*\(2, 3\); got \(2, 2\)",
        ),
        (IDS, {"segment_ids": -IDS}, ValueError, "`segment_ids` must not be negative; got -1"),
        (IDS, {"segment_ids": IDS > 0}, TypeError, "`segment_ids` must be .* got an array of bool"),
        (IDS, {"segment_ids": jnp.ones((2, 3))}, TypeError, "`segment_ids` must be .* got an array of float32"),
        (IDS, {"positions": [[0, 1, 2]] * 2}, TypeError, "`positions` must be .* got a list"),
    ],
)
def test_wrong_inputs_are_named(unchecked, model, tokens, beside, error, message):
    with pytest.raises(error, match=message):
        model(tokens, **beside)


def test_arrays_of_numpy_are_taken(model):
    wide = np.asarray([[3, 4, 5]])
    assert wide.dtype == np.int64  # must not warn
    ids = np.asarray([[1, 1, 0]], np.uint8)
    assert np.array_equal(model(wide, segment_ids=ids), model(jnp.asarray(wide), segment_ids=jnp.asarray([[1, 1, 0]])))


@pytest.mark.parametrize(
    ("lengths", "error", "message"),
    [
        (jnp.asarray([1, 4]), ValueError, "`lengths` of row 1 must be from 0 to 3; got 4"),
        (jnp.asarray([-1, 3]), ValueError, "`lengths` of row 0 must be from 0 to 3; got -1"),
        (jnp.asarray([1.0, 2.0]), TypeError, "`lengths` must be an array of integers"),
        ([1, 2], TypeError, "`lengths` must be an array of integers.*got a list"),
        (2, TypeError, "`lengths` must be an array of integers.*got a int"),
        (jnp.asarray([1]), ValueError, r"a number per row, shape \(2,\); got shape \(1,\)"),
    ],
)
def test_wrong_lengths_are_named(unchecked, model, lengths, error, message):
    with pytest.raises(error, match=message):
        model.decode(IDS, model.init_cache(2, 8), lengths=lengths)


def test_wrong_lengths_are_named_when_traced():
    check = jax.jit(lambda lengths: check_lengths(lengths, 3, 1, traced=True))
    assert check(jnp.asarray([3])) == 3
    with pytest.raises(Exception, match="`lengths` must be from 0 to the number of tokens of the row"):
        jax.block_until_ready(check(jnp.asarray([4])))


def test_caches_of_other_models_are_refused(unchecked, model):
    with pytest.raises(ValueError, match="`tokens` has 2 rows, the cache was made for 3"):
        model.decode(IDS, model.init_cache(3, 8))
    other = kz.KimiLinear(tiny(layer_kinds=("kda",) * 4), key=jr.key(5))
    wide = kz.KimiLinear(tiny(kv_lora_rank=11), key=jr.key(5))
    for cache in (other.init_cache(2, 8), wide.init_cache(2, 8)):
        with pytest.raises(ValueError, match="`cache` was made for another model"):
            model.decode(IDS, cache)
    with pytest.raises(TypeError, match=r"`cache` must come from `model\.init_cache`.*got tuple"):
        model.decode(IDS, ())


def test_going_back_needs_lengths_that_were(unchecked):
    cache = kz.KimiLinear(tiny(layer_kinds=("mla",) * 4), key=jr.key(5)).init_cache(2, 8)
    cache = eqx.tree_at(lambda c: c.lengths, cache, jnp.asarray([3, 5]))
    assert cache.rewind(jnp.asarray([0, 5])).lengths.tolist() == [0, 5]
    for lengths, message in (
        ([-1, 2], "row 0 must be from 0 to 3; got -1"),
        ([3, 6], "row 1 must be from 0 to 5; got 6"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.rewind(jnp.asarray(lengths))
    with pytest.raises(TypeError, match="got a list"):
        cache.rewind([1, 2])


def test_a_layer_that_cannot_decode_is_named(unchecked, model):
    foreign = kz.replace_layer(model, 1, kz.Linear(16, 16, key=jr.key(0)))
    with pytest.raises(TypeError, match="A layer of this model, a Linear, cannot decode"):
        foreign.init_cache(1, 8)
    with pytest.raises(TypeError, match="cannot decode"):
        kz.generate(foreign, [[1]], max_new_tokens=2)


def test_layers_are_read_one_at_a_time(unchecked, model):
    assert model.layers[np.int64(-1)].mixer.num_heads == 3
    for index in (slice(1, 3), 1.0, "0"):
        with pytest.raises(TypeError, match="Layers are read one at a time, by a whole number"):
            model.layers[index]


def test_examples_by_vmap(tokens):
    """A function of one row under `jax.vmap`: outputs and the gradients of every example."""
    model = kz.KimiLinear(tiny(layer_kinds=("mla",), mlp_kinds=("moe",)), key=jr.key(1))

    def loss(model, row):
        logits = model(row[None], segment_ids=jnp.ones_like(row)[None])[0]
        return jnp.sin(logits).sum(), logits

    gradient = eqx.filter_grad(loss, has_aux=True)
    grads, logits = eqx.filter_jit(eqx.filter_vmap(gradient, in_axes=(None, 0)))(model, tokens[:, :5])
    assert_close(logits, eqx.filter_jit(model)(tokens[:, :5]), atol=ATOL)
    expected, _ = eqx.filter_jit(gradient)(model, tokens[1, :5])
    assert_close(jax.tree.map(lambda leaf: leaf[1], grads), expected, rtol=1e-4, atol=1e-5)


def test_many_experts(getkey):
    """No cap on the number of experts: 896, of which 16 distinct ones are chosen."""
    router = kz.Router(8, 896, top_k=16, key=getkey())
    moe = kz.MoE(router, kz.Experts(8, 4, 896, key=getkey()))
    x = jr.normal(getkey(), (3, 8))
    expert_ids, _ = router(x)
    assert all(len(set(row)) == 16 for row in expert_ids.tolist())
    assert moe(x).shape == (3, 8)


def test_static_parts_hash_and_share_one_trace(model):
    traces = 0

    @eqx.filter_jit
    def run(model, tokens):
        nonlocal traces
        traces += 1
        return model.embedding(tokens)

    for key in (jr.key(6), jr.key(7)):
        other = kz.KimiLinear(TINY, key=key)
        hash(jax.tree.structure(other))
        assert jax.tree.structure(other) == jax.tree.structure(model)
        run(other, jnp.zeros((1, 2), jnp.int32))
    assert traces == 1


def test_models_from_different_folders_share_a_trace_and_mix(model):
    traces = 0

    @eqx.filter_jit
    def run(model):
        nonlocal traces
        traces += 1
        return model.norm.weight

    folders = [with_published(model, Published(source=folder, config=folder)) for folder in ("a", "b")]
    for other in folders:
        run(other)
    assert traces == 1
    mixed = jax.tree.map(lambda a, b: (a + b) / 2, *folders)
    assert mixed.published.source == "a" and np.array_equal(mixed.norm.weight, model.norm.weight)
    assert jax.tree.structure(folders[0]) != jax.tree.structure(with_published(model, Published(root="b.")))


def test_deeper_models_compile_the_same_units():
    kinds = ("kda", "kda", "kda", "mla")
    units = []
    for periods in (2, 7):
        layers = 4 * periods
        config = tiny(layer_kinds=kinds * periods, mlp_kinds=("dense",) + ("moe",) * (layers - 1))
        shape = eqx.filter_eval_shape(kz.KimiLinear, config, key=jr.key(0))
        units.append(sum(len(unit) for unit in shape.layers.sections))
    assert units == [5, 7]


def test_reading_and_replacing_layers(model, tokens):
    deep = kz.KimiLinear(tiny(layer_kinds=("kda",) * 6, mlp_kinds=("moe",) * 6), key=jr.key(8))
    assert deep.layers.repeats == (6,)
    block = deep.layers[2]
    silent = eqx.tree_at(lambda b: b.mixer.output_proj.weight, block, jnp.zeros_like(block.mixer.output_proj.weight))
    changed = kz.replace_layer(deep, 2, silent)
    assert changed.layers.repeats == (6,)
    assert not jnp.any(changed.layers[2].mixer.output_proj.weight)
    assert np.array_equal(changed.layers[3].mixer.output_proj.weight, deep.layers[3].mixer.output_proj.weight)
    attention = kz.KimiBlock(tiny(layer_kinds=("mla",) * 6, mlp_kinds=("moe",) * 6), 0, key=jr.key(9))
    mixed = kz.replace_layer(deep, -2, attention)
    assert mixed.layers.repeats == (4, 1, 1) and len(mixed.layers) == 6
    kinds = [type(layer.mixer).__name__ for layer in mixed.layers]
    assert kinds == ["KimiDeltaAttention"] * 4 + ["MultiHeadLatentAttention", "KimiDeltaAttention"]
    assert mixed(tokens[:, :3]).shape == (2, 3, 61)
    assert kz.replace_layer(deep, 1, lambda old: old).layers.repeats == (6,)
    with pytest.raises(IndexError, match="Layer 6 of a stack of 6"):
        kz.replace_layer(deep, 6, block)
    with pytest.raises(TypeError, match="must be an equinox module"):
        kz.replace_layer(deep, 0, 3)


def test_tree_at_reaches_stacked_leaves(model):
    where = lambda m: m.layers.sections[1][0].mixer.a_log
    changed = eqx.tree_at(where, model, jnp.zeros_like(where(model)))
    assert not jnp.any(changed.layers[1].mixer.a_log) and jnp.any(model.layers[1].mixer.a_log)
