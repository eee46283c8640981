"""Quantised frozen weights: exactly their dequantised numbers everywhere, in less memory."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers import TINY, assert_close, tiny

import kimi_zoo as kz
from kimi_zoo.training.lora import add_lora, lora_leaves, merge_lora
from kimi_zoo.training.options import RunOptions
from kimi_zoo.training.quantization import dequantized, quantize, quantize_frozen
from kimi_zoo.training.run import trainable_model
from kimi_zoo.training.step import as_computed

TARGETS = ("q_proj", "kv_b_proj", "up_proj", "w2")


@pytest.mark.parametrize(("kind", "step"), [("int8", 1 / 127), ("nf4", 0.31)])  # NF4: its widest gap, of a maximum of 1
def test_blocks_are_rounded_to_the_nearest_level(kind, step, getkey):
    weight = jr.normal(getkey(), (3, 5, 96)) * jnp.exp(jr.normal(getkey(), (3, 5, 96)))
    quantized = quantize(weight, kind)
    assert quantized.scales.shape == (3, 5, 2)  # blocks of 48: 64 does not divide 96
    largest = jnp.max(jnp.abs(weight.reshape(3, 5, 2, 48)), -1, keepdims=True)
    error = jnp.abs(quantized.dequantized() - weight).reshape(3, 5, 2, 48)
    assert float(jnp.max(error / largest)) <= step / 2 + 1e-3
    assert quantized.values.on_device_size_in_bytes() == weight.size // {"int8": 1, "nf4": 2}[kind]
    assert not np.any(np.asarray(quantize(jnp.zeros((2, 8)), kind).dequantized()))


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_forward_and_gradients_are_those_of_the_dequantised_weights(kind, getkey):
    model = kz.KimiLinear(tiny(layer_kinds=("mla",), mlp_kinds=("moe",)), key=getkey())
    lora = add_lora(model, rank=2, targets=TARGETS, key=getkey())
    lora = jax.tree.map(lambda leaf, is_delta: leaf + 0.05 if is_delta else leaf, lora, lora_leaves(lora))
    small = quantize_frozen(lora, kind)
    plain = dequantized(small)
    assert jax.tree.structure(plain) == jax.tree.structure(lora)
    tokens = jr.randint(getkey(), (1, 6), 0, TINY.vocab_size)

    @eqx.filter_jit
    def run(model):
        trainable, frozen = eqx.partition(model, lora_leaves(model))
        loss = lambda trainable: jnp.sum(jax.nn.log_softmax(eqx.combine(trainable, frozen)(tokens))[0, :, 3])
        return model(tokens), jax.tree.leaves(jax.grad(loss)(trainable))

    actual, expected = run(small), run(plain)
    assert_close(actual, expected, rtol=1e-5)
    assert float(jnp.abs(run(lora)[0] - actual[0]).max()) > 1e-3  # it is another model
    assert_close(eqx.filter_jit(merge_lora(small))(tokens), actual[0], atol=2e-5)
    cast = as_computed(small, jnp.bfloat16)
    scales = [leaf.dtype for leaf in jax.tree.leaves(cast) if leaf.dtype != jnp.bfloat16]
    assert jnp.float32 in scales  # of dequantising


def test_what_trains_is_not_quantised(getkey):
    model = kz.KimiLinear(TINY, key=getkey())
    options = RunOptions(model="m", data=("d",), lora=2, frozen_weights="nf4", train=("o_proj", "A_log"))
    small, wanted = trainable_model(model, options)
    section, position, _ = model.layers.locate(1)
    block, chosen = small.layers.sections[section][position], wanted.layers.sections[section][position]
    assert isinstance(block.mixer.output_proj.base, kz.Linear) and chosen.mixer.output_proj.base.weight is True
    assert not isinstance(block.mixer.key_proj.base, kz.Linear) and chosen.mixer.a_log is True
    assert not any(jax.tree.leaves(chosen.mlp.experts))
    with pytest.raises(ValueError, match="`frozen_weights` go with `lora`"):
        dataclasses.replace(options, lora=0)
    with pytest.raises(ValueError, match="one of int8, nf4; got 'int3'"):
        dataclasses.replace(options, frozen_weights="int3")


def test_memory_of_gradients_is_less(getkey):
    """Neither the dequantised weights nor sums with deltas are kept for the gradient of every layer."""
    config = dataclasses.replace(
        TINY, layer_kinds=("mla",) * 6, mlp_kinds=("moe",) * 6, hidden_size=64, moe_intermediate_size=128, vocab_size=64
    )
    tokens = jnp.zeros((1, 4), jnp.int32)

    def memory(kind):
        model = add_lora(kz.KimiLinear(config, key=jr.key(0)), rank=1, targets=("w1", "q_proj"), key=jr.key(1))
        model = model if kind is None else quantize_frozen(model, kind)
        trainable, frozen = eqx.partition(model, lora_leaves(model))
        arrays, static = eqx.partition(frozen, eqx.is_array)
        loss = lambda trainable, arrays: jnp.sum(eqx.combine(trainable, arrays, static)(tokens))
        analysis = jax.jit(jax.grad(loss)).lower(trainable, arrays).compile().memory_analysis()
        return analysis.argument_size_in_bytes + analysis.temp_size_in_bytes

    experts = 6 * 3 * config.num_experts * 64 * 128 * 4
    assert memory("nf4") < memory(None) - 0.6 * experts
