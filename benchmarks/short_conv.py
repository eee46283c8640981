"""The short convolution beside the same sum as JAX differentiates it: time and memory, over widths and packing.

Run as `python benchmarks/short_conv.py [--shapes "2,2048,1024;1,8192,4096"] [--widths 1,2,4,8]`. Rows are whole, packed
(8 documents), or packed with padding between the documents, which the plain sum cannot do. Both run in turns. Prints
the least milliseconds in float32, SiLU included, of the forward pass and of both passes, and two multiples of the
input's size: the temporary memory of both passes, and what is kept from the forward for the backward pass.
"""

import argparse
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from kimi_zoo.ops.short_conv import short_convolution


def ours(x, weight, segment_ids):
    return short_convolution(x, weight, segment_ids=segment_ids)[0]


def plain(x, weight, segment_ids):
    """Rows without padding."""
    y, width = jnp.zeros_like(x), weight.shape[1]
    for j in range(width):
        shifted = jnp.pad(x, ((0, 0), (j, 0), (0, 0)))[:, : x.shape[1]]
        if segment_ids is not None:
            before = jnp.pad(segment_ids, ((0, 0), (j, 0)))[:, : x.shape[1]]
            shifted = jnp.where((before == segment_ids)[..., None], shifted, 0.0)
        y = y + shifted * weight[:, width - 1 - j]
    return jax.nn.silu(y)


def make_segments(kind: str, batch: int, seq: int) -> jax.Array | None:
    if kind == "whole":
        return None
    ids = np.arange(seq) * 8 // seq + 1
    if kind == "gaps":
        ids = np.where(np.arange(seq) % (seq // 8) < 5, 0, ids)
    return jnp.asarray(np.broadcast_to(ids, (batch, seq)), jnp.int32)


def compile_calls(function: Callable, shape: tuple[int, int, int], width: int, kind: str) -> tuple[list, float]:
    """The forward and both passes, compiled, with their arguments; and the bytes that are kept between them."""
    rng = np.random.default_rng(0)
    x, cotangent = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for _ in range(2))
    weight = jnp.asarray(rng.standard_normal((shape[2], width)), jnp.float32)
    segment_ids = make_segments(kind, *shape[:2])

    def differentiate(x, weight, segment_ids):
        return jax.vjp(lambda x, weight: function(x, weight, segment_ids), x, weight)

    def both(x, weight, segment_ids, cotangent):
        output, pullback = differentiate(x, weight, segment_ids)
        return output, pullback(cotangent)

    inputs = (x, weight, segment_ids)
    forward = jax.jit(function).lower(*inputs).compile()
    both_passes = jax.jit(both).lower(*inputs, cotangent).compile()
    kept = jax.tree.leaves(jax.eval_shape(differentiate, *inputs)[1])
    calls = [(forward, inputs), (both_passes, (*inputs, cotangent))]
    return calls, sum(leaf.size * leaf.dtype.itemsize for leaf in kept)


def once(compiled, arguments: tuple) -> float:
    start = time.perf_counter()
    jax.block_until_ready(compiled(*arguments))
    return 1e3 * (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes = lambda text: [tuple(map(int, shape.split(","))) for shape in text.split(";")]
    parser.add_argument("--shapes", default=shapes("2,2048,1024;1,8192,4096"), type=shapes, help="B,T,C;...")
    parser.add_argument("--widths", default=[1, 2, 4, 8], type=lambda x: [*map(int, x.split(","))])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    print("| B,T,C | rows | width | | forward | forward+backward | temporary / input | kept / input |")
    print("|---|---|---|---|---|---|---|---|")
    for shape in args.shapes:
        for kind in ("whole", "packed", "gaps"):
            for width in args.widths:
                functions = {"kimi-zoo": ours} | ({} if kind == "gaps" else {"by JAX": plain})
                compiled = {name: compile_calls(function, shape, width, kind) for name, function in functions.items()}
                take_turn = lambda: {name: [once(*call) for call in calls] for name, (calls, _) in compiled.items()}  # noqa: B023
                turns = [take_turn() for _ in range(args.rounds)]
                for name, (calls, kept) in compiled.items():
                    forward, both = (min(turn[name][n] for turn in turns) for n in (0, 1))
                    temporary, kept = (
                        x / (4 * np.prod(shape)) for x in (calls[1][0].memory_analysis().temp_size_in_bytes, kept)
                    )
                    row = (",".join(map(str, shape)), kind, width, name, f"{forward:.1f}", f"{both:.1f}")
                    print(f"| {' | '.join(map(str, row))} | {temporary:.1f} | {kept:.1f} |", flush=True)


if __name__ == "__main__":
    main()
