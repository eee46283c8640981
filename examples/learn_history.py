"""Small models learn to remember, and cannot without the recurrent state.

Two tasks share every batch. Associative recall: four key-value pairs, 72 tokens of noise, then the keys again in
another order, each to be answered with its value. Delayed copy: a start mark and four symbols, 75 tokens of noise, then
the mark again, to be answered with the symbols. What has to be remembered lies further back than the convolutions (4
tokens) and a chunk (64 tokens) reach, and the current token says nothing about it: the pairs and symbols are drawn anew
for every row. So a model without KDA, or with its state cut at the chunk's border, can only guess.

Run as `python examples/learn_history.py [--steps 300]`; prints the accuracy of every variant beside that of guessing.
"""

import argparse
import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax

import kimi_zoo as kz

KEYS, VALUES, SYMBOLS, NOISE, START = (1, 9), (9, 17), (17, 25), (25, 40), 40
LENGTH = 88
CHUNK = 64
QUERIES = jnp.asarray([80, 82, 84, 86])  # where recall is asked for: the value is the next token
COPIES = jnp.asarray([80, 81, 82, 83])  # where the copy is asked for
CONFIG = kz.KimiLinearConfig(
    vocab_size=41,
    hidden_size=32,
    layer_kinds=("kda", "kda"),
    mlp_kinds=("dense", "dense"),
    intermediate_size=32,
    initializer_range=0.1,
    linear_num_heads=2,
    linear_head_dim=16,
    num_attention_heads=2,
    kv_lora_rank=16,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    num_experts=0,
    num_shared_experts=0,
)
VARIANTS = {
    "all KDA": (("kda", "kda"), None),
    "all KDA, its contribution zeroed": (("kda", "kda"), "silent"),
    "all KDA, state cut at every chunk": (("kda", "kda"), "cut"),
    "hybrid (KDA, MLA)": (("kda", "mla"), None),
    "hybrid, KDA zeroed": (("kda", "mla"), "silent"),
}


class SilentMixer(eqx.Module):
    """In the place of a token mixer: adds nothing to the residual stream."""

    def __call__(self, x, **_):
        return jnp.zeros_like(x)


def recall_row(key):
    """[key value] * 4, noise, the same pairs in another order."""
    keys = jr.choice(key, jnp.arange(*KEYS), (4,), replace=False)
    values = jr.randint(jr.fold_in(key, 1), (4,), *VALUES)
    order = jr.permutation(jr.fold_in(key, 2), 4)
    pairs = lambda order: jnp.stack([keys[order], values[order]], axis=1).reshape(-1)
    noise = jr.randint(jr.fold_in(key, 3), (LENGTH - 16,), *NOISE)
    return jnp.concatenate([pairs(jnp.arange(4)), noise, pairs(order)])


def copy_row(key):
    """Start, four symbols, noise, start, the same symbols, noise."""
    symbols = jr.choice(key, jnp.arange(*SYMBOLS), (4,), replace=False)
    marked = jnp.concatenate([jnp.asarray([START]), symbols])
    noise = jr.randint(jr.fold_in(key, 1), (LENGTH - 10,), *NOISE)
    return jnp.concatenate([marked, noise[:75], marked, noise[75:]])


def make_batch(key, rows):
    """`rows` of recall, then `rows` of copy."""
    return jnp.concatenate([jax.vmap(recall_row)(jr.split(key, rows)), jax.vmap(copy_row)(jr.split(key, rows))])


def answers(model, tokens, cut):
    """Logits and targets at the questions of both tasks: `[2, rows, 4, vocab]` and `[2, rows, 4]`."""
    ids = jnp.broadcast_to(1 + jnp.arange(LENGTH) // CHUNK, tokens.shape) if cut else None
    hidden = model.hidden_states(tokens, segment_ids=ids)
    recall, copy = jnp.split(hidden, 2)
    recalled, copied = jnp.split(tokens, 2)
    logits = jnp.stack([model.logits(recall[:, QUERIES]), model.logits(copy[:, COPIES])])
    return logits, jnp.stack([recalled[:, QUERIES + 1], copied[:, COPIES + 1]])


def loss_fn(model, tokens, cut):
    logits, targets = answers(model, tokens, cut)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


@eqx.filter_jit
def train(model, key, steps, rows, cut):
    """`steps` of Adam on fresh rows each; returns the trained model."""
    optimizer = optax.adam(optax.cosine_decay_schedule(8e-3, steps))
    params, static = eqx.partition(model, eqx.is_array)

    def step(state, key):
        params, opt_state = state
        grads = jax.grad(lambda p: loss_fn(eqx.combine(p, static), make_batch(key, rows), cut))(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    (params, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), jr.split(key, steps))
    return eqx.combine(params, static)


@eqx.filter_jit
def accuracy(model, key, cut):
    """Of both tasks, on fresh rows."""
    logits, targets = answers(model, make_batch(key, 256), cut)
    return (logits.argmax(-1) == targets).mean(axis=(1, 2))


def run(variant, *, steps=300, rows=32, seed=0):
    """Trains a variant from scratch; returns its accuracy at recall and at copy."""
    kinds, ablation = VARIANTS[variant]
    model = kz.KimiLinear(dataclasses.replace(CONFIG, layer_kinds=kinds), key=jr.key(seed))
    if ablation == "silent":
        for layer, kind in enumerate(kinds):
            if kind == "kda":
                mute = lambda block: eqx.tree_at(lambda b: b.mixer, block, SilentMixer())
                model = kz.replace_layer(model, layer, mute)
    model = train(model, jr.key(seed + 1), steps, rows, ablation == "cut")
    return [float(a) for a in accuracy(model, jr.key(seed + 2), ablation == "cut")]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    print(f"{'variant':36s} recall   copy")
    for variant in VARIANTS:
        recall, copy = run(variant, steps=args.steps)
        print(f"{variant:36s} {recall:6.3f} {copy:6.3f}", flush=True)
    print(f"{'guessing':36s} {1 / 8:6.3f} {(1 / 8 + 1 / 7 + 1 / 6 + 1 / 5) / 4:6.3f}")


if __name__ == "__main__":
    main()
