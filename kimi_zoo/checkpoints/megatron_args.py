"""The arguments that Megatron stores beside its weights <-> fields of `KimiLinearConfig`."""

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from kimi_zoo.checkpoints.configs import SPELLINGS, parse_config
from kimi_zoo.checkpoints.files import CheckpointError
from kimi_zoo.models.kimi_linear_config import KimiLinearConfig

# Megatron's argument -> our field, where the value is the same
SAME = {
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "norm_epsilon": "rms_norm_eps",
    "init_method_std": "initializer_range",
    "num_attention_heads": "num_attention_heads",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "linear_num_key_heads": "linear_num_heads",
    "linear_key_head_dim": "linear_head_dim",
    "linear_conv_kernel_dim": "linear_conv_kernel_dim",
    "kda_lower_bound": "kda_lower_bound",
    "num_experts": "num_experts",
    "moe_router_topk": "num_experts_per_token",
    "moe_ffn_hidden_size": "moe_intermediate_size",
    "moe_router_score_function": "moe_router_activation_func",
    "moe_router_num_groups": "num_expert_group",
    "moe_router_group_topk": "topk_group",
    "moe_router_topk_scaling_factor": "routed_scaling_factor",
    "max_position_embeddings": "model_max_length",
    "vocab_size": "vocab_size",
}
# what an argument that is None means, where it says something
NONE = {
    "num_experts": 0,
    "q_lora_rank": None,
    "moe_router_num_groups": 1,
    "moe_router_group_topk": 1,
    "moe_router_topk_scaling_factor": 1.0,
}
# arguments with one value that the published layout can express; absent means that value
FIXED: dict[str, tuple[Any, ...]] = {
    "swiglu": (True,),
    "add_bias_linear": (False,),
    "add_qkv_bias": (False,),
    "normalization": ("RMSNorm",),
    "multi_latent_attention": (True,),
    "position_embedding_type": ("none", "nope", None),
    "moe_shared_expert_gate": (False, None),
    "moe_latent_size": (None,),
}
KINDS_ATTENTION = {"K": "kda", "+": "mla"}
KINDS_MLP = {"-": "dense", "E": "moe"}

# what belongs to a run: shown, and carried along in what is written
PARALLEL = {
    "tensor_model_parallel_size": "TP",
    "pipeline_model_parallel_size": "PP",
    "virtual_pipeline_model_parallel_size": "VPP",
    "expert_model_parallel_size": "EP",
    "expert_tensor_parallel_size": "ETP",
    "context_parallel_size": "CP",
}
ZERO_CENTERED = ("apply_layernorm_1p", "layernorm_zero_centered_gamma")


def pattern_of(args: Mapping[str, Any]) -> str | None:
    """One symbol per physical layer of a hybrid stack, without pipeline cuts and prediction layers; `None` for a GPT
    stack."""
    pattern = args.get("hybrid_layer_pattern") or args.get("hybrid_override_pattern")
    return pattern.split("/")[0].replace("|", "") if isinstance(pattern, str) and pattern else None


def kinds_of_pattern(pattern: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Kinds of attention and of MLP per logical layer.

    **Raises:** `CheckpointError` if attention and MLP do not alternate, or a symbol is of another kind.
    """
    attention, mlp = pattern[::2], pattern[1::2]
    wrong = sorted((set(attention) - set(KINDS_ATTENTION)) | (set(mlp) - set(KINDS_MLP)))
    if len(pattern) % 2 or wrong:
        raise CheckpointError(
            f"hybrid_layer_pattern {pattern!r} has no published layout: expected K or + (KDA, MLA), then - or E "
            f"(dense, experts), and so on{f'; found {wrong}' if wrong else ''}."
        )
    return tuple(KINDS_ATTENTION[x] for x in attention), tuple(KINDS_MLP[x] for x in mlp)


def fields_of_args(args: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `KimiLinearConfig` that the arguments state.

    **Raises:** `CheckpointError` that lists every argument whose value has no published layout.
    """
    problems = [
        f"{name} is {args[name]!r}; only {values[0]!r} can be converted"
        for name, values in FIXED.items()
        if name in args and args[name] not in values
    ]
    fields: dict[str, Any] = {}
    for name, field in SAME.items():
        value = args.get(name)
        if value is not None:
            fields[field] = value
        elif name in NONE and name in args:
            fields[field] = NONE[name]
    if "layernorm_epsilon" in args and "norm_epsilon" not in args:
        fields["rms_norm_eps"] = args["layernorm_epsilon"]
    for one, other in (
        ("linear_num_key_heads", "linear_num_value_heads"),
        ("linear_key_head_dim", "linear_value_head_dim"),
    ):
        if other in args and args.get(one, args[other]) != args[other]:
            problems.append(f"{one} {args[one]} and {other} {args[other]} differ, which KDA cannot have")
    if args.get("kda_safe_gate") is not None:
        fields["kda_safe_gate"] = bool(args["kda_safe_gate"])
        if not fields["kda_safe_gate"]:
            fields["kda_lower_bound"] = None
    if args.get("kda_two_stage_gates") is not None:
        rank = "low_rank" if args["kda_two_stage_gates"] else "direct"
        fields |= {"kda_decay_gate": rank, "kda_output_gate": rank}
    if "untie_embeddings_and_output_weights" in args:
        fields["tie_word_embeddings"] = not args["untie_embeddings_and_output_weights"]
    if "attention_output_gate" in args:
        fields["mla_output_gate"] = _output_gate(args, problems)
    _moe_fields(args, fields, problems)
    _kinds(args, fields, problems)
    if problems:
        raise CheckpointError(
            "the checkpoint's arguments describe no model in published layout:\n" + "\n".join(problems) + "\n"
            "Published Kimi Linear models have no such parts: a model trained with them cannot be converted. If an "
            "argument is not what it was trained with, correct it where the checkpoint is saved."
        )
    return fields


def _output_gate(args: Mapping[str, Any], problems: list[str]) -> str | None:
    if not args["attention_output_gate"]:
        return None
    kind = str(args.get("gated_attention_proj_granularity") or "elementwise").replace("_", "").lower()
    if kind not in ("headwise", "elementwise"):
        problems.append(f"gated_attention_proj_granularity is {kind!r}; expected headwise or elementwise")
    return {"headwise": "head_wise"}.get(kind, "element_wise")


def _moe_fields(args: Mapping[str, Any], fields: dict[str, Any], problems: list[str]) -> None:
    if not fields.get("num_experts"):
        return
    fields["moe_renormalize"] = not args.get("moe_router_pre_softmax") or args.get("moe_router_score_function") != (
        "softmax"
    )
    if "moe_shared_expert_intermediate_size" in args:
        shared, width = args["moe_shared_expert_intermediate_size"] or 0, fields.get("moe_intermediate_size")
        if not width or shared % width:
            problems.append(f"moe_shared_expert_intermediate_size {shared} is no multiple of an expert's {width}")
        else:
            fields["num_shared_experts"] = shared // width


def _kinds(args: Mapping[str, Any], fields: dict[str, Any], problems: list[str]) -> None:
    layers = args.get("num_layers")
    if pattern := pattern_of(args):
        if layers not in (None, len(pattern)):
            problems.append(f"num_layers is {layers}, hybrid_layer_pattern {pattern!r} has {len(pattern)} layers")
        fields["layer_kinds"], fields["mlp_kinds"] = kinds_of_pattern(pattern)
        return
    if type(layers) is not int:
        return
    for name, field, one, zero in (
        ("linear_attention_freq", "layer_kinds", "kda", "mla"),
        ("moe_layer_freq", "mlp_kinds", "moe", "dense"),
    ):
        value = _frequencies(args.get(name), layers, moe=field == "mlp_kinds")
        if field == "mlp_kinds" and fields.get("num_experts") == 0:
            value = [0] * layers
        if value is not None and len(value) != layers:
            problems.append(f"{name} names {len(value)} layers, num_layers says {layers}")
        elif value is not None:
            fields[field] = tuple(one if this else zero for this in value)


def _frequencies(value: Any, layers: int, *, moe: bool) -> list[int] | None:
    """A list of ones and zeros; a number N means every N-th layer (experts: those divisible by it; attention: full)."""
    if isinstance(value, str):  # such as "([0]*1+[1]*26)"
        if re.fullmatch(r"[\[\]()\d,*+\s]{1,400}", value) is None:
            return None
        value = _repeated(value)
    if isinstance(value, list):
        return [int(bool(item)) for item in value]
    if type(value) is not int or value < 1:
        return None
    if moe:
        return [int(i % value == 0) for i in range(layers)]
    return [int((i + 1) % value != 0) for i in range(layers)]


def _repeated(text: str) -> list[int]:
    """Evaluates sums of lists of digits, each perhaps repeated: `[1]*3+[0]`."""
    out: list[int] = []
    for items, times in re.findall(r"\[([\d,\s]*)\]\)?\s*(?:\*\s*(\d{1,4}))?", text):
        out += [int(item) for item in items.split(",") if item.strip()] * int(times or 1)
    return out


def fields_of_published(data: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that a `config.json` states, or a part of one.

    **Raises:** `CheckpointError` for fields that are unknown or contradict each other.
    """
    try:
        config = parse_config(_completed(data))
    except ValueError as error:
        raise CheckpointError(f"The configuration given cannot be used: {error}") from None
    names = {name for name, spelled in SPELLINGS.items() if any(key in data for key in spelled)}
    inner = data.get("linear_attn_config") or {}
    names |= {
        field
        for key, field in (
            ("num_heads", "linear_num_heads"),
            ("head_dim", "linear_head_dim"),
            ("short_conv_kernel_size", "linear_conv_kernel_dim"),
        )
        if key in inner
    }
    if "layer_types" in data or "kda_layers" in inner or "full_attn_layers" in inner:
        names.add("layer_kinds")
    if "mlp_layer_types" in data or "first_k_dense_replace" in data or "moe_layer_freq" in data:
        names.add("mlp_kinds")
    if "no_kda_lora" in data:
        names |= {"kda_decay_gate", "kda_output_gate"}
    if "gated_attention_proj_granularity_type" in data:
        names.add("mla_output_gate")
    return {name: getattr(config, name) for name in names}


def _completed(data: Mapping[str, Any]) -> dict[str, Any]:
    """Adds layer kinds where a partial file leaves them out, so that it can be parsed."""
    out = dict(data)
    inner = out.get("linear_attn_config") or {}
    if "layer_types" not in out and not {"kda_layers", "full_attn_layers"} & set(inner):
        layers = out.get("num_hidden_layers", KimiLinearConfig().num_hidden_layers)
        out["linear_attn_config"] = {**inner, "kda_layers": list(range(1, layers + 1)), "full_attn_layers": []}
    if "num_experts" not in out and "n_routed_experts" not in out:
        out["num_experts"] = KimiLinearConfig().num_experts
    return out


# without these nothing sensible can be assumed
NEEDED = {
    "vocab_size": "vocab_size",
    "num_attention_heads": "num_attention_heads (heads of MLA)",
    "qk_nope_head_dim": "qk_nope_head_dim (head dim)",
    "v_head_dim": "v_head_dim (head dim)",
    "linear_num_heads": "linear_attn_config.num_heads (heads of KDA)",
    "linear_head_dim": "linear_attn_config.head_dim (head dim)",
    "layer_kinds": "linear_attn_config.kda_layers and full_attn_layers (layer kinds)",
    "num_experts": "num_experts",
    "num_experts_per_token": "num_experts_per_token",
    "rms_norm_eps": "rms_norm_eps",
    "routed_scaling_factor": "routed_scaling_factor",
}
ABSENT = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "num_shared_experts": 0}


def settle(where: str, sources: Mapping[str, Mapping[str, Any]]) -> KimiLinearConfig:
    """One configuration from what several sources say, the first being the most trusted.

    **Raises:** `CheckpointError` that names fields with two values, each with its source, or that are missing.
    """
    values: dict[str, Any] = {}
    said: dict[str, str] = {}
    problems = []
    for source, fields in sources.items():
        for name, value in fields.items():
            if name not in values:
                values[name], said[name] = value, source
            elif values[name] != value:
                problems.append(f"{name} is {_short(values[name])} by {said[name]}, {_short(value)} by {source}")
    if problems:
        raise CheckpointError(f"{where}: the configuration is contradictory:\n" + "\n".join(problems))
    sparse = values.get("num_experts") != 0
    nothing = set(sources) == {"its tensors"}  # then the list is that of all that is to be given
    missing = [
        text
        for name, text in NEEDED.items()
        if nothing or (name not in values and (sparse or not name.startswith(("num_experts", "routed"))))
    ]
    if missing:
        raise CheckpointError(
            f"{where} does not say what model its weights make. Give a config.json in published layout with --config; "
            f"needed from it: {', '.join(missing)}."
        )
    known = {field.name for field in dataclasses.fields(KimiLinearConfig)}
    try:
        return KimiLinearConfig(**{**ABSENT, **{name: value for name, value in values.items() if name in known}})
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{where}: {error}") from None


def _short(value: Any) -> str:
    text = json.dumps(list(value) if isinstance(value, tuple) else value, default=str)
    return text if len(text) <= 120 else text[:117] + "..."


def args_of_config(config: KimiLinearConfig, *, hybrid: bool, stages: int = 1) -> dict[str, Any]:
    """The arguments with which Megatron builds this model; `stages`: of the pipeline, virtual ones included."""
    c = config
    args: dict[str, Any] = {name: getattr(c, field) for name, field in SAME.items()}
    letters = {kind: letter for letter, kind in (KINDS_ATTENTION | KINDS_MLP).items()}
    pairs = [letters[a] + letters[b] for a, b in zip(c.layer_kinds, c.mlp_kinds, strict=True)]
    each = len(pairs) // stages
    pattern = "|".join("".join(pairs[at : at + each]) for at in range(0, len(pairs), each))
    args |= {
        "num_layers": c.num_hidden_layers * (2 if hybrid else 1),
        "num_experts": c.num_experts or None,
        "linear_value_head_dim": c.linear_head_dim,
        "linear_num_value_heads": c.linear_num_heads,
        "kda_two_stage_gates": c.kda_decay_gate == "low_rank",
        "kda_safe_gate": c.kda_safe_gate,
        "attention_output_gate": c.mla_output_gate is not None,
        "gated_attention_proj_granularity": (c.mla_output_gate or "element_wise").replace("_", ""),
        "moe_shared_expert_intermediate_size": c.moe_intermediate_size * c.num_shared_experts or None,
        "moe_router_enable_expert_bias": bool(c.num_experts),
        "moe_router_pre_softmax": c.moe_router_activation_func == "softmax" and not c.moe_renormalize,
        "untie_embeddings_and_output_weights": not c.tie_word_embeddings,
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "kv_channels": c.qk_nope_head_dim,
        "swiglu": True,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "normalization": "RMSNorm",
        "position_embedding_type": "none",
        "apply_layernorm_1p": False,
        "hybrid_layer_pattern": pattern if hybrid else None,
        "is_hybrid_model": hybrid,
    }
    if not hybrid:
        args |= {
            "experimental_attention_variant": "kda",
            "linear_attention_freq": [int(kind == "kda") for kind in c.layer_kinds],
            "moe_layer_freq": [int(kind == "moe") for kind in c.mlp_kinds],
        }
    return args
