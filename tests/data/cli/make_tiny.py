"""Makes `tiny/`, a complete checkpoint folder of two layers with random weights. Run as `python make_tiny.py`."""

import json
from pathlib import Path

import jax.random as jr
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import kimi_zoo as kz

CONFIG = kz.KimiLinearConfig(
    vocab_size=258,
    hidden_size=16,
    layer_kinds=("kda", "mla"),
    mlp_kinds=("dense", "moe"),
    intermediate_size=24,
    initializer_range=0.3,
    linear_num_heads=2,
    linear_head_dim=8,
    num_attention_heads=2,
    kv_lora_rank=12,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=6,
    num_experts=4,
    num_experts_per_token=2,
    moe_intermediate_size=10,
    routed_scaling_factor=1.0,
    model_max_length=512,
    bos_token_id=256,
    eos_token_id=257,
    pad_token_id=256,
)

if __name__ == "__main__":
    folder = Path(__file__).parent / "tiny"
    kz.save_pretrained(kz.KimiLinear(CONFIG, key=jr.key(3)), folder, dtype="bfloat16", overwrite=True)
    bytes_as_text = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(bytes_as_text)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|bos|>", special=True), AddedToken("<|eos|>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, value in (
        ("tokenizer_config.json", {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}),
        ("generation_config.json", {"do_sample": True, "temperature": 0.7, "max_new_tokens": 5, "eos_token_id": 257}),
    ):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n")
