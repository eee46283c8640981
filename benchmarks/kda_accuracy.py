"""Error of the operator of Kimi Delta Attention against the recurrence in float64, over gates, lengths and dtypes.

Run as `python benchmarks/kda_accuracy.py [--lengths 256,4096] [--others]`; prints a Markdown table. Entries are
relative L2 errors: of the output, and the largest among the gradients of all inputs and gate parameters. Root mean
squares below 0.01 are taken as 0.01: a gradient that strong decay makes vanish has no relative error of interest.
bfloat16 inputs are rounded first, so that the errors are those of the operator and of rounding its results. `--others`
adds tokamax's forms in float32, where they take the gate.
"""

import argparse
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from kda import lower_bound, make_inputs, ours, tokamax

GATES = ["bounded", "softplus"]
GATES += [f"{kind}:{strength}" for strength in (20, 100, 1e4) for kind in ("all", "tokens", "mixed", "channels")]


@functools.cache
def both_passes(function: Callable, bound: float | None) -> Callable:
    @jax.jit
    def both(inputs, weights):
        output, pullback = jax.vjp(lambda inputs: function(**inputs, bound=bound), inputs)
        return {"output": output} | pullback(weights.astype(output.dtype))[0]

    return both


def run(function, inputs: dict, weights: np.ndarray, gate: str, dtype: str) -> dict[str, np.ndarray]:
    heads_first = getattr(function, "heads_first", False)
    move = lambda x, source, target: jnp.moveaxis(x, source, target) if heads_first and x.ndim > 2 else x
    parameters = ("a_log", "dt_bias")  # stay as precise as sums are
    kept = jnp.float64 if dtype == "float64" else jnp.float32
    inputs = {name: move(jnp.asarray(x, kept if name in parameters else dtype), 2, 0) for name, x in inputs.items()}

    result = both_passes(function, lower_bound(gate))(inputs, move(jnp.asarray(weights, dtype), 2, 0))
    return {name: np.asarray(move(x, 0, 2), np.float64) for name, x in result.items()}


def errors(actual: dict, expected: dict) -> tuple[float, float]:
    found = {}
    for name, want in expected.items():
        least = 1e-2 * np.sqrt(want.size)
        found[name] = np.linalg.norm(actual[name].reshape(want.shape) - want) / max(np.linalg.norm(want), least)
    return found.pop("output"), max(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="256,4096")
    parser.add_argument("--gates", default=",".join(GATES))
    parser.add_argument("--others", action="store_true")
    args = parser.parse_args()
    recurrent, chunked = ours("recurrent"), ours("chunked")
    columns = {
        "recurrent, float32": (recurrent, "float32"),
        "chunked, float32": (chunked, "float32"),
        "chunked, bfloat16": (chunked, "bfloat16"),
    }
    if args.others:
        columns |= {f"tokamax {name}": (tokamax(name), "float32") for name in ("xla", "xla_chunked")}
    print(f"| gate | tokens | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 2)}")
    for length in map(int, args.lengths.split(",")):
        for gate in args.gates.split(","):
            shape = (1, 2, length, 64, 64)
            inputs = make_inputs(shape, gate, seed=1)
            weights = np.random.default_rng(2).standard_normal(inputs["value"].shape).astype(np.float32)
            cells, expected_of = [], {}
            for function, dtype in columns.values():
                rounded = {n: np.asarray(jnp.asarray(x, dtype), np.float32) for n, x in inputs.items()}
                rounded |= {name: inputs[name] for name in ("a_log", "dt_bias")}
                low = np.asarray(jnp.asarray(weights, dtype), np.float32)
                if dtype not in expected_of:
                    with jax.enable_x64(True):
                        expected_of[dtype] = run(recurrent, rounded, low, gate, "float64")
                expected = expected_of[dtype]
                try:
                    cells.append("{:.0e} / {:.0e}".format(*errors(run(function, rounded, low, gate, dtype), expected)))
                except NotImplementedError:
                    cells.append("refused")
            print(f"| {gate} | {length} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
