"""Compile time and running time against depth, stacked layers beside a plain loop over layers.

Run as `python benchmarks/compile.py [--layers 4,9,27]`. Models of equal width in the pattern of Kimi Linear (KDA to MLA
3 to 1, first MLP dense); for each depth the forward pass and a training step (loss, gradients, SGD), compiled from
nothing.
"""

import argparse
import json
import time
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

import kimi_zoo as kz
from kimi_zoo.generation.unstack import unstack

BATCH, SEQ = 1, 256


def config(layers: int) -> kz.KimiLinearConfig:
    kinds = ["mla" if layer % 4 == 0 else "kda" for layer in range(1, layers + 1)]
    if layers == 27:
        kinds[-1] = "mla"  # as in the 48B model
    return kz.KimiLinearConfig(
        vocab_size=1024,
        hidden_size=128,
        layer_kinds=tuple(kinds),
        mlp_kinds=("dense",) + ("moe",) * (layers - 1),
        intermediate_size=256,
        linear_num_heads=2,
        linear_head_dim=64,
        num_attention_heads=2,
        kv_lora_rank=64,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        num_experts=8,
        num_experts_per_token=2,
        moe_intermediate_size=64,
    )


def forward(model, tokens):
    return model(tokens)


def train(model, tokens):
    def loss_fn(model):
        log_probs = jax.nn.log_softmax(model(tokens)[:, :-1])
        return -jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1).mean()

    grads = eqx.filter_grad(loss_fn)(model)
    return eqx.apply_updates(model, jax.tree.map(lambda g: -0.01 * g, grads))


def measure(function, model, tokens, runs: int) -> dict[str, float]:
    jax.clear_caches()
    start = time.perf_counter()
    lowered = eqx.filter_jit(function).lower(model, tokens)
    traced = time.perf_counter()
    compiled = lowered.compile()
    done = time.perf_counter()
    times = []
    for _ in range(runs + 1):
        begin = time.perf_counter()
        jax.block_until_ready(compiled(model, tokens))
        times.append(time.perf_counter() - begin)
    return {"trace_s": traced - start, "compile_s": done - traced, "run_ms": 1e3 * sorted(times[1:])[runs // 2]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="4,9,27")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--no-loop", action="store_true", help="leave the plain loop out: it compiles for long")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    tokens = jr.randint(jr.key(1), (BATCH, SEQ), 0, 1024)
    rows = []
    print(f"{'layers':>6s} {'what':8s} {'form':8s} {'trace s':>8s} {'compile s':>10s} {'run ms':>8s}")
    for layers in map(int, args.layers.split(",")):
        model = kz.KimiLinear(config(layers), key=jr.key(0))
        forms = {"stacked": model} if args.no_loop else {"stacked": model, "loop": unstack(model)}
        for function in (forward, train):
            for form, layered in forms.items():
                row = {"layers": layers, "what": function.__name__, "form": form}
                row |= measure(function, layered, tokens, args.runs)
                rows.append(row)
                print(
                    "{layers:6d} {what:8s} {form:8s} {trace_s:8.2f} {compile_s:10.2f} {run_ms:8.1f}".format(**row),
                    flush=True,
                )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
