"""A training step as a user writes it: traced once, its buffers donated, the caller's model usable afterwards."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
import pytest
from helpers import TINY

import kimi_zoo as kz


@jax.numpy_dtype_promotion("standard")  # optax multiplies whole numbers and floats
def test_donating_steps_trace_once_and_reuse_memory(getkey):
    tokens = jr.randint(getkey(), (2, 9), 0, TINY.vocab_size)
    optimizer = optax.adamw(1e-2)
    traces = []

    @eqx.filter_jit(donate="all-except-first")
    def step(tokens, model, state):
        traces.append(None)

        def loss(model):
            logits = model(tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        value, gradient = eqx.filter_value_and_grad(loss)(model)
        updates, state = optimizer.update(gradient, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, value

    model = kz.KimiLinear(TINY, key=getkey())  # fresh: no two parameters may share a buffer
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    losses = []
    for _ in range(4):
        old = jax.tree.leaves((eqx.filter(model, eqx.is_array), eqx.filter(state, eqx.is_array)))
        model, state, loss = step(tokens, model, state)
        assert all(leaf.is_deleted() for leaf in old)
        losses.append(float(loss))
    assert len(traces) == 1
    assert losses[-1] < losses[0]
    assert len(kz.generate(model, [[1, 2, 3]], max_new_tokens=3, temperature=0.0, eos_ids=())[0]) == 3


def test_loaded_models_can_be_donated_and_others_stay_usable(tmp_path, getkey):
    kz.save_pretrained(kz.KimiLinear(TINY, key=getkey()), tmp_path / "model")
    first, second = kz.from_pretrained(tmp_path / "model"), kz.from_pretrained(tmp_path / "model")
    tokens = jnp.asarray([[1, 2, 3]])
    expected = second(tokens)
    doubled = eqx.filter_jit(lambda model: jax.tree.map(lambda x: x * 2 if eqx.is_array(x) else x, model), donate="all")
    doubled(first)
    with pytest.raises(RuntimeError, match="deleted"):
        first(tokens)
    assert (second(tokens) == expected).all() and (kz.from_pretrained(tmp_path / "model")(tokens) == expected).all()
