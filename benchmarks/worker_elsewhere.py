"""The same line protocol as `worker.py` answers, by transformers or by mlx-lm.

Run as `python benchmarks/worker_elsewhere.py transformers|mlx FOLDER` with a Python that has them.
"""

import json
import resource
import sys
import time

STARTED = time.perf_counter()

import numpy as np  # noqa: E402


def with_transformers(folder):
    import torch
    import transformers

    imported = time.perf_counter()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    loaded = time.perf_counter()
    optimizer = []

    def logits(ids):
        with torch.inference_mode():
            return model(torch.tensor(ids)).logits.numpy()

    def prefill(ids):
        with torch.inference_mode():
            model(torch.tensor(ids), use_cache=True, logits_to_keep=1)

    def decode(ids, count):
        tokens, past, out = torch.tensor(ids), None, []
        with torch.inference_mode():
            for step in range(count + 1):
                if step == 1:
                    start = time.perf_counter(), time.process_time()
                answer = model(tokens, past_key_values=past, use_cache=True, logits_to_keep=1)
                past, tokens = answer.past_key_values, answer.logits[:, -1:].argmax(-1)
                out.append(tokens[:, 0].tolist())
        return start, out

    def train(ids):
        if not optimizer:
            model.train()
            optimizer.append(torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01))
        tokens = torch.tensor(ids)
        optimizer[0].zero_grad()
        loss = torch.nn.functional.cross_entropy(model(tokens).logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer[0].step()
        return loss.item()

    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    return imported, loaded, versions, {"logits": logits, "prefill": prefill, "decode": decode, "train": train}


def with_mlx(folder):
    from importlib.metadata import version
    from pathlib import Path

    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    imported = time.perf_counter()
    mx.set_default_device(mx.cpu)
    model, _ = load_model(Path(folder))
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    loaded = time.perf_counter()

    def logits(ids):
        return np.array(model(mx.array(ids)))

    def prefill(ids):
        mx.eval(model(mx.array(ids), cache=make_prompt_cache(model))[:, -1])

    def decode(ids, count):
        tokens, cache, out = mx.array(ids), make_prompt_cache(model), []
        for step in range(count + 1):
            if step == 1:
                start = time.perf_counter(), time.process_time()
            tokens = mx.argmax(model(tokens, cache=cache)[:, -1:], axis=-1)
            out.append(np.array(tokens)[:, 0].tolist())
        return start, out

    versions = {"mlx-lm": version("mlx-lm"), "mlx": version("mlx")}
    return imported, loaded, versions, {"logits": logits, "prefill": prefill, "decode": decode}


def answer(request, functions):
    """What `worker.py` answers."""
    ids, start = request["ids"], (time.perf_counter(), time.process_time())
    if request["op"] == "logits":
        np.save(request["out"], np.asarray(functions["logits"](ids), np.float32))
        return {"s": 0}
    out = {}
    if request["op"] == "decode":
        start, steps = functions["decode"](ids, request["n"])
        out["tokens"] = [list(row[: request["n"]]) for row in zip(*steps, strict=True)]
    elif request["op"] == "train":
        out["loss"] = functions["train"](ids)
    else:
        functions["prefill"](ids)
    return {"s": time.perf_counter() - start[0], "cpu_s": time.process_time() - start[1]} | out


def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main():
    imported, loaded, versions, functions = {"transformers": with_transformers, "mlx": with_mlx}[sys.argv[1]](
        sys.argv[2]
    )
    times = {"import_s": imported - STARTED, "load_s": loaded - imported}
    print(json.dumps({"ready": True, "rss_mib": peak_mib(), "versions": versions} | times), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            done = answer(request, functions)
        except Exception as error:
            done = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(done | {"rss_mib": peak_mib()}), flush=True)


if __name__ == "__main__":
    main()
