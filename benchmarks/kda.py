"""The operator of Kimi Delta Attention on this machine, beside others and beside plain matmuls.

Run as `python benchmarks/kda.py [--what time,length,memory] [--gates bounded,softplus]`.

- `time`: forward, and forward with backward, in float32 with L2 normalisation and gate activation included. All
  implementations run in turns in one process; printed are the median and least wall time, and the ratio of the medians
  to the best of the others. Beside ours: tokamax `xla` and `xla_chunked` (bounded gate only) and, where installed,
  jax-linear-attention and deltanet-tpu (128 channels only, without a TPU it runs a scan). `matmuls` is the time of
  batched 64 x 64 x 64 products with as many operations as the chunked form, three times as many with backward.
- `length`: cost per token from 1k to 64k tokens.
- `memory`: temporary memory and compile time of forward with backward.
"""

import argparse
import logging
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # jax-linear-attention's triangular solves stall with two threads

import jax
import jax.numpy as jnp
import numpy as np

from kimi_zoo.ops import kda_gate, kimi_delta_attention

SHAPES = [(1, 4, 1024, 64, 64), (1, 8, 2048, 128, 128), (4, 4, 512, 64, 64), (1, 2, 8192, 64, 64)]  # B, H, T, K, V
LOWER_BOUND = -5.0


def make_inputs(shape: tuple[int, ...], gate: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Raw inputs. Gates: `bounded` (log-decays in (-5, 0)), `softplus` (rates and steps as the model starts), or
    `KIND:STRENGTH` with `all`, `tokens` (one in 16), `mixed` (one in four) or `channels` (half) that strong, others
    -0.05."""
    batch, heads, seq, key_dim, value_dim = shape
    rng = np.random.default_rng(seed)
    inputs = {
        "query": rng.standard_normal((batch, seq, heads, key_dim)),
        "key": rng.standard_normal((batch, seq, heads, key_dim)),
        "value": rng.standard_normal((batch, seq, heads, value_dim)),
        "gate": rng.standard_normal((batch, seq, heads, key_dim)),
        "beta": 1 / (1 + np.exp(-rng.standard_normal((batch, seq, heads)))),
        "a_log": np.zeros(heads),
        "dt_bias": np.zeros((heads, key_dim)),
    }
    if gate == "softplus":
        step = np.exp(rng.uniform(np.log(1e-3), np.log(0.1), (heads, key_dim)))
        inputs |= {"a_log": np.log(rng.uniform(1, 16, heads)), "dt_bias": step + np.log(-np.expm1(-step))}
    elif gate != "bounded":
        kind, strength = gate.split(":")
        mild = np.log(np.expm1(0.05 * np.log(2) / float(strength)))  # softplus of it is 0.05 / rate
        strong = {
            "all": np.ones((1, 1, 1, 1), bool),
            "tokens": (np.arange(seq) % 16 == 5)[:, None, None],
            "mixed": rng.random(inputs["gate"].shape) < 0.25,
            "channels": np.arange(key_dim) < key_dim // 2,
        }[kind]
        inputs["gate"] = np.where(strong, 0.01 * inputs["gate"] if kind == "all" else 0.0, mild)
        inputs["a_log"] = np.full(heads, np.log(float(strength) / np.log(2)))
        inputs["gate"] = np.broadcast_to(inputs["gate"], inputs["key"].shape)
    return {name: np.asarray(x, np.float32) for name, x in inputs.items()}


def lower_bound(gate: str) -> float | None:
    return LOWER_BOUND if gate == "bounded" else None


def ours(implementation: str | None) -> Callable:
    def run(a_log, dt_bias, bound, **tokens):
        options = dict(a_log=a_log, dt_bias=dt_bias, lower_bound=bound, use_qk_l2norm=True)
        return kimi_delta_attention(**tokens, **options, implementation=implementation)[0]

    return run


def tokamax(implementation: str) -> Callable:
    import tokamax.ops as ops

    def run(a_log, dt_bias, bound, **tokens):  # heads first is its own layout: no transpose is timed
        order = ("query", "key", "value", "gate", "beta")
        return ops.kimi_delta_attention(
            *(tokens[name] for name in order),
            a_log=a_log,
            delta_time_bias=dt_bias.reshape(-1),
            use_qk_l2norm=True,
            use_gate_in_kernel=True,
            lower_bound=bound,
            implementation=implementation,
        )[0]

    run.heads_first = True
    return run


def jax_linear_attention() -> Callable:
    from jla.ops import chunked

    def run(query, key, value, gate, beta, a_log, dt_bias, bound):
        return chunked.kda(query, key, value, kda_gate(gate, a_log, dt_bias, bound), beta, use_qk_l2norm=True)[0]

    return run


def deltanet_tpu() -> Callable:
    import deltanet_tpu

    def run(query, key, value, gate, beta, a_log, dt_bias, bound):
        log_decay = kda_gate(gate, a_log, dt_bias, bound)
        options = dict(chunk_size=128, precision="fp32", qk_l2norm=True, fallback_scan=True)
        return deltanet_tpu.chunk_kda(query, key, value, log_decay, beta, **options)

    return run


def implementations() -> dict[str, Callable]:
    found = {"kimi-zoo": ours(None), "kimi-zoo chunked": ours("chunked")}
    makers = {
        "tokamax xla": lambda: tokamax("xla"),
        "tokamax xla_chunked": lambda: tokamax("xla_chunked"),
        "jax-linear-attention": jax_linear_attention,
        "deltanet-tpu": deltanet_tpu,
    }
    for name, maker in makers.items():
        try:
            found[name] = maker()
        except ImportError:
            print(f"{name} is not installed")
    return found


def compile_call(function: Callable, shape: tuple[int, ...], gate: str, backward: bool):
    """A compiled call, its arguments, and how long compiling took."""
    inputs = {name: jnp.asarray(x) for name, x in make_inputs(shape, gate).items()}
    if getattr(function, "heads_first", False):
        inputs = {name: jnp.moveaxis(x, 2, 0) if x.ndim > 2 else x for name, x in inputs.items()}
    weights = jnp.asarray(np.random.default_rng(1).standard_normal(inputs["value"].shape), jnp.float32)

    def forward(inputs):
        return function(**inputs, bound=lower_bound(gate))

    def both(inputs, weights):
        output, pullback = jax.vjp(forward, inputs)
        return output, pullback(weights)

    arguments = (inputs, weights) if backward else (inputs,)
    start = time.perf_counter()
    compiled = jax.jit(both if backward else forward).lower(*arguments).compile()
    return compiled, arguments, time.perf_counter() - start


def operations(shape: tuple[int, ...], chunk: int = 64) -> float:
    """Of the chunked form: scores, inverse, its product, reads and writes of the state."""
    batch, heads, seq, key_dim, value_dim = shape
    per_chunk = 4 * chunk**2 * key_dim + chunk**3 / 3 + 2 * chunk**2 * (key_dim + value_dim)
    per_chunk += 6 * chunk * key_dim * value_dim + 2 * chunk**2 * value_dim
    return per_chunk * batch * heads * seq / chunk


def compile_matmuls(count: float):
    a = jnp.ones((max(1, round(count / (2 * 64**3))), 64, 64))
    return jax.jit(lambda a, b: a @ b).lower(a, a).compile(), (a, a)


def once(call: tuple) -> float:
    compiled, arguments = call
    start = time.perf_counter()
    jax.block_until_ready(compiled(*arguments))
    return time.perf_counter() - start


def measure_time(args: argparse.Namespace) -> None:
    for shape in args.shapes:
        for gate in args.gates:
            for backward in (False, True):
                calls = {"matmuls": compile_matmuls(operations(shape) * (3 if backward else 1))}
                for name, function in implementations().items():
                    try:
                        calls[name] = compile_call(function, shape, gate, backward)[:2]
                    except (NotImplementedError, ValueError) as error:
                        print(f"{name} does not take this: {str(error).splitlines()[0][:90]}")
                report(f"{shape} {gate} {'forward+backward' if backward else 'forward'}", interleave(calls, args))


def interleave(calls: dict[str, tuple], args: argparse.Namespace) -> dict[str, list[float]]:
    first = {name: once(call) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    start = time.perf_counter()
    for turn in range(args.rounds):
        if turn >= 3 and time.perf_counter() - start > args.budget:
            break
        for name in np.roll(list(calls), turn).tolist():
            if turn < 2 or first[name] < 1.0:
                times[name].append(once(calls[name]))
    return times


def report(title: str, times: dict[str, list[float]]) -> None:
    medians = {name: 1e3 * statistics.median(x) for name, x in times.items()}
    others = {name: x for name, x in medians.items() if not name.startswith(("kimi-zoo", "matmuls"))}
    best = min(others.values())
    print(f"\n{title}")
    for name, median in sorted(medians.items(), key=lambda item: item[1]):
        print(
            f"  {name:22s} {median:9.2f} ms (least {1e3 * min(times[name]):9.2f})  {median / best:5.2f} of the best "
            f"other  {median / medians['matmuls']:6.2f} of matmuls",
            flush=True,
        )


def measure_length(args: argparse.Namespace) -> None:
    print("\nmicroseconds per token, B 1, H 2, K = V = 64, softplus gate")
    for backward in (False, True):
        for seq in (1024, 4096, 16384, 65536):
            call = compile_call(ours("chunked"), (1, 2, seq, 64, 64), "softplus", backward)[:2]
            least = min(once(call) for _ in range(4))
            print(f"  {'forward+backward' if backward else 'forward':16s} {seq:6d} tokens {1e6 * least / seq:7.2f}")


def measure_memory(args: argparse.Namespace) -> None:
    print("\nforward+backward: temporary memory, trace and compile time")
    for shape in args.shapes:
        for name, function in implementations().items():
            try:
                compiled, _, seconds = compile_call(function, shape, "bounded", True)
            except (NotImplementedError, ValueError) as error:
                print(f"  {shape} {name:22s} does not take this: {str(error).splitlines()[0][:60]}")
                continue
            temporary = compiled.memory_analysis().temp_size_in_bytes / 2**20
            print(f"  {shape} {name:22s} {temporary:8.1f} MiB {seconds:6.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", default="time,length,memory")
    parser.add_argument("--gates", default="bounded,softplus", type=lambda x: x.split(","))
    parser.add_argument(
        "--shapes", default=SHAPES, type=lambda x: [tuple(map(int, s.split(","))) for s in x.split(";")]
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--budget", type=float, default=10.0, help="seconds of turns for each table, from 3 turns on")
    args = parser.parse_args()
    logging.getLogger("absl").setLevel(logging.ERROR)  # tokamax tells of its autotuning cache at each trace
    measures = {"time": measure_time, "length": measure_length, "memory": measure_memory}
    for what in args.what.split(","):
        measures[what](args)


if __name__ == "__main__":
    main()
