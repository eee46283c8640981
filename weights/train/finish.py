"""Makes the bundled checkpoint folder of a finished training run: weights, tokenizer, model card, loss curve, figures.

Run as `python weights/train/finish.py DATA RUN DESTINATION`, with DATA from `tokenizer.py` and `baselines.py`, RUN from
`train.py`.
"""

import argparse
import json
import shutil
from itertools import pairwise
from pathlib import Path

import equinox as eqx
import jax.numpy as jnp
import matplotlib
import numpy as np
from tqdm import tqdm

import kimi_zoo as kz

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PIECE, ROWS = 512, 8
PROMPTS = ("def read_", "import ", "class ", "The ")
CARD = """---
license: apache-2.0
library_name: kimi-zoo
tags: [kimi-linear, linear-attention, mixture-of-experts, equinox, jax]
---

# {name}

A small, really trained Kimi Linear language model: {parameters:,} parameters, of which {active:,} work on each token.
It comes with kimi-zoo so that everything can be tried at once. It writes text that looks like Python's standard
library; it knows nothing else, and is of no use for programming.

```
kimi-zoo generate {name} "def read_"
```

- **Architecture:** Kimi Linear, 8 blocks, KDA to MLA 3 to 1, low-rank gates, no positional embedding; 8 experts, 2 per
  token, and a shared one; tied embeddings.
- **Sizes:** hidden {hidden}, 3 KDA heads of 64, latent rank 96, experts of 80, vocabulary 4096; {megabytes:.1f} MB in
  bfloat16.
- **Data:** source files, docstrings and help topics of the standard library of Python {python}: {train_bytes:,} bytes,
  {train_tokens:,} tokens. Its licence is the PSF licence.
- **Held out:** {held_bytes:,} bytes of it, whole files chosen by a hash of their names.
- **Recipe:** Muon for matrices, Adam for the rest, peak learning rate 6e-3, cosine decay, {steps} steps of 8 rows of
  512 tokens ({epochs:.1f} epochs), float32; the router is balanced by its bias alone, as in DeepSeek-V3.
- **Made by** `weights/train/`: `corpus.py`, `tokenizer.py`, `baselines.py`, `train.py`, `finish.py`, in this order.
- **Licence:** Apache 2.0.

mlx-lm reads it as it is. transformers 5.24 does not tie the output head of this family to the embedding, as the config
says: after loading it there, `model.lm_head.weight = model.model.embed_tokens.weight`.

Bits per byte of the held-out text, document ends included; lower is better:

| model | bits per byte |
|---|---|
| **this model**, whole documents | **{bpb:.3f}** |
| this model, pieces of 512 tokens, each by itself | {bpb_pieces:.3f} |
| 5-gram of the same tokens, interpolated, modified Kneser-Ney | {five_gram:.3f} |
| 5-gram of bytes, likewise | {five_gram_bytes:.3f} |
| xz -9 | {xz:.3f} |

![Loss](loss.png)

Samples at temperature 0.7, top-p 0.9, seed 0:

{samples}
"""


@eqx.filter_jit(donate="all-except-first")
def piece_loss(model, tokens, targets, cache, lengths):
    """Loss in nats of the real tokens of a piece of some documents, and the cache behind it."""
    hidden, cache = model.decode_hidden_states(tokens, cache, lengths=lengths)
    logits = model.logits(hidden).astype(jnp.float32)
    logits = logits - jnp.max(logits, axis=-1, keepdims=True)
    log_probs = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0] - jnp.log(jnp.exp(logits).sum(-1))
    real = jnp.arange(tokens.shape[1]) < lengths[:, None]
    return -jnp.sum(jnp.where(real, log_probs, 0.0)), cache


def whole_document_bits(model, stream):
    """Bits of a held-out stream, each document read from its start to its end."""
    marks = np.flatnonzero(stream == 0)
    documents = sorted((stream[a : b + 1] for a, b in pairwise(marks)), key=len)
    total = 0.0
    for first in tqdm(range(0, len(documents), ROWS), desc="held out"):
        group = documents[first : first + ROWS]
        longest = max(map(len, group))
        cache = model.init_cache(ROWS, -(-longest // 4096) * 4096)
        for start in range(0, longest - 1, PIECE):
            tokens = np.zeros((2, ROWS, PIECE), np.int32)
            lengths = np.zeros(ROWS, np.int32)
            for row, document in enumerate(group):
                pair = document[start : start + PIECE], document[start + 1 : start + PIECE + 1]
                lengths[row] = len(pair[1])
                for which in (0, 1):
                    tokens[which, row, : lengths[row]] = pair[which][: lengths[row]]
            loss, cache = piece_loss(model, *jnp.asarray(tokens), cache, jnp.asarray(lengths))
            total += float(loss)
    return total / np.log(2)


def draw(metrics, baselines, path):
    """The loss curve."""
    figure, ax = plt.subplots(figsize=(7, 3.5))
    per_byte = 1 / np.log(2) / baselines["bytes_per_token"]
    ax.plot([m["step"] for m in metrics], [m["loss"] * per_byte for m in metrics], lw=0.6, label="training batch")
    held = [m for m in metrics if "held_out_bpb" in m]
    ax.plot([m["step"] for m in held], [m["held_out_bpb"] for m in held], "o-", ms=3, label="held out")
    ax.axhline(baselines["five_gram"], ls="--", lw=0.8, color="gray", label="5-gram of tokens")
    ax.axhline(baselines["xz"], ls=":", lw=0.8, color="gray", label="xz -9")
    ax.set(xlabel="step", ylabel="bits per byte", ylim=(1, 3))
    ax.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("data", "run", "destination"):
        parser.add_argument(name, type=Path)
    args = parser.parse_args()
    sizes = json.loads((args.data / "tokens.json").read_text())
    corpus = json.loads((args.data / "corpus" / "corpus.json").read_text())
    reference = json.loads((args.data / "baselines.json").read_text())["bits_per_byte"]
    metrics = [json.loads(line) for line in (args.run / "metrics.jsonl").read_text().splitlines()]
    args.destination.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(args.run / "model" / name, args.destination / name)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(args.data / "tokenizer" / name, args.destination / name)
    settings = json.loads((args.destination / "tokenizer_config.json").read_text())
    settings |= {"add_bos_token": True, "model_max_length": 8192}
    (args.destination / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    defaults = {"bos_token_id": 0, "eos_token_id": 0, "do_sample": True, "temperature": 0.7, "top_p": 0.9}
    defaults |= {"max_new_tokens": 200}
    (args.destination / "generation_config.json").write_text(json.dumps(defaults, indent=2) + "\n")

    model = kz.from_pretrained(args.destination, dtype="float32")
    tokenizer = kz.load_tokenizer(args.destination)
    held = sizes["held_out"]
    baselines = {
        "bytes_per_token": held["bytes"] / held["tokens"],
        "xz": reference["xz -9"],
        "five_gram": reference["5-gram of tokens"],
        "five_gram_bytes": reference["5-gram of bytes"],
    }
    draw(metrics, baselines, args.destination / "loss.png")
    bits = whole_document_bits(model, np.load(args.data / "held_out.npy"))
    samples = []
    for prompt in PROMPTS:
        tokens = kz.generate(model, [[0, *tokenizer.encode(prompt)]], max_new_tokens=120, key=0)[0]
        samples.append(f"```python\n{prompt}{tokenizer.decode(tokens, skip_special=True).rstrip()}\n```")
    tensors = kz.to_tensors(model)
    parameters = sum(t.size for t in tensors.values())
    routed = sum(t.size for name, t in tensors.items() if ".experts." in name)
    share = model.config.num_experts_per_token / model.config.num_experts
    steps = metrics[-1]["step"]
    figures = {
        "bits_per_byte": bits / held["bytes"],
        "bits_per_byte_pieces": metrics[-1]["held_out_bpb"],
        **{key: baselines[key] for key in ("xz", "five_gram", "five_gram_bytes")},
    }
    (args.destination / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")
    card = CARD.format(
        name=args.destination.name,
        parameters=parameters,
        active=round(parameters - (1 - share) * routed),
        hidden=model.config.hidden_size,
        megabytes=(args.destination / "model.safetensors").stat().st_size / 1e6,
        python=corpus["python"],
        train_bytes=sizes["train"]["bytes"],
        train_tokens=sizes["train"]["tokens"],
        held_bytes=held["bytes"],
        steps=steps,
        epochs=steps * 8 * 512 / sizes["train"]["tokens"],
        bpb=figures["bits_per_byte"],
        bpb_pieces=figures["bits_per_byte_pieces"],
        samples="\n\n".join(samples),
        **{key: baselines[key] for key in ("xz", "five_gram", "five_gram_bytes")},
    )
    (args.destination / "README.md").write_text(card)


if __name__ == "__main__":
    main()
