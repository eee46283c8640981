"""Writing Megatron checkpoints: the table read from right to left, and cut for any number of ranks."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kimi_zoo.checkpoints import megatron_dist_saving as dist
from kimi_zoo.checkpoints import megatron_legacy_saving as legacy
from kimi_zoo.checkpoints.blocks import Blocks
from kimi_zoo.checkpoints.files import CheckpointError, atomic_file, join_problems, read_json
from kimi_zoo.checkpoints.megatron import open_megatron
from kimi_zoo.checkpoints.megatron_args import PARALLEL, args_of_config
from kimi_zoo.checkpoints.megatron_layout import MegatronLayout, Parameter, Settled, settle
from kimi_zoo.checkpoints.megatron_names import OUTER, Key, Place
from kimi_zoo.checkpoints.megatron_run import TRACKER, open_run
from kimi_zoo.checkpoints.published_output import RUN_FILE, run_facts
from kimi_zoo.checkpoints.sources import Opened, dtype_of
from kimi_zoo.checkpoints.tables import megatron as table
from kimi_zoo.checkpoints.tables.kimi_linear import adapt_config
from kimi_zoo.checkpoints.tables.megatron import EXPERT, Row, Variant, dimensions, sized
from kimi_zoo.checkpoints.torch_saving import torch_dtype
from kimi_zoo.checkpoints.watch import Watch
from kimi_zoo.models.kimi_linear_config import KimiLinearConfig


class MegatronOutput:
    """A checkpoint in one of Megatron's formats; see `convert.Output`."""

    same_names = False

    def __init__(self, opened: Opened, layout: MegatronLayout | None, like: Path | None, keep_prediction: bool):
        if opened.config is None:
            raise CheckpointError(
                f"{opened.path} has no config.json of a Kimi Linear model, whose names Megatron's are made from."
            )
        self.opened, self.config = opened, adapt_config(opened.config, opened.tensors)
        facts = _facts(opened, like)
        self.settled = settle(layout or MegatronLayout(), facts, self.config)
        if facts.get("format") == "fsdp_dtensor" and (layout is None or layout.format is None):
            opened.notes.append("The model was fsdp_dtensor, which is not written; it becomes torch_dist.")
        self.args = _args(facts, self.config, self.settled, opened.tensors)
        self.parameters = tuple(_parameters(opened, self.config, self.settled, keep_prediction))
        self.target = _describe(self.settled)
        writer = legacy if self.settled.format == "legacy" else dist
        self.writer = writer.Writer(self.settled, self.parameters, self.config.num_hidden_layers)

    def files(self) -> dict[str, int]:
        """Weight files and the bytes of their tensors."""
        return self.writer.files()

    def write(self, folder: Path, file: str, watch: Watch) -> dict[str, Any]:
        """Writes one rank's file."""
        return self.writer.write(folder / file, file, watch, self.args)

    def finish(self, folder: Path, facts: Mapping[str, Mapping[str, Any]]) -> None:
        """Writes what says where everything is, and that it is there."""
        self.writer.finish(folder / self.settled.folder, facts, self.args)
        with atomic_file(folder / TRACKER) as tracker:
            tracker.write((str(self.settled.iteration) if self.settled.iteration else "release").encode())

    def tensors(self, folder: Path) -> dict[str, Blocks]:
        """What lies there now, in published names, read as any Megatron checkpoint is."""
        found = open_megatron(folder)
        return {**found.tensors, **found.prediction}

    def originals(self) -> dict[str, Blocks]:
        """What should lie there."""
        expected = published_shapes(self.config)
        kept = {name for parameter in self.parameters for name in _published_names(parameter, self.config)}
        return {n: t for n, t in normalised(self.opened.tensors, self.config).items() if n in kept or n in expected}


def _describe(settled: Settled) -> str:
    split = ", ".join(f"{name.upper()} {getattr(settled, name)}" for name in ("tp", "pp", "ep", "etp", "vpp"))
    return f"Megatron {settled.format}, {'hybrid' if settled.hybrid else 'GPT'} stack, {split}"


def _facts(opened: Opened, like: Path | None) -> dict[str, Any]:
    """What is known of a run: that of `like`, else of the source, else what was written when it left Megatron."""
    if like is not None:
        try:
            return run_facts(open_megatron(like))
        except CheckpointError:
            run = open_run(like)
            return {"format": run.kind, "iteration": run.iteration, "parallel": run.parallel, "args": run.args}
    if opened.megatron is not None:
        return run_facts(opened.megatron)
    path = opened.folder / RUN_FILE
    return read_json(path) if path.is_file() else {}


_CARRIED_TEXT = ("torch.", "megatron.", "transformer_engine.")


def _args(
    facts: Mapping[str, Any], config: KimiLinearConfig, settled: Settled, tensors: Mapping[str, Blocks]
) -> dict[str, Any]:
    """The arguments of a run with this model and layout: those it had before, with what has changed."""
    before = facts.get("args") or {}
    plain = {n: v for n, v in before.items() if not (isinstance(v, str) and v.startswith(_CARRIED_TEXT))}
    sizes = {short: getattr(settled, short.lower(), 1) for short in PARALLEL.values()}
    sizes["VPP"] = settled.vpp if settled.vpp > 1 else None
    dtype = dtype_of(tensors)
    return plain | args_of_config(config, hybrid=settled.hybrid, stages=settled.pp * settled.vpp) | {
        **{name: sizes[short] for name, short in PARALLEL.items()},
        "padded_vocab_size": settled.padded_vocab,
        "make_vocab_size_divisible_by": settled.padded_vocab // settled.tp
        if settled.padded_vocab % (before.get("make_vocab_size_divisible_by") or 128)
        else before.get("make_vocab_size_divisible_by") or 128,
        "params_dtype": torch_dtype(dtype),
        "bf16": dtype.name == "bfloat16",
        "fp16": dtype.name == "float16",
        "ckpt_format": "torch" if settled.format == "legacy" else "torch_dist",
        "iteration": settled.iteration,
        "moe_grouped_gemm": settled.experts != "sequential",
        "moe_use_legacy_grouped_gemm": settled.experts == "grouped",
    }  # fmt: skip


def published_shapes(config: KimiLinearConfig) -> dict[str, tuple[int, ...]]:
    """Every published name of the model, and its usual shape."""
    sizes = dimensions(config)
    out: dict[str, tuple[int, ...]] = {}

    def add(rows: Iterable[Row], prefix: str) -> None:
        for row in rows:
            for expert in range(config.num_experts) if row.expert else (0,):
                for section in row.sections:
                    name = prefix + section.published.replace(EXPERT, str(expert))
                    out[name] = sized(section.published_shape or section.shape, sizes)

    add(table.outer_rows(config), "")
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        add(table.attention_rows(config, config.layer_kinds[layer]), prefix)
        add(table.mlp_rows(config, config.mlp_kinds[layer]), prefix)
    return out


def _published_names(parameter: Parameter, config: KimiLinearConfig) -> Iterator[str]:
    prefix = "" if parameter.key.place.kind == "outer" else f"model.layers.{parameter.layer}."
    for section in parameter.row.sections:
        yield prefix + section.published.replace(EXPERT, str(parameter.key.expert))


def normalised(tensors: Mapping[str, Blocks], config: KimiLinearConfig) -> dict[str, Blocks]:
    """Tensors in the usual published names and shapes, whichever spelling the files have."""
    sizes = dimensions(config)
    shapes = {
        section.published: sized(section.published_shape or section.shape, sizes)
        for row in (*table.OUTSIDE, *table.INSIDE)
        for section in row.sections
    }
    roots = ("language_model.", "")
    root = next(root for root in roots if root == "" or f"{root}model.embed_tokens.weight" in tensors)
    out = {}
    for name, tensor in tensors.items():
        name = name.removeprefix(root).replace(".block_sparse_moe.gate_proj", ".mlp.gate_proj")
        name = name.replace(".block_sparse_moe.up_proj", ".mlp.up_proj")
        name = name.replace(".block_sparse_moe.down_proj", ".mlp.down_proj")
        wanted = shapes.get(name.split(".", 3)[-1])
        if name.endswith((".A_log", ".dt_bias", "_conv1d.weight")) and wanted is not None:
            count = 1
            for size in wanted:
                count *= size
            if tensor.shape != wanted and count * tensor.dtype.itemsize == tensor.nbytes:
                tensor = tensor.reshaped(wanted)
        out[name] = tensor
    return out


def _parameters(
    opened: Opened, config: KimiLinearConfig, settled: Settled, keep_prediction: bool
) -> Iterator[Parameter]:
    """Every parameter of Megatron, made from published tensors.

    **Raises:** `CheckpointError` that lists missing, surplus and wrongly shaped tensors.
    """
    tensors = normalised(opened.tensors, config)
    maker = _Maker(tensors, config, settled)
    fused = settled.format == "legacy"  # a distributed checkpoint has these by themselves
    variant = Variant(
        fused and settled.names.get("in_proj") == "packed", fused and settled.names.get("down") == "joint"
    )
    layers = config.num_hidden_layers
    first, *last = table.outer_rows(config)
    maker.add((first,), OUTER, "", -1)
    for layer in range(layers):
        numbers = (2 * layer, 2 * layer + 1) if settled.hybrid else (layer, layer)
        prefix = f"model.layers.{layer}."
        attention, mlp = (Place("layer", number) for number in numbers)
        maker.add(table.attention_rows(config, config.layer_kinds[layer], variant), attention, prefix, layer)
        maker.add(table.mlp_rows(config, config.mlp_kinds[layer]), mlp, prefix, layer)
    maker.add(last, OUTER, "", layers)
    if keep_prediction:
        maker.add_prediction()
    maker.finish(opened, keep_prediction)
    return iter(maker.found)


class _Maker:
    """Takes published tensors, each once, and makes Megatron's parameters of them."""

    def __init__(self, tensors: Mapping[str, Blocks], config: KimiLinearConfig, settled: Settled):
        self.tensors, self.config, self.settled = tensors, config, settled
        self.sizes = dimensions(config)
        self.used: set[str] = set()
        self.problems: list[str] = []
        self.found: list[Parameter] = []

    def add(self, rows: Iterable[Row], place: Place, prefix: str, layer: int) -> None:
        for row in rows:
            for expert in range(self.config.num_experts) if row.expert else (None,):
                sections = [self.take(prefix + s.published.replace(EXPERT, str(expert)), s) for s in row.sections]
                name = self.name_of(row)
                taken = tuple(tensor for tensor in sections if tensor is not None)
                if len(taken) == len(sections):
                    self.found.append(Parameter(Key(place, name, expert), row, taken, layer))

    def name_of(self, row: Row) -> str:
        """The spelling to write."""
        known = self.settled.names.get(row.name)
        if row is table.FINAL_NORM:
            return row.names[1 if self.settled.hybrid else 0]
        return known if known in row.names else row.name

    def take(self, name: str, section: table.Section) -> Blocks | None:
        expected = sized(section.published_shape or section.shape, self.sizes)
        tensor = self.tensors.get(name)
        if tensor is None:
            self.problems.append(f"{name} is missing")
            return None
        self.used.add(name)
        if tensor.shape != expected:
            self.problems.append(f"{name} has shape {list(tensor.shape)}; expected {list(expected)}")
            return None
        return tensor.reshaped(sized(section.shape, self.sizes))

    def add_prediction(self) -> None:
        """Layers that follow the last one."""
        layers = self.config.num_hidden_layers
        numbers = {int(n.split(".")[2]) for n in self.tensors if n.startswith("model.layers.")}
        for number in sorted(n for n in numbers if n >= layers):
            prefix = f"model.layers.{number}."
            below = {name.removeprefix(prefix) for name in self.tensors if name.startswith(prefix)}
            kind = "kda" if "self_attn.A_log" in below else "mla"
            mlp = "moe" if "block_sparse_moe.gate.weight" in below else "dense"
            inner = Place("mtp", number - layers, 0)
            self.add(table.PREDICTION, Place("mtp", number - layers), prefix, number)
            self.add(table.attention_rows(self.config, kind), inner, prefix, number)
            self.add(table.mlp_rows(self.config, mlp), inner, prefix, number)

    def finish(self, opened: Opened, keep_prediction: bool) -> None:
        """Checks that nothing is missing and nothing is left."""
        left = sorted(set(self.tensors) - self.used)
        if self.config.tie_word_embeddings:
            left = [name for name in left if name != "lm_head.weight"]
        layers = self.config.num_hidden_layers
        after = [n for n in left if n.startswith("model.layers.") and int(n.split(".")[2]) >= layers]
        if after and not keep_prediction:
            opened.left_out["tensors of layers that predict one more token"] = len(after)
            left = sorted(set(left) - set(after))
        left = [name for name in left if not name.endswith("inv_freq")]
        self.problems += [f"{name} is not a tensor of this model that is known" for name in left]
        if self.problems:
            raise CheckpointError(f"{opened.path} cannot be converted:\n" + join_problems(self.problems))
