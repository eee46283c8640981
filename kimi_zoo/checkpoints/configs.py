"""`config.json` of a Kimi Linear checkpoint <-> `KimiLinearConfig`, in both published styles, strictly."""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kimi_zoo.checkpoints.safetensors import CheckpointError, read_json
from kimi_zoo.models.kimi_linear_config import KimiLinearConfig

# our field: the names it goes by in published files, the usual one first
SPELLINGS = {
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size",),
    "intermediate_size": ("intermediate_size",),
    "rms_norm_eps": ("rms_norm_eps",),
    "initializer_range": ("initializer_range",),
    "tie_word_embeddings": ("tie_word_embeddings",),
    "linear_num_heads": ("linear_num_heads",),
    "linear_head_dim": ("linear_head_dim",),
    "linear_conv_kernel_dim": ("linear_conv_kernel_dim",),
    "kda_safe_gate": ("kda_safe_gate",),
    "kda_lower_bound": ("kda_lower_bound",),
    "num_attention_heads": ("num_attention_heads",),
    "q_lora_rank": ("q_lora_rank",),
    "kv_lora_rank": ("kv_lora_rank",),
    "qk_nope_head_dim": ("qk_nope_head_dim",),
    "qk_rope_head_dim": ("qk_rope_head_dim",),
    "v_head_dim": ("v_head_dim",),
    "num_experts": ("num_experts", "n_routed_experts"),
    "num_experts_per_token": ("num_experts_per_token", "num_experts_per_tok"),
    "moe_intermediate_size": ("moe_intermediate_size",),
    "num_shared_experts": ("num_shared_experts", "n_shared_experts"),
    "moe_router_activation_func": ("moe_router_activation_func", "scoring_func"),
    "moe_renormalize": ("moe_renormalize", "norm_topk_prob"),
    "num_expert_group": ("num_expert_group", "n_group"),
    "topk_group": ("topk_group",),
    "routed_scaling_factor": ("routed_scaling_factor",),
    "expert_swiglu_limit_list": ("expert_swiglu_limit_list",),
    "share_expert_swiglu_limit_list": ("share_expert_swiglu_limit_list",),
    "model_max_length": ("model_max_length", "max_position_embeddings"),
    "bos_token_id": ("bos_token_id",),
    "eos_token_id": ("eos_token_id",),
    "pad_token_id": ("pad_token_id",),
}

# fields of `linear_attn_config` (Moonshot's style) and what they are called here
LINEAR_ATTENTION = {
    "num_heads": "linear_num_heads",
    "head_dim": "linear_head_dim",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}

# without these a file describes no model: nothing sensible can be assumed (of `rms_norm_eps`, readers assume different
# things)
REQUIRED = (
    "vocab_size hidden_size intermediate_size rms_norm_eps linear_num_heads linear_head_dim num_attention_heads "
    "kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim"
).split()
REQUIRED_MOE = ("num_experts", "num_experts_per_token", "moe_intermediate_size")

# what an absent field means, where that is not the value of Kimi-Linear-48B-A3B (defaults of the published config
# class)
ABSENT = {
    "num_shared_experts": 0,
    "routed_scaling_factor": 1.0,
    "num_experts": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

# kept as they are and written back: they describe a file or a program, not the computation
INERT = frozenset(
    """
    _name_or_path architectures attention_dropout attn_implementation auto_map cache_implementation
    chunk_size_feed_forward dtype head_dim id2label ignore_index is_encoder_decoder label2id model_type
    output_attentions output_hidden_states output_router_logits pretraining_tp problem_type quantization_config
    return_dict rope_parameters rope_scaling rope_theta router_aux_loss_coef aux_loss_alpha seq_aux torch_dtype
    transformers_version unsloth_fixed unsloth_version use_bfloat16 use_cache num_nextn_predict_layers
    kda_disable_fp8 sep_token_id decoder_start_token_id
    """.split()
)

# read below by rules of their own
STRUCTURAL = frozenset(
    "linear_attn_config layer_types mlp_layer_types num_hidden_layers first_k_dense_replace moe_layer_freq "
    "no_kda_lora gated_attention_proj_granularity_type".split()
)

# fields with one value that is implemented; absent means that value
FIXED: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mla_use_nope": (True,),
    "use_grouped_topk": (True,),
    "topk_method": ("noaux_tc", None),
    "ep_size": (1, None),
    "apply_router_weight_on_input": (False, None),
    "use_qk_norm": (False, None),
    "sliding_window": (None,),
}

MOST_LAYERS = 10_000  # a larger number is a mistake; it would only keep the reader busy

OUTPUT_GATES = {None: None, "head_wise": "head_wise", "element_wise": "element_wise", "elementwise": "element_wise"}


def read_config(folder: str | Path) -> tuple[KimiLinearConfig, dict]:
    """The configuration of a checkpoint folder, and its `config.json` as a dict.

    **Raises:** `CheckpointError` for a missing or malformed file, another model family, or anything `parse_config`
    refuses.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} holds no config.json, which says what model its weights make.")
    data = read_json(path)
    kind = data.get("model_type") if isinstance(data, dict) else None
    if kind != "kimi_linear":
        raise CheckpointError(f"{path}: model_type {kind!r} is not a family this package has; it has: 'kimi_linear'.")
    try:
        return parse_config(data, complete=True), data
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error


def parse_config(data: Mapping[str, Any], *, complete: bool = False) -> KimiLinearConfig:
    """A `KimiLinearConfig` from the fields of a published `config.json`.

    Both styles are read: Moonshot's (`linear_attn_config` with 1-based layer numbers; a layer in neither list has full
    attention) and that of transformers (`layer_types`, `linear_*`), and every spelling in `SPELLINGS`.

    **Arguments:** `complete`: refuse a file without the sizes in `REQUIRED`; otherwise those of Kimi-Linear-48B-A3B are
    taken.

    **Raises:** `ValueError` that lists every field which is unknown, contradictory, not implemented or missing.
    """
    problems: list[str] = list(_unknown(data))
    values: dict[str, Any] = dict(ABSENT)
    for field, found in _spelled(data).items():
        distinct = {json.dumps(value) for value in found.values()}
        if len(distinct) > 1:
            problems.append("one setting with different values: " + ", ".join(f"{k} {v!r}" for k, v in found.items()))
        values[field] = next(iter(found.values()))
    if complete:
        sparse = bool(values["num_experts"])
        required = (*REQUIRED, *(REQUIRED_MOE if sparse else ()))
        missing = [SPELLINGS[field][0] for field in required if values.get(field) is None]
        if not any(key in data for key in ("num_hidden_layers", "layer_types")):
            missing.append("num_hidden_layers")
        if missing:
            problems.append(f"missing: {', '.join(missing)}")
    if problems:
        raise ValueError("the configuration cannot be used:\n- " + "\n- ".join(problems))
    values = {name: value for name, value in values.items() if value is not None or name in ABSENT}
    values["num_experts"] = values["num_experts"] or 0
    values["num_shared_experts"] = values["num_shared_experts"] or 0
    for name in ("eos_token_id", "expert_swiglu_limit_list", "share_expert_swiglu_limit_list"):
        if isinstance(values.get(name), list):
            values[name] = tuple(values[name])
    layers = _num_layers(data)
    direct = data.get("no_kda_lora")
    if direct is not None and not isinstance(direct, bool):
        raise ValueError(f"no_kda_lora must be true or false; got {direct!r}.")
    gate = "direct" if direct else "low_rank"
    heads = values.get("num_attention_heads", KimiLinearConfig.num_attention_heads)
    if data.get("num_key_value_heads", heads) not in (heads, None):
        raise ValueError(
            f"num_key_value_heads {data['num_key_value_heads']} must equal num_attention_heads {heads} in MLA."
        )
    config = KimiLinearConfig(
        layer_kinds=_layer_kinds(data, layers),
        mlp_kinds=_mlp_kinds(data, layers, bool(values["num_experts"])),
        kda_decay_gate=gate,
        kda_output_gate=gate,
        mla_output_gate=OUTPUT_GATES[data.get("gated_attention_proj_granularity_type")],
        **values,
    )
    query_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    if data.get("qk_head_dim", query_dim) != query_dim:
        raise ValueError(f"qk_head_dim {data['qk_head_dim']} is not qk_nope_head_dim + qk_rope_head_dim = {query_dim}.")
    return config


def prediction_layers(data: Mapping[str, Any]) -> int:
    """How many layers behind the last a checkpoint may hold that predict one more token."""
    return data.get("num_nextn_predict_layers") or 0


def write_config(config: KimiLinearConfig, source: Mapping[str, Any] | None, dtype: str) -> dict:
    """The fields of `config.json` for a configuration, which `parse_config` reads back to an equal one.

    **Arguments:**

    - `source`: the file that the model came from: its inert fields are carried over and, where it still says the same,
        its style too. Without it, the published (Moonshot's) style is written.
    - `dtype`: name of the dtype that most weights are stored in.
    """
    base = dict(source or {})
    if source is None or parse_config(source) != config:
        inert = {name: value for name, value in base.items() if name in INERT}
        base = {"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", **_published(config), **inert}
    for name in ("dtype", "torch_dtype"):
        if name in base or (name == "torch_dtype" and "dtype" not in base):
            base[name] = dtype
    return {name: value for name, value in base.items() if name != "quantization_config"}


def _published(config: KimiLinearConfig) -> dict:
    """All fields in Moonshot's style."""
    number = lambda kind: [layer + 1 for layer, this in enumerate(config.layer_kinds) if this == kind]
    dense = config.mlp_kinds.index("moe") if "moe" in config.mlp_kinds else config.num_hidden_layers
    out: dict = {
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_attention_heads,
        "hidden_act": "silu",
        # read by nothing here, but other programs ask for them
        "head_dim": config.hidden_size // config.num_attention_heads,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "num_nextn_predict_layers": 0,
        "use_cache": True,
        "mla_use_nope": True,
        "use_grouped_topk": True,
        "linear_attn_config": {"full_attn_layers": number("mla"), "kda_layers": number("kda")}
        | {theirs: getattr(config, ours) for theirs, ours in LINEAR_ATTENTION.items()},
    }
    if config.mlp_kinds == ("dense",) * dense + ("moe",) * (config.num_hidden_layers - dense):
        out |= {"first_k_dense_replace": dense, "moe_layer_freq": 1}
    else:
        out["mlp_layer_types"] = ["dense" if kind == "dense" else "sparse" for kind in config.mlp_kinds]
    plain = set(SPELLINGS) - set(LINEAR_ATTENTION.values())
    default = {field.name: field.default for field in dataclasses.fields(config)}
    optional = {"kda_safe_gate", "kda_lower_bound", "expert_swiglu_limit_list", "share_expert_swiglu_limit_list"}
    for field, (name, *_) in SPELLINGS.items():
        value = getattr(config, field)
        if field in plain and not (field in optional and value == default[field]):
            out[name] = list(value) if isinstance(value, tuple) else value
    if config.kda_decay_gate == config.kda_output_gate == "direct":
        out["no_kda_lora"] = True
    if config.mla_output_gate is not None:
        out["gated_attention_proj_granularity_type"] = config.mla_output_gate
    return out


def _unknown(data: Mapping[str, Any]) -> Iterator[str]:
    """Fields that are not implemented as they stand."""
    known = {name for names in SPELLINGS.values() for name in names} | INERT | STRUCTURAL | set(FIXED)
    known |= {"num_key_value_heads", "qk_head_dim"}
    for name, value in data.items():
        if name in FIXED and value not in FIXED[name]:
            yield f"{name} {value!r} is not implemented, only {FIXED[name][0]!r}"
        elif name not in known:
            yield f"{name} {value!r} is not a field of this family that is known: it may change the computation"
        elif isinstance(value, float) and not math.isfinite(value):
            yield f"{name} must be finite; got {value}"
    predicted = data.get("num_nextn_predict_layers")
    if predicted is not None and not _is_count(predicted):
        yield f"num_nextn_predict_layers must be a whole number of at least 0; got {predicted!r}"
    gate = data.get("gated_attention_proj_granularity_type")
    if not (gate is None or (isinstance(gate, str) and gate in OUTPUT_GATES)):
        yield f"gated_attention_proj_granularity_type {gate!r} is not implemented, only 'head_wise' and 'element_wise'"
    inner = data.get("linear_attn_config") or {}
    if isinstance(inner, Mapping):
        for name in set(inner) - set(LINEAR_ATTENTION) - {"kda_layers", "full_attn_layers"}:
            yield f"linear_attn_config.{name} {inner[name]!r} is not known: it may change the computation"
    else:
        yield f"linear_attn_config must be an object; got {inner!r}"


def _is_count(value: Any, least: int = 0) -> bool:
    """Whether a value is a whole number, which neither `true` nor `2.0` is, of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _spelled(data: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Per field of ours, the values found under each of its names."""
    found = {field: {name: data[name] for name in names if name in data} for field, names in SPELLINGS.items()}
    inner = data.get("linear_attn_config")
    if isinstance(inner, Mapping):
        for name, field in LINEAR_ATTENTION.items():
            if name in inner:
                found[field][f"linear_attn_config.{name}"] = inner[name]
    return {field: values for field, values in found.items() if values}


def _num_layers(data: Mapping[str, Any]) -> int:
    stated = data.get("num_hidden_layers")
    types = data.get("layer_types")
    if stated is None:
        return len(types) if isinstance(types, list) else KimiLinearConfig().num_hidden_layers
    if not _is_count(stated, 1) or stated > MOST_LAYERS:
        raise ValueError(f"num_hidden_layers must be a whole number from 1 to {MOST_LAYERS}; got {stated!r}.")
    if isinstance(types, list) and len(types) != stated:
        raise ValueError(f"layer_types names {len(types)} layers, num_hidden_layers says {stated}.")
    return stated


def _layer_kinds(data: Mapping[str, Any], layers: int) -> tuple:
    """`"kda"` or `"mla"` per layer."""
    readings = {}
    types = data.get("layer_types")
    if types is not None:
        names = {"linear_attention": "kda", "full_attention": "mla"}
        if not isinstance(types, list):
            raise ValueError(f"layer_types must be a list with a kind per layer; got {types!r}.")
        wrong = sorted({str(kind) for kind in types} - set(names))
        if wrong:
            raise ValueError(f"layer_types may hold {sorted(names)}; got {wrong}.")
        readings["layer_types"] = tuple(names[kind] for kind in types)
    inner = data.get("linear_attn_config")
    if isinstance(inner, Mapping) and ("kda_layers" in inner or "full_attn_layers" in inner):
        kda, full = (inner.get(name) or [] for name in ("kda_layers", "full_attn_layers"))
        if not isinstance(kda, list) or not isinstance(full, list):
            wrong = kda if not isinstance(kda, list) else full
            raise ValueError(f"kda_layers and full_attn_layers of linear_attn_config must be lists; got {wrong!r}.")
        outside = [layer for layer in kda + full if not _is_count(layer, 1) or layer > layers]
        if outside:
            raise ValueError(f"linear_attn_config numbers layers from 1 to {layers}; got {outside}.")
        both = sorted(set(kda) & set(full))
        if both or len(set(kda)) != len(kda) or len(set(full)) != len(full):
            raise ValueError(f"linear_attn_config names layers twice: {both or sorted(kda + full)}.")
        readings["linear_attn_config"] = tuple("kda" if layer in kda else "mla" for layer in range(1, layers + 1))
    if len(set(readings.values())) > 1:
        raise ValueError(f"layer_types and linear_attn_config name different layers: {readings}.")
    if not readings:
        raise ValueError(
            "neither linear_attn_config (with kda_layers, full_attn_layers) nor layer_types says which layers are KDA."
        )
    return next(iter(readings.values()))


def _mlp_kinds(data: Mapping[str, Any], layers: int, sparse: bool) -> tuple:
    """`"dense"` or `"moe"` per layer."""
    readings = {}
    types = data.get("mlp_layer_types")
    if types is not None:
        names = {"dense": "dense", "sparse": "moe"}
        if not isinstance(types, list) or len(types) != layers or any(kind not in list(names) for kind in types):
            raise ValueError(f"mlp_layer_types must name {layers} layers dense or sparse; got {types}.")
        readings["mlp_layer_types"] = tuple(names[kind] for kind in types)
    if types is None or "first_k_dense_replace" in data or "moe_layer_freq" in data:
        first, every = data.get("first_k_dense_replace", 0), data.get("moe_layer_freq", 1)
        if not _is_count(first) or not _is_count(every, 1):
            raise ValueError(f"first_k_dense_replace {first!r} or moe_layer_freq {every!r} makes no sense.")
        moe = lambda layer: sparse and layer >= first and layer % every == 0
        readings["first_k_dense_replace and moe_layer_freq"] = tuple(
            "moe" if moe(i) else "dense" for i in range(layers)
        )
    if len(set(readings.values())) > 1:
        raise ValueError(f"different kinds of layers are named: {readings}.")
    kinds = next(iter(readings.values()))
    if "moe" in kinds and not sparse:
        raise ValueError("mlp_layer_types names sparse layers, but num_experts is absent or 0.")
    return kinds
