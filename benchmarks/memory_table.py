"""Will it fit? Memory of inference, full fine-tuning and LoRA per model size: prints the table of docs/training.md.

Run as `python benchmarks/memory_table.py`; no model is built, shapes are enough. Weights, gradients and optimizer
states are counted from them exactly, activations by a formula. `--check` compiles training steps of the two smallest
models here, and prints what XLA says they take beside what the formula says.
"""

import argparse
import dataclasses
import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from compare import CONFIG as SMALL

import kimi_zoo as kz
from kimi_zoo.checkpoints.configs import read_config
from kimi_zoo.training.packing import Batch
from kimi_zoo.training.quantization import quantize_frozen

GIB = 2**30
RANK, SEQ, CONTEXT = 16, 4096, 8192


def models() -> dict[str, kz.KimiLinearConfig]:
    """From the bundled model to Kimi Linear 48B-A3B; those between are narrower ones of the last."""
    bundled, _ = read_config(kz.find_weights("kimi-linear-stdlib-5m"))
    large = kz.KIMI_LINEAR_48B_A3B

    def narrower(hidden: int, heads: int, experts: int, inner: int) -> kz.KimiLinearConfig:
        return dataclasses.replace(
            large,
            hidden_size=hidden,
            linear_num_heads=heads,
            num_attention_heads=heads,
            num_experts=experts,
            moe_intermediate_size=inner,
            intermediate_size=4 * hidden,
        )

    return {
        "kimi-linear-stdlib-5m": bundled,
        "of the benchmarks": SMALL,
        "between": narrower(768, 6, 16, 384),
        "between, larger": narrower(1536, 16, 64, 640),
        "Kimi Linear 48B-A3B": large,
    }


def build(config: kz.KimiLinearConfig, mode: str, dtype: str):
    """A model, and which of its leaves train: in inference and with LoRA, weights are in `dtype`."""
    model = kz.KimiLinear(config, key=jr.key(0))
    if mode == "full":
        return model, kz.training.trains(kz.training.select(model))
    model = kz.training.as_computed(model, jnp.dtype(dtype))
    if mode != "inference":
        model = kz.training.add_lora(model, rank=RANK, key=jr.key(0))
    if mode in ("int8", "nf4"):
        model = quantize_frozen(model, mode)
    return model, kz.training.lora_leaves(model)


@functools.cache
def shapes(config: kz.KimiLinearConfig, mode: str, dtype: str):
    """As `build`, with shapes in the place of arrays."""
    return eqx.filter_eval_shape(lambda: build(config, mode, dtype))


def size(tree) -> int:
    """Bytes of all arrays; 4-bit integers take half of one."""
    bits = lambda leaf: 4 if str(leaf.dtype) in ("uint4", "int4") else 8 * leaf.dtype.itemsize
    return sum(leaf.size * bits(leaf) // 8 for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype"))


def count(tree) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype"))


def layer_numbers(config: kz.KimiLinearConfig, layer: int) -> int:
    """Numbers per token that the gradient of a layer needs, roughly: what its operators read and give."""
    hidden = config.hidden_size
    if config.layer_kinds[layer] == "kda":
        mixer = 20 * config.linear_num_heads * config.linear_head_dim  # q, k, v, gates, before and after each step
    else:
        heads, key_dim = config.num_attention_heads, config.qk_nope_head_dim + config.qk_rope_head_dim
        mixer = heads * (4 * key_dim + 4 * config.v_head_dim)
    if config.mlp_kinds[layer] == "dense":
        inner = config.intermediate_size
    else:
        inner = config.moe_intermediate_size * (config.num_experts_per_token + config.num_shared_experts)
        hidden += 2 * config.hidden_size * config.num_experts_per_token // 4
    return mixer + 4 * inner + 6 * hidden


def activations(config: kz.KimiLinearConfig, tokens: int, itemsize: int, *, remat: bool) -> int:
    """Bytes kept for the gradient. With `--remat full` the layers of a unit of the stack at a time, and the residual
    stream at about `2 * sqrt(units)` places; and a piece of the logits in float32, with its derivative."""
    model, _ = shapes(config, "inference", "bfloat16")
    per_layer = [layer_numbers(config, layer) for layer in range(config.num_hidden_layers)]
    units = zip(model.layers.sections, model.layers.repeats, strict=True)
    kept, widest, start = 0, 0, 0
    for unit, repeats in units:
        widest = max(widest, sum(per_layer[start : start + len(unit)]))
        places = math.isqrt(repeats) + -(-repeats // math.isqrt(repeats))
        kept += places * config.hidden_size
        start += len(unit) * repeats
    numbers = kept + widest if remat else sum(per_layer)
    logits = 3 * 4 * min(tokens * config.vocab_size, 1 << 24)
    return tokens * numbers * itemsize + logits


def largest_layer(config: kz.KimiLinearConfig) -> int:
    """Parameters of the largest layer."""
    stack = shapes(config, "inference", "bfloat16")[0].layers
    units = zip(stack.sections, stack.repeats, strict=True)
    return max(count(layer) // repeats for unit, repeats in units for layer in unit)


def inference(config: kz.KimiLinearConfig) -> int:
    """bfloat16 weights, and the cache of one row."""
    model, _ = shapes(config, "inference", "bfloat16")
    return size(model) + size(eqx.filter_eval_shape(lambda model: model.init_cache(1, CONTEXT), model))


def training(config: kz.KimiLinearConfig, mode: str, tokens: int = SEQ, dtype: str = "bfloat16", remat=True) -> int:
    """Float32 parameters that train, their gradients and two moments of AdamW; frozen weights; what trains, and a layer
    of what is quantised, in the dtype of the computation; activations."""
    model, wanted = shapes(config, mode, dtype)
    trainable, frozen = eqx.partition(model, wanted)
    state = 4 * 4 * count(trainable) + size(frozen)
    itemsize = jnp.dtype(dtype).itemsize
    copy = count(trainable) * itemsize if dtype != "float32" else 0
    if mode in ("int8", "nf4"):
        copy += itemsize * largest_layer(config)
    return state + copy + activations(config, tokens, itemsize, remat=remat)


def measured(config: kz.KimiLinearConfig, mode: str, tokens: int, dtype: str, remat: bool) -> int:
    """What XLA says of the compiled step on this machine: arguments, which are reused, and temporary memory."""
    model, wanted = build(config, mode, dtype)
    optimizer = kz.training.make_optimizer("adamw", 1e-4, weight_decay=0.01)
    state, frozen = kz.training.start(model, wanted, optimizer)
    batch = Batch(*(np.zeros((1, 1, tokens), kind) for kind in (np.int32, np.int32, np.float32, np.int32)))
    options = kz.training.StepOptions(compute_dtype=dtype, remat=remat)
    compiled = kz.training.train_step.lower((frozen, batch, optimizer, options), state).compile()
    memory = getattr(compiled, "compiled", compiled).memory_analysis()
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes


def text(size: int) -> str:
    return f"{size / GIB:.2g} GiB" if size < 10 * GIB else f"{size / GIB:.0f} GiB"


def table(first: int | None = None) -> str:
    """The table of the guide, or its first rows."""
    lines = ["| model | parameters | inference | full | LoRA | LoRA, int8 | LoRA, NF4 |", "|---" * 7 + "|"]
    for name, config in list(models().items())[:first]:
        modes = [training(config, mode) for mode in ("full", "lora", "int8", "nf4")]
        total = count(shapes(config, "inference", "bfloat16")[0])
        amount = f"{total / 1e9:.1f} billion" if total > 1e9 else f"{total / 1e6:.1f} million"
        lines.append(f"| {name} | {amount} | " + " | ".join(map(text, (inference(config), *modes))) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compile steps of the two smallest models")
    args = parser.parse_args()
    if args.check:
        for name, config in list(models().items())[:2]:
            for mode, remat in (("full", False), ("full", True), ("lora", True), ("nf4", True)):
                said = training(config, mode, 1024, "float32", remat)
                found = measured(config, mode, 1024, "float32", remat)
                how = "remat" if remat else "no remat"
                print(
                    f"{name}, {mode}, 1024 tokens, float32, {how}: calculated {said / 2**20:.0f} MiB, "
                    f"compiled {found / 2**20:.0f} MiB",
                    flush=True,
                )
        return
    print(table())


if __name__ == "__main__":
    main()
