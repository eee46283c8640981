"""One model behind a line protocol, for measuring it beside other programs.

Run as `python benchmarks/worker.py FOLDER`. Prints a JSON line when the weights are loaded, then answers each request
line on standard input: `logits`, `prefill`, `decode` and `train` with token ids, timed alone and to the end.
Compilation falls into the first request of each kind. Programs that JAX compiles are kept from one start to the next,
as the command line does.
"""

import functools
import json
import resource
import sys
import time

STARTED = time.perf_counter()

import jax  # noqa: E402

import kimi_zoo as kz  # noqa: E402
from kimi_zoo.cli.runtime import keep_compiled_programs  # noqa: E402


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    keep_compiled_programs()
    import equinox as eqx
    import jax.numpy as jnp
    import numpy as np

    folder = sys.argv[1]
    jax.devices()
    imported = time.perf_counter()
    model = kz.from_pretrained(folder, dtype="float32")
    jax.block_until_ready(eqx.filter(model, eqx.is_array))
    loaded = time.perf_counter()

    forward = eqx.filter_jit(lambda model, tokens: model(tokens))

    @eqx.filter_jit
    def last_logits(model, tokens):
        cache = model.init_cache(tokens.shape[0], tokens.shape[1])
        hidden, cache = model.decode_hidden_states(tokens, cache)
        return model.logits(hidden[:, -1:]), cache

    @eqx.filter_jit(donate="all")
    def train_step(state, tokens, optimizer):
        model, opt_state = state

        def loss_fn(model):
            log_probs = jax.nn.log_softmax(model(tokens)[:, :-1].astype(jnp.float32))
            return -jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1).mean()

        loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
        updates, opt_state = optimizer.update(
            eqx.filter(grads, eqx.is_array), opt_state, eqx.filter(model, eqx.is_array)
        )
        return (eqx.apply_updates(model, updates), opt_state), loss

    @functools.cache
    def adamw():
        import optax  # 0.2 s that only training needs

        return optax.adamw(1e-4, weight_decay=0.01)

    training: list = []

    def timed(run):
        start, cpu = time.perf_counter(), time.process_time()
        result = run()
        return result, {"s": time.perf_counter() - start, "cpu_s": time.process_time() - cpu}

    def logits(request):
        np.save(request["out"], np.asarray(forward(model, jnp.asarray(request["ids"])), np.float32))
        return {"s": 0}

    def prefill(request):
        tokens = jnp.asarray(request["ids"])
        return timed(lambda: jax.block_until_ready(last_logits(model, tokens)))[1]

    def decode(request):
        """The first token ends the untimed prefill; the steps after it are timed, as they stream."""
        stream = kz.stream_generate(model, request["ids"], max_new_tokens=request["n"] + 1, temperature=0.0, eos_ids=())
        rows: list[list[int]] = [[] for _ in request["ids"]]
        for _ in rows:
            token = next(stream)
            rows[token.row].append(token.token)
        rest, times = timed(lambda: list(stream))
        for token in rest:
            rows[token.row].append(token.token)
        return times | {"tokens": [row[: request["n"]] for row in rows]}

    def train(request):
        if not training:
            fresh = jax.tree.map(lambda x: x + 0 if eqx.is_array(x) else x, model)
            training.append((fresh, adamw().init(eqx.filter(fresh, eqx.is_array))))
        tokens = jnp.asarray(request["ids"])
        (state, loss), times = timed(lambda: jax.block_until_ready(train_step(training.pop(), tokens, adamw())))
        training.append(state)
        return times | {"loss": float(loss)}

    requests = {"logits": logits, "prefill": prefill, "decode": decode, "train": train}
    ready = {
        "ready": True,
        "import_s": imported - STARTED,
        "load_s": loaded - imported,
        "rss_mib": peak_mib(),
        "versions": {"jax": jax.__version__, "kimi-zoo": kz.__version__},
    }
    print(json.dumps(ready), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = requests[request["op"]](request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(answer | {"rss_mib": peak_mib()}), flush=True)


if __name__ == "__main__":
    main()
