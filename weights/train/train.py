"""Trains the bundled model: a small Kimi Linear on Python's own standard library.

Run as `python weights/train/train.py DATA RUN`, where DATA is the folder that `tokenizer.py` wrote. RUN receives
`metrics.jsonl`, `state.eqx` (to resume: run the same command again) and, at the end, `model/`, a published-style
checkpoint in bfloat16. Muon moves the matrices, Adam the rest; the router's bias is moved by load alone, as in
DeepSeek-V3.
"""

import argparse
import json
import os
import time
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from tqdm import tqdm

import kimi_zoo as kz

CONFIG = kz.KimiLinearConfig(
    vocab_size=4096,
    hidden_size=192,
    layer_kinds=("kda", "kda", "kda", "mla") * 2,
    mlp_kinds=("dense",) + ("moe",) * 7,
    intermediate_size=512,
    initializer_range=0.03,
    tie_word_embeddings=True,
    linear_num_heads=3,
    linear_head_dim=64,
    num_attention_heads=3,
    kv_lora_rank=96,
    qk_nope_head_dim=64,
    qk_rope_head_dim=32,
    v_head_dim=64,
    num_experts=8,
    num_experts_per_token=2,
    moe_intermediate_size=80,
    routed_scaling_factor=1.0,
    model_max_length=8192,
    bos_token_id=0,
    eos_token_id=0,
    pad_token_id=0,
)
BIAS_STEP = 1e-3  # of the router's balancing bias
LOSS_ROWS = 1024  # tokens whose logits exist at once


def batches(stream: np.ndarray, *, rows: int, length: int, seed: int):
    """Endless batches of `rows` pieces of `length + 1` tokens; every epoch cuts the stream at another offset, and
    shuffles."""
    epoch = 0
    while True:
        random = np.random.default_rng((seed, epoch))
        usable = stream[random.integers(length) :]
        pieces = np.arange(0, len(usable) - length, length)
        random.shuffle(pieces)
        for start in range(0, len(pieces) - rows + 1, rows):
            yield np.stack([usable[p : p + length + 1] for p in pieces[start : start + rows]]).astype(np.int32)
        epoch += 1


def token_losses(model: kz.KimiLinear, hidden: jax.Array, targets: jax.Array) -> jax.Array:
    """Next-token losses in nats, `LOSS_ROWS` tokens at a time so that the logits of all never exist at once."""

    @jax.checkpoint
    def some(piece):
        hidden, targets = piece
        logits = model.logits(hidden).astype(jnp.float32)
        return jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]

    rows = min(LOSS_ROWS, targets.size)
    pieces = hidden.reshape(-1, rows, hidden.shape[-1]), targets.reshape(-1, rows)
    return jax.lax.map(some, pieces).reshape(targets.shape)


def forward(model: kz.KimiLinear, tokens: jax.Array) -> tuple[jax.Array, object]:
    """Normalised hidden states, and how many tokens each expert of each layer was given.

    Documents that share a row are told apart by the mark between them alone.
    """
    positions = jnp.zeros_like(tokens)  # nothing reads them: the model has no positional embedding

    def apply(x, block):
        attention = isinstance(block.mixer, kz.MultiHeadLatentAttention)
        x = x + block.mixer(block.input_norm(x), **({"positions": positions} if attention else {}))
        normed = block.post_norm(x)
        counts = None
        if isinstance(block.mlp, kz.MoE):
            expert_ids, _ = block.mlp.router(normed.reshape(-1, x.shape[-1]))
            counts = jnp.bincount(expert_ids.reshape(-1), length=block.mlp.router.weight.shape[0])
        return x + block.mlp(normed), counts

    x, counts = model.layers.scan(apply, model.embedding(tokens))
    return model.norm(x), counts


def loss_fn(model: kz.KimiLinear, batch: jax.Array) -> tuple[jax.Array, object]:
    """Mean next-token loss in nats, and the experts' token counts."""
    hidden, counts = forward(model, batch[:, :-1])
    return token_losses(model, hidden, batch[:, 1:]).mean(), counts


def balance(model: kz.KimiLinear, counts: object) -> kz.KimiLinear:
    """Raises the bias of experts that got less than their share of tokens, lowers that of the others."""

    def move(block, count):
        if not isinstance(block.mlp, kz.MoE):
            return block
        share = count.mean(-1, keepdims=True)
        step = BIAS_STEP * jnp.sign(share - count)
        step = step - step.mean(-1, keepdims=True)
        return eqx.tree_at(lambda b: b.mlp.router.score_bias, block, block.mlp.router.score_bias + step)

    sections = tuple(
        tuple(move(block, count) for block, count in zip(unit, unit_counts, strict=True))
        for unit, unit_counts in zip(model.layers.sections, counts.sections, strict=True)
    )
    return eqx.tree_at(lambda m: m.layers.sections, model, sections)


def matrices(params) -> object:
    """Which leaves Muon moves, and their axes: projections `[..., out, in]`, stacked over layers and experts."""

    def spec(path, leaf):
        name = jax.tree_util.keystr(path)
        matrix = "_proj" in name or "kv_" in name or ".mlp." in name
        if not matrix or "norm" in name or "router" in name or leaf.ndim < 3:
            return None
        return optax.contrib.MuonDimensionNumbers(leaf.ndim - 1, leaf.ndim - 2)

    return jax.tree_util.tree_map_with_path(spec, params)


def make_optimizer(peak: float, steps: int) -> optax.GradientTransformation:
    """Muon at AdamW's step size (arXiv:2502.16982), Adam at half of it; warm-up, then cosine decay."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, min(40, steps // 10), steps, peak * 0.01)
    muon = optax.contrib.muon(
        schedule,
        weight_decay=0.1,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=matrices,
        adam_learning_rate=lambda count: schedule(count) / 2,
        adam_b2=0.95,
    )
    return optax.chain(optax.clip_by_global_norm(1.0), muon)


@eqx.filter_jit(donate="all")
def train_step(state, batch, optimizer):
    """One step; `state` is (model, optimizer state)."""
    model, opt_state = state
    (loss, counts), grads = eqx.filter_value_and_grad(loss_fn, has_aux=True)(model, batch)
    params, static = eqx.partition(model, eqx.is_array)
    updates, opt_state = optimizer.update(eqx.filter(grads, eqx.is_array), opt_state, params)
    model = balance(eqx.combine(optax.apply_updates(params, updates), static), counts)
    return (model, opt_state), loss, optax.global_norm(grads)


@eqx.filter_jit
def evaluate_rows(model, batch):
    """Losses of a batch, without gradients."""
    hidden, _ = forward(model, batch[:, :-1])
    return token_losses(model, hidden, batch[:, 1:])


def bits_per_byte(model: kz.KimiLinear, stream: np.ndarray, size: int, *, rows: int, length: int) -> float:
    """Of a held-out stream cut into pieces of `length` tokens, nothing carried from one piece to the next."""
    starts = np.arange(0, len(stream) - 1, length)
    total = 0.0
    for first in range(0, len(starts), rows):
        pieces = [stream[s : s + length + 1] for s in starts[first : first + rows]]
        batch = np.zeros((rows, length + 1), np.int32)
        for row, piece in enumerate(pieces):
            batch[row, : len(piece)] = piece
        losses = np.asarray(evaluate_rows(model, batch))
        total += sum(losses[row, : len(piece) - 1].sum() for row, piece in enumerate(pieces))
    return float(total / np.log(2) / size)


def save_state(path: Path, state, step: int) -> None:
    """Writes everything that a later run continues from, in one rename."""
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        np.save(file, np.int64(step))
        eqx.tree_serialise_leaves(file, state)
    os.replace(temporary, path)


def load_state(path: Path, state) -> tuple[object, int]:
    with open(path, "rb") as file:
        step = int(np.load(file))
        return eqx.tree_deserialise_leaves(file, state), step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", type=int, default=1100)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--peak", type=float, default=6e-3, help="learning rate after warm-up")
    parser.add_argument("--every", type=int, default=50, help="steps between evaluations and saved states")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.run.mkdir(parents=True, exist_ok=True)
    train, held_out = np.load(args.data / "train.npy"), np.load(args.data / "held_out.npy")
    size = json.loads((args.data / "tokens.json").read_text())["held_out"]["bytes"]

    model = kz.KimiLinear(CONFIG, key=jr.key(args.seed))
    optimizer = make_optimizer(args.peak, args.steps)
    state, step = (model, optimizer.init(eqx.filter(model, eqx.is_array))), 0
    if (args.run / "state.eqx").exists():
        state, step = load_state(args.run / "state.eqx", state)
    source = batches(train, rows=args.rows, length=args.length, seed=args.seed)
    for _ in range(step):
        next(source)
    bar = tqdm(range(step, args.steps), initial=step, total=args.steps)
    with open(args.run / "metrics.jsonl", "a") as metrics:
        for step in bar:
            batch = next(source)
            started = time.perf_counter()
            state, loss, norm = train_step(state, batch, optimizer)
            line = {"step": step + 1, "loss": float(loss), "grad_norm": float(norm), "s": time.perf_counter() - started}
            last = step + 1 == args.steps
            if (step + 1) % args.every == 0 or last:
                line["held_out_bpb"] = bits_per_byte(state[0], held_out, size, rows=args.rows, length=args.length)
                save_state(args.run / "state.eqx", state, step + 1)
            metrics.write(json.dumps(line) + "\n")
            metrics.flush()
            bar.set_postfix(loss=f"{line['loss']:.3f}", bpb=line.get("held_out_bpb"))
    kz.save_pretrained(state[0], args.run / "model", dtype="bfloat16")


if __name__ == "__main__":
    main()
