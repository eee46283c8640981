"""A small recurrent model with the decoding interface of a real one: enough to test generation without its cost."""

from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array

VOCAB = 23


@dataclass(frozen=True)
class ToyConfig:
    vocab_size: int = VOCAB
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None


class ToyCache(eqx.Module):
    lengths: Array
    state: Array
    max_length: int = eqx.field(static=True)


class ToyModel(eqx.Module):
    """`state = tanh(recur @ state + embed[token] + position term)`; a real token changes it, a pad does not."""

    embed: Array
    recur: Array
    head: Array
    config: ToyConfig = eqx.field(static=True)

    def __init__(self, *, key, dim=7, config=None):
        config = config or ToyConfig()
        embed_key, recur_key, head_key = jr.split(key, 3)
        self.embed = jr.normal(embed_key, (config.vocab_size, dim))
        self.recur = jr.normal(recur_key, (dim, dim)) * 0.6
        self.head = jr.normal(head_key, (config.vocab_size, dim)) * 2
        self.config = config

    def init_cache(self, batch, max_length):
        return ToyCache(jnp.zeros(batch, jnp.int32), jnp.zeros((batch, self.recur.shape[0])), max_length)

    def decode_hidden_states(self, tokens, cache, *, lengths=None):
        TRACES.append(tokens.shape)
        batch, seq = tokens.shape
        lengths = jnp.full(batch, seq, jnp.int32) if lengths is None else lengths

        def step(carry, at):
            state, index = carry
            token = jax.lax.dynamic_index_in_dim(tokens, at, 1, keepdims=False)
            position = (index % 5).astype(jnp.float32)[:, None]
            new = jnp.tanh(state @ self.recur.T + self.embed[token] + 0.1 * position)
            real = (at < lengths)[:, None]
            state = jnp.where(real, new, state)
            return (state, index + real[:, 0].astype(jnp.int32)), state

        (state, index), hidden = jax.lax.scan(step, (cache.state, cache.lengths), jnp.arange(seq, dtype=jnp.int32))
        return hidden.swapaxes(0, 1), ToyCache(index, state, cache.max_length)

    def logits(self, hidden):
        return hidden @ self.head.T

    def decode(self, tokens, cache, *, lengths=None):
        hidden, cache = self.decode_hidden_states(tokens, cache, lengths=lengths)
        return self.logits(hidden), cache


TRACES: list[tuple[int, ...]] = []  # the token shapes with which a toy model was traced, in order


def greedy_reference(model, prompt, steps, *, eos=()):
    """Greedy tokens by one full pass per token: no cache, no batch. Padded to one size, so that it compiles once."""
    tokens = list(prompt)
    for _ in range(steps):
        row = jnp.asarray([tokens + [0] * (48 - len(tokens))], jnp.int32)
        tokens.append(int(full_pass(model, row)[0, len(tokens) - 1].argmax()))
        if tokens[-1] in eos:
            break
    return tokens[len(prompt) :]


@eqx.filter_jit
def full_pass(model, tokens):
    return model.decode(tokens, model.init_cache(*tokens.shape))[0]
