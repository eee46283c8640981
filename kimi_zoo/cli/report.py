"""A checkpoint's summary as text for people and as JSON for scripts."""

import json
import textwrap
from typing import Any

from kimi_zoo.checkpoints.safetensors_header import DTYPE_NAMES
from kimi_zoo.checkpoints.summary import LOADED_FAMILIES, Layer, Summary
from kimi_zoo.cli.terminal import byte_text, table

MIXER_LETTERS = {"kda": "k", "mla": "m", "attention": "a", "none": "-"}
MIXER_NAMES = {"kda": "KDA", "mla": "MLA", "attention": "other attention", "none": "no attention"}
MLP_NAMES = {"dense": "dense MLP", "moe": "mixture of experts", "none": "nothing"}

CONFIG_FIELDS = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads q_lora_rank kv_lora_rank "
    "qk_nope_head_dim qk_rope_head_dim v_head_dim mla_use_nope linear_num_heads linear_head_dim "
    "linear_conv_kernel_dim num_experts n_routed_experts num_experts_per_token num_experts_per_tok "
    "moe_intermediate_size num_shared_experts n_shared_experts routed_scaling_factor tie_word_embeddings "
    "rms_norm_eps model_max_length max_position_embeddings"
).split()
LINEAR_FIELDS = ("num_heads", "head_dim", "short_conv_kernel_size")


def symbol(layer: Layer) -> str:
    """The letter of a layer."""
    letter = MIXER_LETTERS[layer.mixer]
    return letter.upper() if layer.mlp == "dense" else letter


def as_json(summary: Summary, *, tensors: bool) -> dict[str, Any]:
    """The summary as JSON; `docs/cli.md` describes the keys."""
    memory = summary.memory
    out: dict[str, Any] = {
        "path": str(summary.path),
        "format": summary.format,
        "run": summary.run,
        "model_type": summary.model_type,
        "loaded": summary.loaded,
        "config": summary.config,
        "quantization": summary.quantization,
        "files": [{"name": name, "bytes": nbytes} for name, nbytes in summary.files.items()],
        "companions": list(summary.companions),
        "pattern": " ".join(map(symbol, summary.layers)),
        "layers": [{"mixer": this.mixer, "mlp": this.mlp, "experts": this.experts} for this in summary.layers],
        "parameters": {"total": summary.parameters, "active": summary.active},
        "routing": None if summary.routing is None else dict(zip(("chosen", "experts"), summary.routing, strict=True)),
        "parts": [{"name": p.name, "parameters": p.parameters, "bytes": p.nbytes} for p in summary.parts],
        "dtypes": {name: {"tensors": count, "bytes": size} for name, (count, size) in summary.dtypes.items()},
        "memory_per_sequence": None
        if memory is None
        else {
            "kda_state_bytes": memory.kda_states,
            "kda_window_bytes": memory.kda_windows,
            "mla_bytes_per_token": memory.mla_per_token,
        },
        "notes": list(summary.notes),
    }
    if tensors:
        out["tensors"] = [
            {
                "name": i.name,
                "dtype": DTYPE_NAMES.get(i.dtype, str(i.dtype)),
                "shape": list(i.shape),
                "bytes": i.nbytes,
                "file": i.file.name,
            }
            for i in summary.tensors
        ]
    return out


def sections(summary: Summary, width: int | None, *, tensors: bool) -> list[str]:
    """The parts of the text report."""
    out = [heading(summary), run_text(summary, width), pattern(summary, width), parts_table(summary)]
    out += [dtypes_table(summary), memory(summary), config_text(summary, width), files(summary)]
    if tensors:
        rows = [
            (i.name, DTYPE_NAMES.get(i.dtype, str(i.dtype)), "x".join(map(str, i.shape)) or "scalar", f"{i.nbytes:,}")
            for i in summary.tensors
        ]
        out.append(table(("Tensor", "dtype", "shape", "bytes"), rows, width=width))
    if summary.notes:
        wrapped = (textwrap.fill(f"! {note}", width or 100, subsequent_indent="  ") for note in summary.notes)
        out.append("\n".join(wrapped))
    return [text for text in out if text]


def heading(summary: Summary) -> str:
    """What it is, and how large."""
    family = LOADED_FAMILIES.get(summary.model_type or "", "unknown family")
    kind = family if summary.model_type is None else f"{family} (model_type {summary.model_type})"
    stored = "" if summary.format == "safetensors" else f"  {summary.format}"
    lines = [
        str(summary.path) + stored,
        f"  {kind}" + (f", quantised: {summary.quantization}" if summary.quantization else ""),
    ]
    if summary.parameters is not None:
        active = f", {summary.active:,} active per token" if summary.active not in (None, summary.parameters) else ""
        lines.append(f"  {summary.parameters:,} parameters{active}")
    if summary.routing is not None:
        chosen, experts = summary.routing
        lines.append(f"  {chosen} of {experts} experts per token")
    stored = sum(nbytes for _, nbytes in summary.dtypes.values())
    lines.append(f"  {len(summary.tensors)} tensors, {byte_text(stored)}")
    return "\n".join(lines)


# arguments of a Megatron run that say how it trained; those that describe the model are shown as its configuration
RUN_ARGS = (
    "num_layers hidden_size padded_vocab_size tensor_model_parallel_size params_dtype bf16 fp16 fp8 kda_disable_fp8 "
    "sequence_parallel optimizer lr consumed_train_samples transformer_impl hybrid_layer_pattern"
).split()


def run_text(summary: Summary, width: int | None) -> str:
    """What a Megatron run says of itself."""
    if summary.run is None:
        return ""
    run = summary.run
    split = ", ".join(f"{name} {size}" for name, size in (run.get("parallel") or {}).items())
    lines = [f"Run: iteration {run.get('iteration')}, {split or 'ranks not stated'}"]
    args = run.get("args") or {}
    shown = [f"{name}\xa0{json.dumps(args[name])}" for name in RUN_ARGS if args.get(name) is not None]
    if shown:
        filled = textwrap.fill(", ".join(shown), (width or 100) - 2, break_long_words=False)
        lines.append(textwrap.indent(filled.replace("\xa0", " "), "  "))
    lines += [f"  beside the weights: {count} {what}" for what, count in (run.get("left_out") or {}).items()]
    return "\n".join(lines)


def pattern(summary: Summary, width: int | None) -> str:
    """The layers as a line of letters, and what the letters mean."""
    if not summary.layers:
        return ""
    line = " ".join(map(symbol, summary.layers))
    counts: dict[str, tuple[Layer, int]] = {}
    for layer in summary.layers:
        counts[symbol(layer)] = (layer, counts.get(symbol(layer), (layer, 0))[1] + 1)
    legend = [
        f"  {letter}  {MIXER_NAMES[layer.mixer]}, then {MLP_NAMES[layer.mlp]}: {count} layer{'s' * (count != 1)}"
        for letter, (layer, count) in counts.items()
    ]
    drawn = "  " + line if width is None else textwrap.indent(textwrap.fill(line, width - 2), "  ")
    return "\n".join([f"{len(summary.layers)} layers", drawn, *legend])


def parts_table(summary: Summary) -> str:
    """Parameters and bytes of each part."""
    total = summary.parameters or 0
    rows = []
    for part in summary.parts:
        count = "unknown" if part.parameters is None else f"{part.parameters:,}"
        share = f"{100 * part.parameters / total:.1f} %" if part.parameters is not None and total else ""
        rows.append((part.name, count, share, byte_text(part.nbytes)))
    return table(("Part", "parameters", "share", "stored"), rows)


def dtypes_table(summary: Summary) -> str:
    """Tensors and bytes of each dtype."""
    rows = [(name, f"{count:,}", byte_text(nbytes)) for name, (count, nbytes) in summary.dtypes.items()]
    return table(("dtype", "tensors", "stored"), rows)


def memory(summary: Summary) -> str:
    """What a sequence takes beside the weights."""
    found = summary.memory
    if found is None:
        return ""
    lines = ["Memory per sequence, in the stored dtype"]
    if found.kda_states:
        windows = f" and {byte_text(found.kda_windows)} of convolution windows" if found.kda_windows else ""
        lines.append(f"  KDA  {byte_text(found.kda_states)} of float32 states{windows}, whatever its length")
    if found.mla_per_token:
        text = summary.config.get("text_config") or summary.config
        longest = text.get("model_max_length") or text.get("max_position_embeddings")
        at = f", {byte_text(found.mla_per_token * longest)} at {longest:,} tokens" if isinstance(longest, int) else ""
        lines.append(f"  MLA  {byte_text(found.mla_per_token)} of latents per token{at}")
    return "\n".join(lines)


def config_text(summary: Summary, width: int | None) -> str:
    """The fields of the configuration that shape the model."""
    text = summary.config.get("text_config") or summary.config
    shown = {name: text[name] for name in CONFIG_FIELDS if text.get(name) is not None}
    inner = text.get("linear_attn_config")
    if isinstance(inner, dict):
        shown |= {f"linear_attn_config.{name}": inner[name] for name in LINEAR_FIELDS if name in inner}
    if not shown:
        return ""
    line = ", ".join(f"{name}\xa0{json.dumps(value)}" for name, value in shown.items())  # no line break between them
    filled = textwrap.fill(line, (width or 100) - 2, break_long_words=False)
    return "Configuration\n" + textwrap.indent(filled.replace("\xa0", " "), "  ")


def files(summary: Summary) -> str:
    """Weight files with their sizes, and the other files there are."""
    out = table(("File", "bytes"), [(name, f"{nbytes:,}") for name, nbytes in summary.files.items()])
    beside = list(summary.companions)
    if not {"tokenizer.json", "tiktoken.model", "tokenizer.model"} & set(beside):
        beside.append("no tokenizer")
    if "generation_config.json" not in beside:
        beside.append("no generation_config.json")
    return f"{out}\nbeside them: {', '.join(beside)}"
