"""Tensors of published Kimi Linear checkpoints, beside the parameters they fill.

Names are those below `model.layers.N.` (or, at the end, below the root). The first spelling is that of the checkpoints
on the hub, the second that of folders which transformers writes.
"""

import dataclasses
from collections.abc import Iterable

from kimi_zoo.checkpoints.rows import Entry, Row
from kimi_zoo.models.kimi_linear_config import KimiLinearConfig

ROOTS = ("", "language_model.")  # the second: text part of a multimodal checkpoint

# tensors that a checkpoint may hold and that the model has no use for
IGNORED = (r".*\.rotary_emb\.inv_freq", r".*\.num_batches_tracked")
VISION = (r"(model\.)?(vision_tower|visual|vision_model|mm_projector|multi_modal_projector)\..*",)


FLOAT32_LEAVES = ("mixer.a_log", "mixer.dt_bias", "mlp.router.score_bias")  # kept so whatever dtype is asked for


def entries(config: KimiLinearConfig, root: str = "") -> list[Entry]:
    """Every row at its place, in the order in which tensors are written."""
    first, *last = (Entry(row, None, root) for row in model_rows(config))
    blocks = [
        Entry(row, layer, f"{root}model.layers.{layer}.")
        for layer in range(config.num_hidden_layers)
        for row in block_rows(config, layer)
    ]
    return [first, *blocks, *last]


def block_rows(config: KimiLinearConfig, layer: int) -> tuple[Row, ...]:
    """All rows of one block."""
    mixer = kda_rows(config) if config.layer_kinds[layer] == "kda" else mla_rows(config)
    mlp = DENSE_ROWS if config.mlp_kinds[layer] == "dense" else moe_rows(config)
    return (*NORM_ROWS, *mixer, *mlp)


NORM_ROWS = (
    Row("input_norm.weight", "input_layernorm.weight"),
    Row("post_norm.weight", "post_attention_layernorm.weight"),
)


def kda_rows(config: KimiLinearConfig) -> tuple[Row, ...]:
    """Kimi Delta Attention. Taps of a convolution are published as `[channels, 1, width]`, or without the middle
    axis."""
    heads, dim, width = config.linear_num_heads, config.linear_head_dim, config.linear_conv_kernel_dim
    taps = ((heads * dim, 1, width), (heads * dim, width))
    convolutions = (
        Row("mixer.query_conv.weight", "self_attn.q_conv1d.weight", shapes=taps),
        Row("mixer.key_conv.weight", "self_attn.k_conv1d.weight", shapes=taps),
        Row("mixer.value_conv.weight", "self_attn.v_conv1d.weight", shapes=taps),
    )
    return (
        Row("mixer.query_proj.weight", "self_attn.q_proj.weight"),
        Row("mixer.key_proj.weight", "self_attn.k_proj.weight"),
        Row("mixer.value_proj.weight", "self_attn.v_proj.weight"),
        *(convolutions if width else ()),
        *gate_rows("mixer.decay_proj", "self_attn.f", config.kda_decay_gate),
        Row("mixer.beta_proj.weight", "self_attn.b_proj.weight"),
        *gate_rows("mixer.gate_proj", "self_attn.g", config.kda_output_gate),
        Row("mixer.a_log", "self_attn.A_log", shapes=((1, 1, heads, 1), (heads,))),
        Row("mixer.dt_bias", "self_attn.dt_bias", shapes=((heads * dim,), (heads, dim))),
        Row("mixer.output_norm.weight", "self_attn.o_norm.weight"),
        Row("mixer.output_proj.weight", "self_attn.o_proj.weight"),
    )


def gate_rows(leaf: str, name: str, rank: str) -> tuple[Row, ...]:
    """A gate of KDA: one projection, or two through a bottleneck."""
    if rank == "direct":
        return (Row(f"{leaf}.weight", f"{name}_proj.weight"),)
    return (
        Row(f"{leaf}.down.weight", f"{name}_a_proj.weight"),
        Row(f"{leaf}.up.weight", f"{name}_b_proj.weight"),
    )


def mla_rows(config: KimiLinearConfig) -> tuple[Row, ...]:
    """Multi-head latent attention."""
    direct = (Row("mixer.query_proj.weight", "self_attn.q_proj.weight"),)
    low_rank = (
        Row("mixer.query_proj.down.weight", "self_attn.q_a_proj.weight"),
        Row("mixer.query_proj.norm.weight", "self_attn.q_a_layernorm.weight"),
        Row("mixer.query_proj.up.weight", "self_attn.q_b_proj.weight"),
    )
    gate = (Row("mixer.gate_proj.weight", "self_attn.g_proj.weight"),)
    return (
        *(direct if config.q_lora_rank is None else low_rank),
        Row("mixer.kv_down.weight", "self_attn.kv_a_proj_with_mqa.weight"),
        Row("mixer.kv_norm.weight", "self_attn.kv_a_layernorm.weight"),
        Row("mixer.kv_up.weight", "self_attn.kv_b_proj.weight"),
        *(() if config.mla_output_gate is None else gate),
        Row("mixer.output_proj.weight", "self_attn.o_proj.weight"),
    )


DENSE_ROWS = (
    Row("mlp.gate_proj.weight", "mlp.gate_proj.weight", "block_sparse_moe.gate_proj.weight"),
    Row("mlp.up_proj.weight", "mlp.up_proj.weight", "block_sparse_moe.up_proj.weight"),
    Row("mlp.down_proj.weight", "mlp.down_proj.weight", "block_sparse_moe.down_proj.weight"),
)


def moe_rows(config: KimiLinearConfig) -> tuple[Row, ...]:
    """Mixture of experts; w1, w3 and w2 are an expert's gate, up and down projections."""
    shared = (
        Row("mlp.shared.gate_proj.weight", "block_sparse_moe.shared_experts.gate_proj.weight"),
        Row("mlp.shared.up_proj.weight", "block_sparse_moe.shared_experts.up_proj.weight"),
        Row("mlp.shared.down_proj.weight", "block_sparse_moe.shared_experts.down_proj.weight"),
    )
    return (
        Row("mlp.router.weight", "block_sparse_moe.gate.weight"),
        Row("mlp.router.score_bias", "block_sparse_moe.gate.e_score_correction_bias"),
        Row("mlp.experts.gate_proj", "block_sparse_moe.experts.{expert}.w1.weight"),
        Row("mlp.experts.up_proj", "block_sparse_moe.experts.{expert}.w3.weight"),
        Row("mlp.experts.down_proj", "block_sparse_moe.experts.{expert}.w2.weight"),
        *(shared if config.num_shared_experts else ()),
    )


def model_rows(config: KimiLinearConfig) -> tuple[Row, ...]:
    """Rows outside the layers."""
    head = (Row("head.weight", "lm_head.weight"),)
    return (
        Row("embedding.weight", "model.embed_tokens.weight"),
        Row("norm.weight", "model.norm.weight"),
        *(() if config.tie_word_embeddings else head),
    )


def adapt_config(config: KimiLinearConfig, names: Iterable[str]) -> KimiLinearConfig:
    """Completes a configuration with what published files leave to the tensors: which gates go through a bottleneck."""
    kda = [f"layers.{layer}.self_attn." for layer, kind in enumerate(config.layer_kinds) if kind == "kda"]
    gates = {}
    for name in names:
        below = next((name.split(prefix, 1)[1] for prefix in kda if prefix in name), "")
        for field, letter in (("kda_decay_gate", "f"), ("kda_output_gate", "g")):
            if below.startswith((f"{letter}_a_proj.", f"{letter}_proj.")):
                gates[field] = "low_rank" if "_a_" in below else "direct"
    return dataclasses.replace(config, **gates)
