"""Does the recurrent state carry the past? Trains small models on two tasks that nothing but memory can solve.

    uv run examples/learn_history.py [--steps N] [--seed S] [--json FILE]

Both tasks end with answers that were shown more than 64 tokens earlier, with blanks between:

- recall: pairs of a key and a value; later the keys come back in another order, and each asks for its value.
- copy: a string of symbols behind a marker; later the marker comes back, and the string is to be said again.

Values and symbols are independent and uniform. So in the part that is scored neither the current token, nor the tokens
that the convolutions reach (3 before it in each layer), nor anything else behind the last boundary of 64 tokens says
anything about an answer: a model that sees no further stays at chance, one in eight, however long it trains.
"""

import argparse
import json
import math
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray
from tqdm import tqdm

import kimi_zoo as kz

CHUNK = 64  # of the chunked operator
ITEMS = 8  # pairs in a recall, symbols in a copy; also the number of different keys and of different values
BLANK, MARKER, KEYS, VALUES = 0, 1, 2, 2 + ITEMS
START = 4  # blanks before anything, as many as the convolution has taps
ASKED = CHUNK + START + 2 * ITEMS  # place of the first question: more than a chunk behind the last thing shown
LENGTH = ASKED + ITEMS + 1
SHIFT = 32  # in training everything moves right by up to so many blanks: counting tokens does not help


def recall(key: PRNGKeyArray) -> tuple[Int[Array, " seq"], Int[Array, " seq"]]:
    """One row of tokens, and the answer wanted at each place (-1: none)."""
    shown_key, asked_key, value_key = jr.split(key, 3)
    keys, values = jr.permutation(shown_key, ITEMS), jr.randint(value_key, (ITEMS,), 0, ITEMS)
    asked = jr.permutation(asked_key, ITEMS)
    pairs = jnp.stack([KEYS + keys, VALUES + values], 1).reshape(-1)
    tokens = (
        jnp.full(LENGTH, BLANK).at[START : START + 2 * ITEMS].set(pairs).at[ASKED : ASKED + ITEMS].set(KEYS + asked)
    )
    answers = VALUES + values[jnp.argsort(keys)[asked]]
    return tokens, jnp.full(LENGTH, -1).at[ASKED : ASKED + ITEMS].set(answers)


def copy(key: PRNGKeyArray) -> tuple[Int[Array, " seq"], Int[Array, " seq"]]:
    """One row of tokens, and the answer wanted at each place (-1: none)."""
    symbols = VALUES + jr.randint(key, (ITEMS,), 0, ITEMS)
    said = jnp.concatenate([jnp.array([MARKER]), symbols])
    tokens = jnp.full(LENGTH, BLANK).at[START : START + ITEMS + 1].set(said).at[ASKED : ASKED + ITEMS + 1].set(said)
    return tokens, jnp.full(LENGTH, -1).at[ASKED : ASKED + ITEMS].set(symbols)


def batch(key: PRNGKeyArray, rows: int, shift: int) -> tuple[Int[Array, "batch seq"], Int[Array, "batch seq"]]:
    """`rows` of each task, recall first, moved right by up to `shift` blanks."""
    data_key, shift_key = jr.split(key)
    keys = jr.split(data_key, (2, rows))
    tokens, answers = jax.tree.map(
        lambda *parts: jnp.concatenate(parts), jax.vmap(recall)(keys[0]), jax.vmap(copy)(keys[1])
    )
    if shift:
        by = jr.randint(shift_key, (2 * rows,), 0, shift + 1)
        padded = lambda x, fill: jnp.pad(x, ((0, 0), (0, shift)), constant_values=fill)
        tokens, answers = (jax.vmap(jnp.roll)(padded(x, fill), by) for x, fill in ((tokens, BLANK), (answers, -1)))
    return tokens, answers


class Nothing(eqx.Module):
    """A mixer that contributes nothing: the block keeps its MLP only."""

    def __call__(
        self, x: Float[Array, "batch seq dim"], *, segment_ids: Array | None = None
    ) -> Float[Array, "batch seq dim"]:
        """Zeros."""
        return jnp.zeros_like(x)


class CutAtChunks(eqx.Module):
    """A KDA layer that starts afresh, with an empty state, every 64 tokens."""

    kda: eqx.Module

    def __call__(
        self, x: Float[Array, "batch seq dim"], *, segment_ids: Array | None = None
    ) -> Float[Array, "batch seq dim"]:
        """As the layer does with documents of 64 tokens."""
        pieces = jnp.broadcast_to(1 + jnp.arange(x.shape[1]) // CHUNK, x.shape[:2])
        return self.kda(x, segment_ids=pieces)


def build(layer_kinds: tuple[str, ...], ablation: str | None, *, key: PRNGKeyArray) -> kz.KimiLinear:
    """A small model, its KDA layers left as they are, or `"zeroed"`, or `"cut"`."""
    config = kz.KimiLinearConfig(
        vocab_size=VALUES + ITEMS,
        hidden_size=64,
        layer_kinds=layer_kinds,
        mlp_kinds=("dense",) * len(layer_kinds),
        intermediate_size=64,
        linear_num_heads=2,
        linear_head_dim=32,
        num_attention_heads=2,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        initializer_range=0.12,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = kz.KimiLinear(config, key=key)
    # Decays start 16 times slower than usual: half the steps suffice, as what is forgotten at first teaches nothing.
    slower = lambda kda: eqx.tree_at(lambda kda: kda.a_log, kda, kda.a_log - math.log(16))
    change = {None: slower, "cut": lambda kda: CutAtChunks(slower(kda)), "zeroed": lambda kda: Nothing()}[ablation]
    for layer, kind in enumerate(layer_kinds):
        if kind == "kda":
            replace = lambda block: eqx.tree_at(lambda block: block.mixer, block, change(block.mixer))
            model = kz.replace_layer(model, layer, replace)
    return model


def loss(model: kz.KimiLinear, tokens: Int[Array, "batch seq"], answers: Int[Array, "batch seq"]) -> Float[Array, ""]:
    """Mean cross-entropy of the answers, in nats."""
    losses = optax.softmax_cross_entropy_with_integer_labels(model(tokens), jnp.maximum(answers, 0))
    return jnp.sum(losses * (answers >= 0)) / jnp.sum(answers >= 0)


@eqx.filter_jit
def accuracy(model: kz.KimiLinear, key: PRNGKeyArray) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Share of right answers on fresh data: recall, copy."""
    tokens, answers = batch(key, 128, 0)
    right = (jnp.argmax(model(tokens), -1) == answers).reshape(2, -1).sum(-1)
    return tuple(right / (answers >= 0).reshape(2, -1).sum(-1))


def train(model: kz.KimiLinear, *, steps: int, rows: int, key: PRNGKeyArray) -> kz.KimiLinear:
    """Adam, fresh data at every step."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, steps // 20, steps, 1e-4)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule, b2=0.98))
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit(donate="all-except-first")
    def step(key: PRNGKeyArray, model: kz.KimiLinear, state: optax.OptState):
        gradient = eqx.filter_grad(loss)(model, *batch(key, rows, SHIFT))
        updates, state = optimizer.update(gradient, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state

    for number in tqdm(range(steps), leave=False, disable=None):
        model, state = step(jr.fold_in(key, number), model, state)
    return model


VARIANTS = {
    "all KDA": (("kda", "kda"), None),
    "all KDA, KDA zeroed": (("kda", "kda"), "zeroed"),
    "all KDA, state cut every 64 tokens": (("kda", "kda"), "cut"),
    "hybrid": (("kda", "kda", "kda", "mla"), None),
    "hybrid, state cut every 64 tokens": (("kda", "kda", "kda", "mla"), "cut"),
    "hybrid, KDA zeroed": (("kda", "kda", "kda", "mla"), "zeroed"),
}


def main() -> None:
    """Trains every variant and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=16, help="of each task, per step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME")
    parser.add_argument("--json", help="also write the table to this file")
    arguments = parser.parse_args()
    results = {}
    print(f"chance: recall {1 / ITEMS:.3f}, copy {1 / ITEMS:.3f}")
    for name in arguments.variants:
        layer_kinds, ablation = VARIANTS[name]
        began = time.perf_counter()
        model_key, data_key, test_key = jr.split(jr.key(arguments.seed), 3)
        model = train(
            build(layer_kinds, ablation, key=model_key), steps=arguments.steps, rows=arguments.rows, key=data_key
        )
        recalled, copied = (float(x) for x in accuracy(model, test_key))
        results[name] = {"recall": recalled, "copy": copied}
        print(f"{name:<36} recall {recalled:.3f}  copy {copied:.3f}  {time.perf_counter() - began:.0f} s", flush=True)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
