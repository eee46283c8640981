"""Parameters of Megatron's KDA + MLA + MoE models, beside the tensors of published Kimi Linear checkpoints.

The one table that conversion reads in both directions, and the documentation shows. Megatron fuses projections: such a
row has several sections, one after another along axis 0, each of which is a tensor of its own in the published layout.
Nothing is transposed and no row order changes.
"""

import dataclasses
from dataclasses import dataclass

from kimi_zoo.models.kimi_linear_config import KimiLinearConfig

EXPERT = "{expert}"
Dims = tuple[str | int, ...]


@dataclass(frozen=True)
class Section:
    """One published tensor, and where it is in Megatron's.

    - `published`: name below `model.layers.N.` (whole name for rows outside layers).
    - `shape`: in the words of `dimensions`.
    - `tag`: what is appended to the row's name where each section is stored by itself.
    - `own`: names that some Megatron versions give it where nothing is fused.
    - `published_shape`: where it differs.
    """

    published: str
    shape: Dims
    tag: str = ""
    own: tuple[str, ...] = ()
    published_shape: Dims = ()


@dataclass(frozen=True)
class Row:
    """One parameter of Megatron.

    - `names`: below `decoder.layers.N.` (whole name for rows outside layers), the usual one first.
    - `sections`: what it is made of, in order.
    - `axis`: the axis that is split over tensor parallel ranks, section by section; `None`: each rank has all of it.
    - `replicable`: some modules keep it whole on every rank all the same; its shape tells.
    - `padded`: rows may follow that are not part of the model (vocabulary, heads): dropped.
    - `expert`: one such parameter per routed expert.
    """

    names: tuple[str, ...]
    sections: tuple[Section, ...]
    axis: int | None = None
    replicable: bool = False
    padded: bool = False
    expert: bool = False

    @property
    def name(self) -> str:
        """The usual name."""
        return self.names[0]

    @property
    def norm(self) -> bool:
        """Whether it is the weight of a normalisation, which Megatron may store minus one."""
        return "norm" in self.name


def row(
    *names: str,
    to: str = "",
    shape: Dims = (),
    sections: tuple[Section, ...] = (),
    axis: int | None = None,
    replicable: bool = False,
    padded: bool = False,
    expert: bool = False,
    published_shape: Dims = (),
    own: tuple[str, ...] = (),
) -> Row:
    """A row; `to` and `shape` stand for its only section."""
    sections = sections or (Section(to, shape, own=own, published_shape=published_shape),)
    return Row(names, sections, axis, replicable, padded, expert)


A, M = "self_attention.", "block_sparse_moe."

EMBEDDING = row("embedding.word_embeddings.weight", to="model.embed_tokens.weight", shape=("vocab", "hidden"), axis=0,
                padded=True)  # fmt: skip
HEAD = row("output_layer.weight", to="lm_head.weight", shape=("vocab", "hidden"), axis=0, padded=True)
FINAL_NORM = row("decoder.final_layernorm.weight", "decoder.final_norm.weight", to="model.norm.weight",
                 shape=("hidden",))  # fmt: skip

INPUT_NORM = row("input_layernorm.weight", A + "in_proj.layer_norm_weight", A + "linear_q_proj.layer_norm_weight",
                 A + "linear_qkv_down_proj.layer_norm_weight", to="input_layernorm.weight",
                 shape=("hidden",))  # fmt: skip
DENSE_NORM = row("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight", to="post_attention_layernorm.weight",
                 shape=("hidden",))  # fmt: skip
MOE_NORM = row("pre_mlp_layernorm.weight", to="post_attention_layernorm.weight", shape=("hidden",))

QKV = tuple(
    Section(f"self_attn.{x}_proj.weight", ("kda", "hidden"), f".{tag}", (f"{A}{x}_proj.weight",))
    for x, tag in (("q", "query"), ("k", "key"), ("v", "value"))
)
DIRECT_GATES = (
    Section("self_attn.f_proj.weight", ("kda", "hidden"), ".g", (A + "f_proj.weight",)),
    Section("self_attn.g_proj.weight", ("kda", "hidden"), ".gate", (A + "g_proj.weight",)),
)
LOW_GATES = (
    Section("self_attn.f_a_proj.weight", ("kda_dim", "hidden"), ".f_a"),
    Section("self_attn.g_a_proj.weight", ("kda_dim", "hidden"), ".g_a"),
)
BETA = Section("self_attn.b_proj.weight", ("kda_heads", "hidden"), ".beta")
CONV = tuple(
    Section(f"self_attn.{x}_conv1d.weight", ("kda", 1, "taps"), f".{tag}", (f"{A}{x}_conv1d.weight",))
    for x, tag in (("q", "query"), ("k", "key"), ("v", "value"))
)

IN_PROJ = row(A + "in_proj.weight", sections=QKV, axis=0)
IN_PROJ_DIRECT = row(A + "in_proj.weight", sections=QKV + DIRECT_GATES, axis=0)
IN_PROJ_PACKED = row(A + "in_proj.weight", sections=(*QKV, *LOW_GATES, BETA), axis=0)
BETA_PROJ = row(A + "beta_proj.weight", A + "b_proj.weight", to="self_attn.b_proj.weight",
                shape=("kda_heads", "hidden"), axis=0)  # fmt: skip
LOW_DOWN = tuple(
    row(f"{A}{x}_a_proj.weight", to=f"self_attn.{x}_a_proj.weight", shape=("kda_dim", "hidden")) for x in "fg"
)
LOW_UP = tuple(
    row(f"{A}{x}_b_proj.weight", to=f"self_attn.{x}_b_proj.weight", shape=("kda", "kda_dim"), axis=0) for x in "fg"
)
KDA = (
    row(A + "A_log", to="self_attn.A_log", shape=("kda_heads",), axis=0, padded=True,
        published_shape=(1, 1, "kda_heads", 1)),
    row(A + "dt_bias", to="self_attn.dt_bias", shape=("kda",), axis=0, padded=True),
    row(A + "out_norm.weight", A + "o_norm.weight", to="self_attn.o_norm.weight", shape=("kda_dim",)),
    row(A + "out_proj.weight", A + "o_proj.weight", to="self_attn.o_proj.weight", shape=("hidden", "kda"), axis=1),
)  # fmt: skip
CONVOLUTION = row(A + "conv1d.weight", sections=CONV, axis=0)

QUERY = row(A + "linear_q_proj.weight", to="self_attn.q_proj.weight", shape=("queries", "hidden"), axis=0)
QUERY_DOWN = Section("self_attn.q_a_proj.weight", ("q_rank", "hidden"), ".q")
KV_DOWN = Section("self_attn.kv_a_proj_with_mqa.weight", ("latent", "hidden"), ".kv")
LOW_RANK_QUERY = (
    row(A + "linear_q_up_proj.layer_norm_weight", A + "q_layernorm.weight", to="self_attn.q_a_layernorm.weight",
        shape=("q_rank",)),
    row(A + "linear_q_up_proj.weight", to="self_attn.q_b_proj.weight", shape=("queries", "q_rank"), axis=0),
)  # fmt: skip
QUERY_DOWN_ROW = row(A + "linear_q_down_proj.weight", sections=(QUERY_DOWN,), axis=0, replicable=True)
KV_DOWN_ROW = row(A + "linear_kv_down_proj.weight", sections=(KV_DOWN,), axis=0, replicable=True)
QKV_DOWN_ROW = row(A + "linear_qkv_down_proj.weight", sections=(QUERY_DOWN, KV_DOWN), axis=0, replicable=True)
MLA = (
    row(A + "linear_kv_up_proj.layer_norm_weight", A + "kv_layernorm.weight", to="self_attn.kv_a_layernorm.weight",
        shape=("kv_rank",)),
    row(A + "linear_kv_up_proj.weight", to="self_attn.kv_b_proj.weight", shape=("expanded", "kv_rank"), axis=0),
    row(A + "linear_proj.weight", to="self_attn.o_proj.weight", shape=("hidden", "values"), axis=1),
)  # fmt: skip
MLA_GATE = row(A + "linear_gate.weight", to="self_attn.g_proj.weight", shape=("mla_gate", "hidden"), axis=0)


def _swiglu(name: str, gate: str, up: str, width: str, *, expert: bool = False) -> Row:
    sections = (Section(gate, (width, "hidden"), "_w"), Section(up, (width, "hidden"), "_v"))
    return row(name, sections=sections, axis=0, expert=expert)


DENSE = (
    _swiglu("mlp.linear_fc1.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", "ffn"),
    row("mlp.linear_fc2.weight", to="mlp.down_proj.weight", shape=("hidden", "ffn"), axis=1),
)
ROUTER = (
    row("mlp.router.weight", to=M + "gate.weight", shape=("experts", "hidden")),
    row("mlp.router.expert_bias", to=M + "gate.e_score_correction_bias", shape=("experts",)),
)
EXPERTS = (
    _swiglu("mlp.experts.linear_fc1.weight", f"{M}experts.{EXPERT}.w1.weight", f"{M}experts.{EXPERT}.w3.weight",
            "expert_ffn", expert=True),
    row("mlp.experts.linear_fc2.weight", to=f"{M}experts.{EXPERT}.w2.weight", shape=("hidden", "expert_ffn"), axis=1,
        expert=True),
)  # fmt: skip
SHARED = (
    _swiglu("mlp.shared_experts.linear_fc1.weight", M + "shared_experts.gate_proj.weight",
            M + "shared_experts.up_proj.weight", "shared_ffn"),
    row("mlp.shared_experts.linear_fc2.weight", to=M + "shared_experts.down_proj.weight",
        shape=("hidden", "shared_ffn"), axis=1),
)  # fmt: skip

PREDICTION = (
    row("enorm.weight", to="enorm.weight", shape=("hidden",)),
    row("hnorm.weight", to="hnorm.weight", shape=("hidden",)),
    row("eh_proj.weight", to="eh_proj.weight", shape=("hidden", "two_hidden"), axis=0),
    row("final_layernorm.weight", to="shared_head.norm.weight", shape=("hidden",)),
)
"""Below `mtp.layers.N.`, and below the layers that follow the last one: layers that predict one more token."""

OUTSIDE = (EMBEDDING, FINAL_NORM, HEAD)
INSIDE = (
    INPUT_NORM, IN_PROJ, IN_PROJ_DIRECT, IN_PROJ_PACKED, CONVOLUTION, BETA_PROJ, *LOW_DOWN, *LOW_UP, *KDA,
    QUERY, QUERY_DOWN_ROW, *LOW_RANK_QUERY, KV_DOWN_ROW, QKV_DOWN_ROW, *MLA, MLA_GATE,
    DENSE_NORM, MOE_NORM, *DENSE, *ROUTER, *EXPERTS, *SHARED,
)  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """Which of the fused forms a checkpoint has."""

    packed: bool = False
    """`in_proj` holds the bottlenecks of the gates and beta too."""
    joint_down: bool = False
    """MLA's two down projections are one."""


def outer_rows(config: KimiLinearConfig) -> tuple[Row, ...]:
    """Rows outside the layers."""
    return (EMBEDDING, FINAL_NORM, *(() if config.tie_word_embeddings else (HEAD,)))


def attention_rows(config: KimiLinearConfig, kind: str, variant: Variant = Variant()) -> tuple[Row, ...]:
    """The rows of a layer's first half: `kind` is `"kda"` or `"mla"`."""
    if kind == "mla":
        low_rank = config.q_lora_rank is not None
        downs = (*((QUERY_DOWN_ROW,) if low_rank else ()), KV_DOWN_ROW)
        if variant.joint_down and low_rank:
            downs = (QKV_DOWN_ROW,)
        queries = LOW_RANK_QUERY if low_rank else (QUERY,)
        gate = () if config.mla_output_gate is None else (MLA_GATE,)
        return (INPUT_NORM, *queries, *downs, *MLA, *gate)
    direct = config.kda_decay_gate == "direct"
    projections = (IN_PROJ_DIRECT, BETA_PROJ) if direct else (IN_PROJ, BETA_PROJ, *LOW_DOWN, *LOW_UP)
    if variant.packed and not direct:
        projections = (IN_PROJ_PACKED, *LOW_UP)
    convolution = (CONVOLUTION,) if config.linear_conv_kernel_dim else ()
    return (INPUT_NORM, *projections, *convolution, *KDA)


def mlp_rows(config: KimiLinearConfig, kind: str) -> tuple[Row, ...]:
    """The rows of a layer's second half: `kind` is `"dense"` or `"moe"`."""
    if kind == "dense":
        return (DENSE_NORM, *DENSE)
    shared = SHARED if config.num_shared_experts else ()
    return (MOE_NORM, *ROUTER, *EXPERTS, *shared)


def dimensions(config: KimiLinearConfig) -> dict[str, int]:
    """The words that shapes are written in."""
    c = config
    gate = {None: 0, "head_wise": 1, "element_wise": c.v_head_dim}[c.mla_output_gate]
    return {
        "hidden": c.hidden_size,
        "two_hidden": 2 * c.hidden_size,
        "vocab": c.vocab_size,
        "kda": c.linear_num_heads * c.linear_head_dim,
        "kda_heads": c.linear_num_heads,
        "kda_dim": c.linear_head_dim,
        "taps": c.linear_conv_kernel_dim,
        "queries": c.num_attention_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim),
        "q_rank": c.q_lora_rank or 0,
        "kv_rank": c.kv_lora_rank,
        "latent": c.kv_lora_rank + c.qk_rope_head_dim,
        "expanded": c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim),
        "values": c.num_attention_heads * c.v_head_dim,
        "mla_gate": c.num_attention_heads * gate,
        "ffn": c.intermediate_size,
        "experts": c.num_experts,
        "expert_ffn": c.moe_intermediate_size,
        "shared_ffn": c.moe_intermediate_size * c.num_shared_experts,
    }


def sized(shape: Dims, sizes: dict[str, int]) -> tuple[int, ...]:
    """A shape in numbers."""
    return tuple(size if isinstance(size, int) else sizes[size] for size in shape)


def as_markdown() -> str:
    """The table as the documentation shows it."""
    lines = [
        "| Megatron | published | shape | split over tensor parallel ranks |",
        "|---|---|---|---|",
    ]
    groups = (
        ("outside the layers", OUTSIDE),
        ("below `decoder.layers.N.` and `model.layers.N.`", INSIDE),
        ("below `mtp.layers.N.` and the layers after the last", PREDICTION),
    )
    for title, rows in groups:
        lines.append(f"| *{title}* | | | |")
        for this in rows:
            names = " or ".join(f"`{name}`" for name in this.names)
            published = ", ".join(f"`{section.published}`" for section in this.sections)
            shapes = list(dict.fromkeys(_shape_text(section) for section in this.sections))
            split = "no" if this.axis is None else f"axis {this.axis}" + (", or not" if this.replicable else "")
            split += ", each part by itself" if len(this.sections) > 1 else ""
            split += "; padding after it is dropped" if this.padded else ""
            lines.append(f"| {names} | {published} | {', '.join(shapes)} | {split} |")
    return "\n".join(lines)


def _shape_text(section: Section) -> str:
    text = lambda shape: "[" + ", ".join(str(size) for size in shape) + "]"
    return text(section.shape) + (f" as {text(section.published_shape)}" if section.published_shape else "")


def with_gates(config: KimiLinearConfig, direct: bool) -> KimiLinearConfig:
    """The configuration with direct gates of KDA, or with ones through a bottleneck."""
    rank = "direct" if direct else "low_rank"
    return dataclasses.replace(config, kda_decay_gate=rank, kda_output_gate=rank)
