"""Whether PEFT reads an adapter that kimi-zoo wrote, and what kimi-zoo reads of one that PEFT wrote.

`python benchmarks/read_adapter.py --write FOLDER`, in kimi-zoo's own environment, writes into FOLDER adapters of the
bundled model with random deltas (on the default targets, on all of them, on one matrix of the experts) and the logits
of the merged models. `python benchmarks/read_adapter.py FOLDER`, with a Python that has torch, transformers and peft,
prints for each the largest difference of logits relative to the largest logit, and how much the deltas matter; then
PEFT writes an adapter of its own, with random deltas on the projections, and its logits. `--back FOLDER`, in
kimi-zoo's environment again, reads that.
"""

import json
import sys
from pathlib import Path

import numpy as np

TOKENS = np.arange(3, 203).reshape(2, 100) * 7 % 4000 + 8
NAME = "kimi-linear-stdlib-5m"


def relative(found, expected):
    """The largest difference over the largest logit."""
    return np.abs(found - expected).max() / np.abs(expected).max()


def write(folder):
    import jax
    import jax.numpy as jnp
    import jax.random as jr

    import kimi_zoo as kz
    from kimi_zoo.training.lora import ALL_LINEAR, add_lora, lora_leaves, merge_lora, save_adapter

    model = kz.from_pretrained(NAME, dtype="float32")
    kz.save_pretrained(model, folder / "base", overwrite=True)
    everything = (*ALL_LINEAR, "w1", "w2", "w3")
    for name, targets in {"default": ALL_LINEAR, "everything": everything, "one": ("w1",)}.items():
        lora = add_lora(model, rank=4, targets=targets, key=jr.key(0))
        fill = lambda leaf, is_delta: 0.1 * jr.normal(jr.key(leaf.size), leaf.shape) if is_delta else leaf
        lora = jax.tree.map(fill, lora, lora_leaves(lora))
        save_adapter(lora, folder / name, base=str(folder / "base"), overwrite=True)
        np.save(folder / f"{name}.npy", np.asarray(merge_lora(lora)(jnp.asarray(TOKENS))))


def read(folder):
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    def base():
        model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32).eval()
        model.lm_head.weight = model.model.embed_tokens.weight  # transformers 5.24 does not tie the two in this family
        return model

    def logits(model):
        with torch.inference_mode():
            return model(torch.tensor(TOKENS)).logits.numpy()

    for name in ("default", "everything", "one"):
        model = base()
        without = logits(model)
        found, expected = logits(peft.PeftModel.from_pretrained(model, folder / name)), np.load(folder / f"{name}.npy")
        far, apart = relative(found, expected), relative(without, expected)
        print(f"{name}: {far:.1e} from ours; {apart:.1e} without the adapter")
    targets = ["q_proj", "o_proj", "kv_b_proj", "f_a_proj", "up_proj"]
    model = peft.get_peft_model(base(), peft.LoraConfig(r=3, lora_alpha=5, target_modules=targets)).eval()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder / "theirs")
    np.save(folder / "theirs.npy", logits(model))


def back(folder):
    import jax.numpy as jnp

    import kimi_zoo as kz
    from kimi_zoo.training.lora import load_adapter

    config = json.loads((folder / "theirs" / "adapter_config.json").read_text())
    model = load_adapter(kz.from_pretrained(folder / "base", dtype="float32"), folder / "theirs")
    difference = relative(np.asarray(model(jnp.asarray(TOKENS))), np.load(folder / "theirs.npy"))
    print(f"written by PEFT {config.get('peft_version', '')}: {difference:.1e} from theirs")


def main():
    if sys.argv[1] == "--write":
        write(Path(sys.argv[2]))
    elif sys.argv[1] == "--back":
        back(Path(sys.argv[2]))
    else:
        read(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
