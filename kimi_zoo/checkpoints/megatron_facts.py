"""What the names and shapes of a Megatron checkpoint's parameters tell about the model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kimi_zoo.checkpoints.files import CheckpointError
from kimi_zoo.checkpoints.megatron_args import fields_of_args, fields_of_published, pattern_of
from kimi_zoo.checkpoints.megatron_names import OUTER, Key, Place
from kimi_zoo.checkpoints.megatron_run import Run, embedding_rows

A = "self_attention."


@dataclass(frozen=True)
class Stack:
    """How layers are numbered: in a GPT stack attention and MLP share a number, in a hybrid one each has its own.

    `places`: of the attention and the MLP of each layer.
    """

    hybrid: bool
    places: tuple[tuple[Place, Place], ...]
    layer_kinds: tuple[str, ...]
    mlp_kinds: tuple[str, ...]


def find_stack(run: Run) -> Stack:
    """Told from the arguments, else from the names.

    **Raises:** `CheckpointError` if layers are missing, or are of kinds that are not known.
    """
    names: dict[int, set[str]] = {}
    for key in run.keys:
        if key.place.kind == "layer":
            names.setdefault(key.place.number, set()).add(key.name)
    numbers = sorted(names)
    if numbers != list(range(len(numbers))):
        missing = sorted(set(range(numbers[-1] + 1)) - set(numbers))
        raise CheckpointError(f"{run.folder} lacks layers {missing[:20]} of {numbers[-1] + 1}.")
    attention = {number: _attention_kind(names[number]) for number in numbers}
    mlp = {number: _mlp_kind(names[number]) for number in numbers}
    single = any(attention[number] is None or mlp[number] is None for number in numbers)
    hybrid = pattern_of(run.args or {}) is not None or (single and Key(OUTER, "decoder.final_norm.weight") in run.keys)
    if hybrid:
        wrong = [n for n in numbers if (attention[n] is None) != (n % 2 == 1) or (mlp[n] is None) != (n % 2 == 0)]
        if wrong or len(numbers) % 2:
            raise CheckpointError(
                f"{run.folder}: a hybrid stack must alternate attention and MLP to have a published layout; "
                f"layers {wrong[:10] or numbers[-1:]} do not."
            )
        pairs = [(number, number + 1) for number in numbers[::2]]
    else:
        wrong = [number for number in numbers if attention[number] is None or mlp[number] is None]
        if wrong:
            raise CheckpointError(
                f"{run.folder}: no attention (KDA or MLA) or no MLP that is known in layers {wrong[:10]}; "
                f"layer {wrong[0]} holds {sorted(names[wrong[0]])[:10]}."
            )
        pairs = [(number, number) for number in numbers]
    places = tuple((Place("layer", one), Place("layer", other)) for one, other in pairs)
    return Stack(
        hybrid, places, tuple(str(attention[one]) for one, _ in pairs), tuple(str(mlp[other]) for _, other in pairs)
    )


def _attention_kind(names: set[str]) -> str | None:
    if any(
        name.startswith((A + "in_proj.", A + "A_log", A + "dt_bias", A + "conv1d.", A + "beta_proj")) for name in names
    ):
        return "kda"
    return "mla" if any(name.startswith((A + "linear_kv_", A + "linear_qkv_down_proj.")) for name in names) else None


def _mlp_kind(names: set[str]) -> str | None:
    if any(name.startswith(("mlp.router.", "mlp.experts.")) for name in names):
        return "moe"
    return "dense" if any(name.startswith("mlp.linear_fc") and "norm" not in name for name in names) else None


def facts_of(run: Run, stack: Stack, config: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Source -> fields of the configuration that it states, the most trusted first.

    **Raises:** `CheckpointError` for arguments that have no published layout.
    """
    sources: dict[str, dict[str, Any]] = {}
    if config is not None:
        sources["the configuration given"] = fields_of_published(config)
    if run.args is not None:
        try:
            sources["its arguments"] = fields_of_args(run.args)
        except CheckpointError as error:
            raise CheckpointError(f"{run.folder}: {error}") from None
    sources["its tensors"] = _certain(run, stack)
    known = {name for fields in sources.values() for name in fields}
    if known - set(sources["its tensors"]):  # something says what model it is
        told = {name: value for name, value in _from_shapes(run, stack).items() if name not in known}
        if "vocab_size" not in known and run.args and (rows := embedding_rows(run)):
            told["vocab_size"] = rows
            run.notes.append(
                f"The true size of the vocabulary is not stored; all {rows} rows are kept, padding included. "
                "Give vocab_size with --config to cut it."
            )
        sources["the shapes of its tensors"] = told
    return sources


def _certain(run: Run, stack: Stack) -> dict[str, Any]:
    """What names alone tell, and arguments must agree with."""
    has = lambda name, run=run: any(key.name == name for key in run.keys)
    facts: dict[str, Any] = {
        "layer_kinds": stack.layer_kinds,
        "mlp_kinds": stack.mlp_kinds,
        "tie_word_embeddings": Key(OUTER, "output_layer.weight") not in run.keys,
    }
    if (run.args or {}).get("untie_embeddings_and_output_weights") is False:
        del facts["tie_word_embeddings"]  # a last pipeline stage stores its copy of the embedding under that name
    if "kda" in stack.layer_kinds:
        low = has(A + "f_b_proj.weight")
        facts |= dict.fromkeys(("kda_decay_gate", "kda_output_gate"), "low_rank" if low else "direct")
    return facts


def _from_shapes(run: Run, stack: Stack) -> dict[str, Any]:
    """Sizes that can be read off the parameters, for what nothing else states."""

    shapes = {key.name: shape for key, shape in sorted(run.shapes.items(), key=lambda item: str(item[0]))}
    find = shapes.get
    facts: dict[str, Any] = {}

    def read(field: str, axis: int, *names: str) -> int | None:
        shape = next((found for name in names if (found := find(name))), None)
        if shape is not None and len(shape) > axis:
            facts[field] = shape[axis]
            return shape[axis]
        return None

    read("hidden_size", 1, "embedding.word_embeddings.weight")
    read("intermediate_size", 1, "mlp.linear_fc2.weight")
    read("linear_num_heads", 0, A + "A_log")
    read("linear_head_dim", 0, A + "out_norm.weight", A + "o_norm.weight")
    conv = find(A + "conv1d.weight") or find(A + "conv1d.weight.query") or find(A + "q_conv1d.weight")
    if conv:
        facts["linear_conv_kernel_dim"] = conv[-1]
    rank = read("kv_lora_rank", 0, A + "linear_kv_up_proj.layer_norm_weight", A + "kv_layernorm.weight")
    down = find(A + "linear_kv_down_proj.weight")
    if rank is not None and down and run.parallel.get("TP", 1) == 1:
        facts["qk_rope_head_dim"] = down[0] - rank
    if read("q_lora_rank", 0, A + "linear_q_up_proj.layer_norm_weight", A + "q_layernorm.weight") is None:
        facts["q_lora_rank"] = None
    if "moe" not in stack.mlp_kinds:
        return facts | {"num_experts": 0}
    read("num_experts", 0, "mlp.router.weight")
    width = read("moe_intermediate_size", 1, "mlp.experts.linear_fc2.weight")
    shared = find("mlp.shared_experts.linear_fc2.weight")
    if width and shared and shared[1] % width == 0:
        facts["num_shared_experts"] = shared[1] // width
    return facts
