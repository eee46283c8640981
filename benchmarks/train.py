"""Training steps of the reference model (20.9 million parameters): tokens per second and memory; packing; depth.

Run as `python benchmarks/train.py FOLDER`, a folder as `benchmarks/compare.py --write` writes it. Prints a line per
measurement: the step at 2 rows of 512 tokens with and without rematerialisation, what reading a batch and writing a
line of metrics take beside it, a row of 8192 tokens as one document and as 20, and the compiled temporary memory of
gradients against depth. Peaks are of the process so far, compiling included; with `JAX_COMPILATION_CACHE_DIR` set and
everything compiled before, they are of the steps alone.
"""

import argparse
import dataclasses
import resource
import tempfile
import time
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

import kimi_zoo as kz
from kimi_zoo.training.metrics import MetricsLog
from kimi_zoo.training.optimizers import make_optimizer
from kimi_zoo.training.packing import Batch
from kimi_zoo.training.step import StepOptions, gradients, start, train_step
from kimi_zoo.training.trainable import select, trains


def batch(rows: int, length: int, documents: int, vocab: int) -> Batch:
    """Random tokens in `documents` of about equal length per row."""
    random = np.random.default_rng(0)
    tokens = random.integers(3, vocab, (1, rows, length)).astype(np.int32)
    ids = np.broadcast_to(1 + np.arange(length) * documents // length, tokens.shape).astype(np.int32)
    weights = np.ones(tokens.shape, np.float32)
    weights[..., :-1] = ids[..., 1:] == ids[..., :-1]
    weights[..., -1] = 0
    return Batch(tokens, np.roll(tokens, -1, axis=-1), weights, ids)


def best_step(model: kz.KimiLinear, rows: Batch, options: StepOptions, repeats: int) -> float:
    """Seconds of the fastest of some steps, compiling left out."""
    optimizer = make_optimizer("adamw", 1e-4, weight_decay=0.01)
    state, frozen = start(model, trains(select(model)), optimizer)
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        state, metrics = train_step((frozen, rows, optimizer, options), state)
        jax.block_until_ready(metrics.loss)
        times.append(time.perf_counter() - began)
    return min(times[1:])


def temporary_mib(layers: int, remat: bool) -> float:
    """Temporary memory of the gradients of `layers` blocks of width 128 over 2048 tokens."""
    kinds = tuple("mla" if layer % 4 == 3 else "kda" for layer in range(layers))
    config = dataclasses.replace(
        kz.KimiLinearConfig(),
        vocab_size=1024,
        hidden_size=128,
        layer_kinds=kinds,
        mlp_kinds=("dense",) * layers,
        intermediate_size=256,
        linear_num_heads=2,
        linear_head_dim=64,
        num_attention_heads=2,
        kv_lora_rank=64,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
    )
    model = eqx.filter_eval_shape(lambda: kz.KimiLinear(config, key=jr.key(0)))
    arrays, static = eqx.partition(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    shapes = Batch(*(jax.ShapeDtypeStruct((1, 1, 2048), k) for k in (jnp.int32, jnp.int32, jnp.float32, jnp.int32)))
    run = lambda arrays, rows: gradients(arrays, static, rows, StepOptions(remat=remat))[1]
    return jax.jit(run).lower(arrays, shapes).compile().memory_analysis().temp_size_in_bytes / 2**20


def overhead(batches: int = 50) -> tuple[float, float]:
    """Seconds to read a batch of 2 packed rows of 512 tokens, and to write a line of metrics."""
    tokenizer = kz.load_tokenizer("kimi-linear-stdlib-5m")
    rows = Path(__file__).parent.parent / "examples" / "data" / "docstrings.jsonl"
    with tempfile.TemporaryDirectory() as scratch, MetricsLog(Path(scratch), lambda _line: None) as log:
        data = kz.training.prepare([rows], tokenizer, Path(scratch) / "data", seq_length=512)
        source = kz.training.Batches(data, np.arange(len(data)), seq_length=512, shape=(1, 2), seed=0)
        log.keep(0)
        began = time.perf_counter()
        for _ in source.read(0, batches):
            pass
        between = time.perf_counter()
        for number in range(batches):
            log.write({"step": number, "loss": 1.0, "tokens": 1024, "learning_rate": 1e-4, "seconds": 1.0})
        return (between - began) / batches, (time.perf_counter() - between) / batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--depths", type=int, nargs="*", default=[4, 16, 64])
    args = parser.parse_args()
    model = kz.from_pretrained(args.folder, dtype="float32")
    vocab = model.config.vocab_size
    for remat in (True, False):
        seconds = best_step(model, batch(2, 512, 1, vocab), StepOptions(remat=remat), args.repeats)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        how = ", remat" if remat else ""
        print(f"step, 2 rows of 512{how}: {1024 / seconds:.0f} tokens/s, peak {peak:.2f} GiB", flush=True)
    reading, writing = overhead()
    share = (reading + writing) / seconds
    print(f"reading a batch {reading * 1e3:.2f} ms, metrics {writing * 1e3:.2f} ms: {share:.2%} of a step", flush=True)
    for documents in (1, 20):
        seconds = best_step(model, batch(1, 8192, documents, vocab), StepOptions(remat=True), max(1, args.repeats // 2))
        print(f"step, a row of 8192 in {documents} documents, remat: {8192 / seconds:.0f} tokens/s", flush=True)
    for layers in args.depths:
        plain, saved = temporary_mib(layers, False), temporary_mib(layers, True)
        print(f"gradients, {layers} layers: {plain:.0f} MiB temporary, {saved:.0f} with remat", flush=True)


if __name__ == "__main__":
    main()
