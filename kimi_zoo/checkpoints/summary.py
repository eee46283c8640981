"""What a checkpoint holds, told from the headers of its files: layers, parameters, dtypes, sizes, memory per sequence.

Loads no weights and needs no JAX. Layers are told from the names and shapes of tensors, so that families which this
package has no model for are understood as far as they are made of the same parts.
"""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kimi_zoo.checkpoints.configs import parse_config
from kimi_zoo.checkpoints.files import CheckpointError, list_some, read_json
from kimi_zoo.checkpoints.megatron_run import Run, open_run
from kimi_zoo.checkpoints.pickles import UnsafePickle
from kimi_zoo.checkpoints.published_output import run_facts
from kimi_zoo.checkpoints.quantized import dequantize
from kimi_zoo.checkpoints.safetensors import AbstractCheckpoint, TensorInfo, open_checkpoint
from kimi_zoo.checkpoints.safetensors_header import DTYPE_NAMES
from kimi_zoo.checkpoints.sources import Opened, PublishedTensors, open_source, published_config, recognise_other

LOADED_FAMILIES = {"kimi_linear": "Kimi Linear"}
"""`model_type` of each family that can be loaded -> its name."""

PARTS: tuple[str, ...] = (
    "embedding",
    "KDA",
    "MLA",
    "other attention",
    "routed experts",
    "shared experts",
    "router",
    "dense MLP",
    "norms",
    "output head",
    "next-token prediction",
    "vision",
    "other",
)
NOT_RUN = ("next-token prediction", "vision")  # beside the path of a token through the language model

COMPANIONS = (
    "tokenizer.json tiktoken.model tokenizer.model tokenizer_config.json chat_template.jinja generation_config.json "
    "README.md"
).split()

_VISION = re.compile(r"(.*\.)?(vision_tower|visual|vision_model|mm_projector|multi_modal_projector)\..*")
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.(.+)")
_MIXER = re.compile(r"(self_attn|attention|linear_attn)\.(.+)")
_EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\..*")
_ROUTER = re.compile(r"(mlp|block_sparse_moe)\.gate\..*")

Mixer = Literal["kda", "mla", "attention", "none"]
MLP = Literal["dense", "moe", "none"]
_MIXER_PARTS = {"kda": "KDA", "mla": "MLA", "attention": "other attention", "none": "other"}


@dataclass(frozen=True)
class Layer:
    """One layer: how it mixes tokens, and what follows."""

    mixer: Mixer
    mlp: MLP
    experts: int


@dataclass(frozen=True)
class Part:
    """All tensors of one kind: how many plain weights, `None` if that cannot be told, and the bytes stored."""

    name: str
    parameters: int | None
    nbytes: int


@dataclass(frozen=True)
class SequenceMemory:
    """What a model remembers of one sequence, in bytes: states (float32) and convolution windows of KDA, fixed; latents
    of MLA, per token. `None` if the tensors do not tell."""

    kda_states: int
    kda_windows: int
    mla_per_token: int


@dataclass(frozen=True)
class Summary:
    """What `summarize` found.

    - `format`: of the files. `run`: what a Megatron run says of itself (iteration, parallelism, arguments).
    - `config`, `model_type`: the whole `config.json`, empty if there is none; the family it names.
    - `loaded`: whether this package has a model for the family.
    - `files`: bytes on disk of every weight file; `companions`: other files of use that are there.
    - `layers`: in order, without those of next-token prediction.
    - `parameters`, `active`: in all; for one token, which leaves out the experts it is not routed to and `NOT_RUN`.
    - `routing`: experts per token, and how many there are.
    - `dtypes`: stored dtype -> tensors, bytes.
    - `quantization`: the method that `config.json` names.
    - `notes`: what could not be understood, a sentence each.
    """

    path: Path
    format: str
    run: dict[str, Any] | None
    config: dict[str, Any]
    model_type: str | None
    loaded: bool
    files: dict[str, int]
    companions: tuple[str, ...]
    layers: tuple[Layer, ...]
    parts: tuple[Part, ...]
    parameters: int | None
    active: int | None
    routing: tuple[int, int] | None
    dtypes: dict[str, tuple[int, int]]
    quantization: str | None
    memory: SequenceMemory | None
    notes: tuple[str, ...]
    tensors: tuple[TensorInfo, ...]


def summarize(path: str | Path) -> Summary:
    """Reads the headers of a checkpoint in any format, and `config.json` beside it or the arguments within it.

    **Raises:** `CheckpointError` if the files are not a checkpoint that `open_checkpoint` accepts.
    """
    path = Path(path)
    with _open(path) as found:
        stored, config = found.stored, found.config
        inner = config.get("text_config")
        text = inner if isinstance(inner, dict) else config
        model_type = config.get("model_type") if isinstance(config.get("model_type"), str) else None
        plain, problem = _plain_tensors(stored, config)
        every = _layers(plain or stored.tensors)
        count = _count(text, "num_hidden_layers")
        layers = every if count is None else {number: layer for number, layer in every.items() if number < count}
        parts = _parts(stored.tensors, plain, layers)
        routing = _routing(text, layers)
        notes = [*_family_notes(config, model_type), *([problem] if problem else []), *found.notes]
        if count is not None and len(layers) != count:
            notes.append(f"config.json says {count} layers; tensors of {len(layers)} of them are here.")
        predicted = _count(text, "num_nextn_predict_layers") or 0
        if model_type in LOADED_FAMILIES and count is not None and len(every) > count + predicted:
            beyond = f" and {predicted} for next-token prediction" if predicted else ""
            notes.append(f"Tensors of {len(every)} layers are here; config.json says {count}{beyond}.")
        if routing is None and any(layer.mlp == "moe" for layer in layers.values()):
            notes.append("How many experts a token uses is not known, so neither is the number of active parameters.")
        total = None if plain is None else sum(math.prod(info.shape) for info in plain.values())
        return Summary(
            path=path,
            format=found.format,
            run=found.run,
            config=config,
            model_type=model_type,
            loaded=model_type in LOADED_FAMILIES,
            files=found.files,
            companions=tuple(name for name in COMPANIONS if (found.folder / name).is_file()),
            layers=tuple(layers.values()),
            parts=parts,
            parameters=total,
            active=_active(plain, layers, parts, routing),
            routing=routing,
            dtypes=_dtypes(stored),
            quantization=_quantization(config),
            memory=None if plain is None else _memory(plain, layers),
            notes=tuple(notes),
            tensors=tuple(stored.tensors.values()),
        )


@dataclass(frozen=True)
class _Found:
    """A checkpoint of any format, as far as it is understood."""

    format: str
    folder: Path
    config: dict[str, Any]
    stored: AbstractCheckpoint
    files: dict[str, int]
    run: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()


@contextmanager
def _open(path: Path) -> Iterator[_Found]:
    kind = recognise_other(path)
    if kind is None:
        folder = path if path.is_dir() else path.parent
        config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
        with open_checkpoint(path) as stored:
            files = {file.name: file.stat().st_size for file in stored.files}
            yield _Found("safetensors", folder, config, stored, files)
        return
    try:
        with open_source(path) as opened:
            run = None if opened.megatron is None else run_facts(opened.megatron)
            known = opened.config is not None or opened.raw is not None
            config, notes = published_config(opened) if known else {}, tuple(opened.notes)
            yield _Found(opened.detail, opened.folder, config, PublishedTensors(opened), opened.files, run, notes)
        return
    except UnsafePickle:
        raise
    except CheckpointError as error:
        if kind != "megatron":
            raise
        problem = error
    run = open_run(path)  # what cannot be converted can be looked at all the same
    opened = Opened(path, kind, f"Megatron {run.kind}", run.shown, run.files, None, None, run.folder)
    yield _Found(
        opened.detail, run.folder, {}, PublishedTensors(opened), run.files, _facts(run),
        (f"This checkpoint cannot be converted as it is: {problem}",),
    )  # fmt: skip


def _facts(run: Run) -> dict[str, Any]:
    """What a run says of itself when its model is not understood."""
    return {
        "format": run.kind,
        "iteration": run.iteration,
        "parallel": run.parallel,
        "left_out": run.left_out,
        "args": run.args,
    }


def _family_notes(config: Mapping[str, Any], model_type: str | None) -> list[str]:
    if not config:
        return ["There is no config.json beside the weights, so the family is not known."]
    if model_type not in LOADED_FAMILIES:
        known = ", ".join(LOADED_FAMILIES)
        return [f"model_type {model_type!r} is not a family that this version loads (it loads: {known})."]
    try:
        parse_config(config, complete=True)
    except ValueError as error:
        return [f"This version does not load it: {' '.join(str(error).split())}"]
    return []


def _plain_tensors(
    stored: AbstractCheckpoint, config: Mapping[str, Any]
) -> tuple[Mapping[str, TensorInfo] | None, str | None]:
    """The tensors as a model has them, dequantised; or `None` and the reason why they cannot be told."""
    try:
        tensors = dequantize(stored, config).tensors
    except CheckpointError as error:
        return None, f"How the weights are quantised is not understood, so parameters are not counted. {error}"
    packed = [name for name, info in tensors.items() if info.dtype.kind in "iu" and len(info.shape) > 1]
    if packed:
        return None, (
            "Some weights are stored as integers in a way that is not understood, so parameters are not counted: "
            f"{list_some(packed, 3)}."
        )
    return tensors, None


def _quantization(config: Mapping[str, Any]) -> str | None:
    text = config.get("text_config") or {}
    found = config.get("quantization_config") or config.get("quantization") or text.get("quantization_config")
    if not isinstance(found, Mapping):
        return None
    named = [str(found[key]) for key in ("quant_method", "format", "fmt", "mode") if key in found]
    return ", ".join(named or [f"{found['bits']} bits" if "bits" in found else "unnamed"])


def _count(config: Mapping[str, Any], *names: str) -> int | None:
    """The first of these fields that holds a whole number."""
    values = (config.get(name) for name in names)
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), None)


def _layers(names: Mapping[str, TensorInfo]) -> dict[int, Layer]:
    """Number -> layer, in order, told from what the tensors of each are called."""
    below: dict[int, dict[str, TensorInfo]] = {}
    for name, info in names.items():
        match = None if _VISION.fullmatch(name) else _LAYER.fullmatch(name)
        if match:
            below.setdefault(int(match[1]), {})[match[2]] = info
    return {number: _layer(tensors) for number, tensors in sorted(below.items())}


def _layer(tensors: Mapping[str, TensorInfo]) -> Layer:
    mixers = {match[2] for name in tensors if (match := _MIXER.fullmatch(name))}
    leaves = {name.split(".")[0] for name in mixers}
    mixer: Mixer = "attention" if mixers else "none"
    if "A_log" in leaves and leaves & {"f_proj", "f_a_proj"}:
        mixer = "kda"
    elif "kv_a_proj_with_mqa" in leaves:
        mixer = "mla"
    numbers = {match[1] for name in tensors if (match := _EXPERT.fullmatch(name))}
    stacked = [info.shape[0] for name, info in tensors.items() if ".experts." in name and len(info.shape) == 3]
    experts = len(numbers) or max(stacked, default=0)
    dense = any(re.match(r"(mlp|block_sparse_moe)\.", name) for name in tensors)
    return Layer(mixer, "moe" if experts else "dense" if dense else "none", experts)


def _part_of(name: str, layers: Mapping[int, Layer]) -> str:
    """Which of `PARTS` a tensor belongs to."""
    if _VISION.fullmatch(name):
        return "vision"
    match = _LAYER.fullmatch(name)
    if match is None:
        return _outer_part(name)
    number, below = int(match[1]), match[2]
    if number not in layers:
        return "next-token prediction"
    layer = layers[number]
    if _MIXER.fullmatch(below):
        return _MIXER_PARTS[layer.mixer]
    if ".experts." in below:
        return "routed experts"
    if ".shared_expert" in below:
        return "shared experts"
    if _ROUTER.fullmatch(below):
        return "router"
    if "norm" in below:
        return "norms"
    return "dense MLP" if layer.mlp == "dense" and below.startswith(("mlp.", "block_sparse_moe.")) else "other"


def _outer_part(name: str) -> str:
    """The part of a tensor outside the layers."""
    for part, words in (
        ("embedding", ("embed_tokens", "word_embeddings")),
        ("output head", ("lm_head",)),
        ("norms", ("norm",)),
    ):
        if any(word in name for word in words):
            return part
    return "other"


def _parts(
    stored: Mapping[str, TensorInfo], plain: Mapping[str, TensorInfo] | None, layers: Mapping[int, Layer]
) -> tuple[Part, ...]:
    nbytes = dict.fromkeys(PARTS, 0)
    for name, info in stored.items():
        nbytes[_part_of(name, layers)] += info.nbytes
    parameters = dict.fromkeys(PARTS, 0)
    for name, info in (plain or {}).items():
        parameters[_part_of(name, layers)] += math.prod(info.shape)
    present = {_part_of(name, layers) for name in stored}
    return tuple(
        Part(name, None if plain is None else parameters[name], nbytes[name]) for name in PARTS if name in present
    )


def _routing(config: Mapping[str, Any], layers: Mapping[int, Layer]) -> tuple[int, int] | None:
    experts = max((layer.experts for layer in layers.values()), default=0)
    chosen = _count(config, "num_experts_per_token", "num_experts_per_tok")
    return (chosen, experts) if experts and chosen is not None and 0 < chosen <= experts else None


def _active(
    plain: Mapping[str, TensorInfo] | None,
    layers: Mapping[int, Layer],
    parts: tuple[Part, ...],
    routing: tuple[int, int] | None,
) -> int | None:
    """Parameters that one token uses."""
    sparse = any(layer.mlp == "moe" for layer in layers.values())
    if plain is None or (sparse and routing is None):
        return None
    chosen, experts = routing or (1, 1)
    count = {part.name: part.parameters or 0 for part in parts}
    routed = count.get("routed experts", 0)
    return sum(count.values()) - sum(count.get(part, 0) for part in NOT_RUN) - routed + routed * chosen // experts


def _dtypes(stored: AbstractCheckpoint) -> dict[str, tuple[int, int]]:
    out: dict[str, tuple[int, int]] = {}
    for info in stored.tensors.values():
        name = DTYPE_NAMES.get(info.dtype, str(info.dtype))
        tensors, nbytes = out.get(name, (0, 0))
        out[name] = (tensors + 1, nbytes + info.nbytes)
    return dict(sorted(out.items(), key=lambda item: -item[1][1]))


def _memory(plain: Mapping[str, TensorInfo], layers: Mapping[int, Layer]) -> SequenceMemory | None:
    """Told from shapes: `A_log` has one value per head, `dt_bias` one per key channel, `v_proj` a row per value
    channel, a convolution `width` taps per channel, `kv_a_proj_with_mqa` a row per number that is cached."""
    states = windows = per_token = 0
    embedding = next((info for name, info in plain.items() if _part_of(name, layers) == "embedding"), None)
    for name, info in plain.items():
        match = _LAYER.fullmatch(name)
        if match is None or int(match[1]) not in layers or _VISION.fullmatch(name):
            continue
        kind, leaf = layers[int(match[1])].mixer, match[2].removesuffix(".weight").split(".")[-1]
        width = (embedding or info).dtype.itemsize
        if kind == "kda" and leaf == "A_log":
            beside = lambda other, name=name: plain.get(name.removesuffix("A_log") + other)
            key, value = beside("dt_bias"), beside("v_proj.weight")
            if key is None or value is None:
                return None
            states += math.prod(key.shape) * value.shape[0] // math.prod(info.shape) * 4
        elif kind == "kda" and leaf.endswith("_conv1d"):
            windows += info.shape[0] * (info.shape[-1] - 1) * width
        elif kind == "mla" and leaf == "kv_a_proj_with_mqa":
            per_token += info.shape[0] * width
    return SequenceMemory(states, windows, per_token) if states or per_token else None
