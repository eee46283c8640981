"""Whether transformers and mlx-lm read a checkpoint that kimi-zoo wrote, and give the same logits.

Run with a Python that has them: `python benchmarks/read_elsewhere.py FOLDER OURS.npy`, where OURS.npy was written by
`python benchmarks/read_elsewhere.py --write FOLDER OURS.npy` in kimi-zoo's own environment. Prints the largest
difference of logits relative to the largest logit, float32.
"""

import sys

import numpy as np

TOKENS = np.arange(3, 203).reshape(2, 100) * 7 % 4000 + 8


def ours(folder):
    import jax.numpy as jnp

    import kimi_zoo as kz

    return np.asarray(kz.from_pretrained(folder, dtype="float32")(jnp.asarray(TOKENS)))


def transformers(folder):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if model.config.tie_word_embeddings:  # transformers 5.24 does not tie the two in this family
        model.lm_head.weight = model.model.embed_tokens.weight
    with torch.inference_mode():
        return model(torch.tensor(TOKENS)).logits.numpy()


def mlx(folder):
    from pathlib import Path

    import mlx.core as mx
    from mlx_lm.utils import load_model

    mx.set_default_device(mx.cpu)
    model, _ = load_model(Path(folder))
    model.set_dtype(mx.float32)
    return np.array(model(mx.array(TOKENS)))


def main():
    if sys.argv[1] == "--write":
        np.save(sys.argv[3], ours(sys.argv[2]))
        return
    expected = np.load(sys.argv[2])
    for read in (transformers, mlx):
        difference = np.abs(read(sys.argv[1]) - expected).max() / np.abs(expected).max()
        print(f"{read.__name__}: largest difference / largest logit {difference:.1e}")


if __name__ == "__main__":
    main()
