"""Sizes and choices of a Kimi Linear model. Needs no JAX, so that programs which only look at files start at once."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from kimi_zoo.layers.gate_bound import check_lower_bound

LayerKind = Literal["kda", "mla"]
PERIOD: tuple[LayerKind, ...] = ("kda", "kda", "kda", "mla")
KIMI_LINEAR_48B_LAYERS: tuple[LayerKind, ...] = (*PERIOD * 6, "kda", "kda", "mla")


@dataclasses.dataclass(frozen=True, kw_only=True)
class KimiLinearConfig:
    """Sizes and choices of a Kimi Linear model, named as in published `config.json` files.

    The defaults are those of Kimi-Linear-48B-A3B. `layer_kinds` gives `"kda"` or `"mla"` per layer, `mlp_kinds`
    `"dense"` or `"moe"`; published files say the same as lists of layer numbers (see `kimi_zoo.checkpoints.configs`).
    """

    vocab_size: int = 163840
    hidden_size: int = 2304
    layer_kinds: tuple[LayerKind, ...] = KIMI_LINEAR_48B_LAYERS
    mlp_kinds: tuple[Literal["dense", "moe"], ...] = ("dense",) + ("moe",) * 26
    intermediate_size: int = 9216
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False

    linear_num_heads: int = 32
    linear_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    kda_decay_gate: Literal["direct", "low_rank"] = "low_rank"
    kda_output_gate: Literal["direct", "low_rank"] = "low_rank"
    kda_safe_gate: bool = False
    kda_lower_bound: float | None = None

    num_attention_heads: int = 32
    q_lora_rank: int | None = None
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    mla_output_gate: Literal["head_wise", "element_wise"] | None = None

    num_experts: int = 256
    num_experts_per_token: int = 8
    moe_intermediate_size: int = 1024
    num_shared_experts: int = 1
    moe_router_activation_func: Literal["sigmoid", "softmax"] = "sigmoid"
    moe_renormalize: bool = True
    num_expert_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 2.446
    expert_swiglu_limit_list: tuple[float | None, ...] | None = None
    share_expert_swiglu_limit_list: tuple[float | None, ...] | None = None

    model_max_length: int = 1048576
    bos_token_id: int | None = 163584
    eos_token_id: int | tuple[int, ...] | None = 163586
    pad_token_id: int | None = 163839

    def __post_init__(self):
        """**Raises:** `ValueError` that lists every choice which makes no model."""
        problems = list(_config_problems(self))
        if problems:
            raise ValueError("This configuration makes no model:\n- " + "\n- ".join(problems))

    @property
    def num_hidden_layers(self) -> int:
        """Number of blocks."""
        return len(self.layer_kinds)


# the least value of a number, where that is not 1
AT_LEAST = {
    "linear_conv_kernel_dim": 0,
    "num_shared_experts": 0,
    "qk_rope_head_dim": 0,
    "num_experts": 0,
}


def _config_problems(config: KimiLinearConfig) -> Iterator[str]:
    """Yields what is wrong with a configuration, a sentence each."""
    wrong = list(_type_problems(config))
    if wrong:
        yield from wrong  # the rest reads the values
        return
    layers = config.num_hidden_layers
    if config.rms_norm_eps <= 0:
        yield f"`rms_norm_eps` must be more than 0; got {config.rms_norm_eps}."
    if config.initializer_range < 0:
        yield f"`initializer_range` must be at least 0; got {config.initializer_range}."
    if layers == 0:
        yield "`layer_kinds` names no layer."
    if len(config.mlp_kinds) != layers:
        yield f"`mlp_kinds` must name one kind per layer, {layers}; got {len(config.mlp_kinds)}."
    for name in ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list"):
        limits = getattr(config, name)
        if limits is not None and len(limits) != layers:
            yield f"`{name}` must hold one limit per layer, {layers}; got {len(limits)}."
        if any(limit is not None and limit < 0 for limit in limits or ()):
            yield f"`{name}` must hold limits of at least 0 (0 or None: no limit); got {limits}."
    if "moe" in config.mlp_kinds:
        groups, kept, experts = config.num_expert_group, config.topk_group, config.num_experts
        if experts < 1 or groups < 1 or experts % groups or kept > groups:
            yield f"`num_experts` {experts}, `num_expert_group` {groups} and `topk_group` {kept} make no equal groups."
        elif config.num_experts_per_token > experts // groups * kept:
            chosen = config.num_experts_per_token
            yield f"`num_experts_per_token` {chosen} exceeds the {experts // groups * kept} experts to choose from."
    try:
        check_lower_bound(config.kda_safe_gate, config.kda_lower_bound)
    except ValueError as error:
        yield f"`kda_lower_bound`: {error}"


def _type_problems(config: KimiLinearConfig) -> Iterator[str]:
    """Fields whose value is not of their type, as it is declared above: nothing is converted, `"false"` is no bool."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if not _fits(value, field.type):
            yield f"`{field.name}` must be {_type_text(field.type)}; got {value!r}."
        elif field.type is int or (field.name == "q_lora_rank" and value is not None):
            least = AT_LEAST.get(field.name, 1)
            if value < least:
                yield f"`{field.name}` must be a whole number of at least {least}; got {value!r}."


def _fits(value: object, kind: Any) -> bool:
    """Whether a value is of an annotated type; booleans are no numbers, whole numbers are numbers, all are finite."""
    options = get_args(kind)
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in options
    if get_origin(kind) is tuple:  # tuple[X, ...]
        return isinstance(value, tuple) and all(_fits(item, options[0]) for item in value)
    if options:
        return any(_fits(value, option) for option in options)
    if isinstance(value, bool):
        return kind is bool
    if kind is float:
        return isinstance(value, int | float) and math.isfinite(value)
    return isinstance(value, kind)


def _type_text(kind: Any) -> str:
    """A type in words."""
    options = get_args(kind)
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, options))
    if get_origin(kind) is tuple:
        return f"a sequence (each: {_type_text(options[0])})"
    if options:
        return " or ".join(map(_type_text, options))
    names = {int: "a whole number", float: "a finite number", bool: "True or False", type(None): "None"}
    return names[kind]


KIMI_LINEAR_48B_A3B = KimiLinearConfig()
