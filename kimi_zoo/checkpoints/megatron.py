"""Megatron checkpoints as named tensors in published layout: any of its formats, whatever it was split over.

`open_megatron` finds the newest iteration, reads what the run said about itself, derives the configuration, and maps
every parameter by the table in `tables/megatron.py`. No values are read.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from kimi_zoo.checkpoints.blocks import Blocks, Zeros, whole
from kimi_zoo.checkpoints.files import CheckpointError, join_problems, list_some
from kimi_zoo.checkpoints.megatron_args import ZERO_CENTERED, settle
from kimi_zoo.checkpoints.megatron_facts import Stack, facts_of, find_stack
from kimi_zoo.checkpoints.megatron_legacy import Legacy, join_parts
from kimi_zoo.checkpoints.megatron_names import OUTER, Key, Place, parse_name
from kimi_zoo.checkpoints.megatron_run import Run, open_run, unstacked
from kimi_zoo.checkpoints.megatron_sections import Misfit, cut_rank, join_ranks, trim
from kimi_zoo.checkpoints.tables import megatron as table
from kimi_zoo.checkpoints.tables.megatron import EXPERT, Row, Section, Variant, dimensions, sized
from kimi_zoo.models.kimi_linear_config import KimiLinearConfig


@dataclass
class Megatron:
    """A Megatron checkpoint, understood.

    - `run`: format, arguments, iteration, sizes of parallelism.
    - `config`: what model it is. `stack`: which physical layers make up which layer.
    - `tensors`: published name -> where its values are, in the order of the published files.
    - `spellings`: row -> the name found for it, where Megatron has several.
    - `prediction`: tensors of layers that predict one more token, in published names; not among `tensors`.
    - `left_out`: what -> how many tensors or entries were not converted. `notes`: what a user should know.
    """

    run: Run
    config: KimiLinearConfig
    stack: Stack
    tensors: dict[str, Blocks]
    spellings: dict[str, str]
    prediction: dict[str, Blocks]
    left_out: dict[str, int]
    notes: list[str] = field(default_factory=list)


def open_megatron(path: str | Path, *, config: Mapping[str, Any] | None = None) -> Megatron:
    """Opens a Megatron checkpoint: the folder that training saved to, or one iteration in it.

    **Arguments:** `config`: fields in published style that the checkpoint does not state.

    **Raises:** `CheckpointError` that lists everything found wrong; `UnsafePickle` for a pickle that is not harmless.
    """
    run = open_run(Path(path))
    if not run.keys:
        raise CheckpointError(f"{run.folder} holds no parameters of a model.")
    stack = find_stack(run)
    model = settle(str(run.folder), facts_of(run, stack, config))
    pool = _Pool(run, model)
    tensors = _published(pool, model, stack)
    prediction = _prediction(pool, model)
    pool.finish(model)
    if pool.stored.split_downs:
        pool.spellings["down_ranks"] = "split"
    notes = [*run.notes, *pool.notes, *(run.source.notes if isinstance(run.source, Legacy) else ())]
    _check_fp8(run, tensors)
    return Megatron(run, model, stack, tensors, pool.spellings, prediction, run.left_out, notes)


def _check_fp8(run: Run, tensors: Mapping[str, Blocks]) -> None:
    if not (run.args or {}).get("kda_disable_fp8"):
        return
    narrow = [n for n, t in tensors.items() if t.dtype.itemsize == 1 and ".self_attn." in n]
    if narrow:
        raise CheckpointError(
            f"{run.folder}: kda_disable_fp8 is set, but projections are stored in 8 bits: {list_some(narrow, 5)}."
        )


_DOWNS = tuple(row.name for row in table.INSIDE if row.replicable)


@runtime_checkable
class Stored(Protocol):
    """Parameters as they lie in the files; `split_downs`: whether MLA's down projections are split over ranks."""

    @property
    def split_downs(self) -> bool:
        """Whether they are."""
        ...

    def sections(self, key: Key, row: Row, sizes: Mapping[str, int], problems: list[str]) -> list[Blocks] | None:
        """The sections of a parameter over the whole model; `None` with a reason in `problems`."""
        ...


class _Dist:
    """Parameters that are stored whole, `ranks` being those that they were split over."""

    def __init__(self, tensors: Mapping[Key, Blocks], ranks: int):
        self.tensors, self.ranks = tensors, ranks
        self.split_downs = any(len(t.blocks) > 1 for key, t in tensors.items() if key.name in _DOWNS)

    def sections(self, key: Key, row: Row, sizes: Mapping[str, int], problems: list[str]) -> list[Blocks] | None:
        tensor = self.tensors[key]
        ranks = self.ranks if _by_rank(tensor, row, self.ranks) else 1
        parts = tensor.cut(0, [tensor.shape[0] // ranks] * ranks) if ranks > 1 else [tensor]
        try:
            sections = [cut_rank(part, row, sizes, ranks)[0] for part in parts]
            return join_ranks(sections, row.axis) if ranks > 1 else sections[0]
        except Misfit as error:
            problems.append(f"{key} {error}")
            return None


def _by_rank(tensor: Blocks, row: Row, ranks: int) -> bool:
    """Whether a fused projection of attention has what ranks hold one after another, each with its share of every
    section. So does a module that says nothing of its sections; one that does stores chunks that end with them."""
    if ranks == 1 or row.axis != 0 or len(row.sections) == 1 or not row.name.startswith("self_attention."):
        return False
    length = tensor.shape[0] // ranks
    return {(block.offset[0], block.shape[0]) for block in tensor.blocks} == {
        (i * length, length) for i in range(ranks)
    }


class _Ranked:
    """Parameters that are stored in pieces, by rank."""

    def __init__(self, legacy: Legacy):
        self.legacy = legacy

    @property
    def split_downs(self) -> bool:
        return self.legacy.split_downs

    def sections(self, key: Key, row: Row, sizes: Mapping[str, int], problems: list[str]) -> list[Blocks] | None:
        return join_parts(self.legacy, key, row, sizes, problems)


def _stored(run: Run) -> Stored:
    if isinstance(run.source, Legacy):
        return _Ranked(run.source)
    return _Dist(run.source, run.parallel.get("TP", 1) if run.kind == "torch_dist" else 1)


class _Pool:
    """All parameters of a checkpoint, each of which is taken once."""

    def __init__(self, run: Run, config: KimiLinearConfig):
        self.run = run
        self.stored: Stored = _stored(run)
        self.sizes = dimensions(config)
        self.stored_sizes = _stored_sizes(run, self.sizes)
        self.used: set[Key] = set()
        self.spellings: dict[str, str] = {}
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.partial = False  # whether parameters may be missing
        self.trimmed: dict[str, tuple[int, int]] = {}
        self.plus_one = any((run.args or {}).get(name) for name in ZERO_CENTERED)
        if self.plus_one:
            self.notes.append(
                "Weights of normalisations are stored minus one; one is added in float32 and the sum rounded to the "
                "stored dtype."
            )

    def take(self, row: Row, place: Place, expert: int | None = None) -> list[Blocks] | None:
        """The tensors of a row, one per section, in published shapes; `None` if one is missing or does not fit."""
        parts = self._find(row, place, expert)
        if parts is None:
            return None
        out = []
        for section, part in zip(row.sections, parts, strict=True):
            tensor = trim(part, row, section.shape, self.sizes)
            if tensor.shape != part.shape:
                axis = row.axis or 0
                self.trimmed[row.name] = (part.shape[axis], tensor.shape[axis])
            expected = sized(section.shape, self.sizes)
            if tensor.shape != expected:
                self.problems.append(
                    f"{Key(place, row.name, expert)} ({section.published}) has shape {list(tensor.shape)}; "
                    f"expected {list(expected)}"
                )
                return None
            if self.plus_one and row.norm:
                tensor = tensor.mapped(_plus_one)
            shape = sized(section.published_shape or section.shape, self.sizes)
            out.append(tensor.reshaped(shape))
        return out

    def _find(self, row: Row, place: Place, expert: int | None) -> list[Blocks] | None:
        for name in row.names:
            key = Key(place, name, expert)
            if key in self.run.keys:
                self.spellings.setdefault(row.name, name)
                return self._sections(key, row)
        for name in row.names:
            if row.sections[0].tag and Key(place, name + row.sections[0].tag, expert) in self.run.keys:
                return self._pieces(row, [(section, (name + section.tag,)) for section in row.sections], place, expert)
        if row.sections[0].own and Key(place, row.sections[0].own[0]) in self.run.keys:
            return self._pieces(row, [(section, section.own) for section in row.sections], place, expert)
        if not self.partial:
            self.problems.append(f"{Key(place, row.name, expert)} is missing")
        return None

    def _pieces(
        self, row: Row, wanted: Iterable[tuple[Section, tuple[str, ...]]], place: Place, expert: int | None
    ) -> list[Blocks] | None:
        """Sections that are stored one by one."""
        out = []
        for section, names in wanted:
            key = next((Key(place, n, expert) for n in names if Key(place, n, expert) in self.run.keys), None)
            if key is None:
                self.problems.append(f"{Key(place, names[0] if names else row.name, expert)} is missing")
                return None
            found = self._sections(key, replace(row, names=(key.name,), sections=(section,)))
            if found is None:
                return None
            out += found
        return out

    def _sections(self, key: Key, row: Row) -> list[Blocks] | None:
        self.used.add(key)
        problems: list[str] = []
        for sizes in self.stored_sizes:
            found = self.stored.sections(key, row, sizes, problems)
            if found is not None:
                return found
        self.problems += problems[:1]
        return None

    def finish(self, config: KimiLinearConfig) -> None:
        """Checks that nothing is missing and nothing is left.

        **Raises:** `CheckpointError` that lists everything.
        """
        left = sorted(self.run.keys - self.used, key=str)
        if config.tie_word_embeddings:
            left = [key for key in left if key.name != table.HEAD.name]
        unknown = [f"{key} is not a parameter that is known" for key in left]
        unknown += [f"{name:.120} is not a parameter that is known" for name in self.run.unknown]
        if unknown:
            unknown.append(
                "The published layout has no tensors for parameters that are not known: merge adapters, remove what "
                "does not belong to the model, or give another checkpoint."
            )
        if problems := self.problems + unknown:
            raise CheckpointError(f"{self.run.folder} cannot be converted:\n" + join_problems(problems))
        for name, (stored, real) in self.trimmed.items():
            self.notes.append(f"{name}: padding dropped, {real} of {stored} kept.")


def _plus_one(array: np.ndarray) -> np.ndarray:
    return (array.astype(np.float32) + np.float32(1)).astype(array.dtype)


def _stored_sizes(run: Run, sizes: dict[str, int]) -> list[dict[str, int]]:
    """The sizes of what is stored, with padding: of the vocabulary, and, as a second reading, of the heads of KDA."""
    embedding = run.shapes.get(Key(OUTER, table.EMBEDDING.name))
    stored = {**sizes, "vocab": embedding[0]} if embedding is not None and embedding else dict(sizes)
    heads = {shape[0] for key, shape in run.shapes.items() if key.name.endswith(".A_log") and shape}
    if len(heads) == 1 and (padded := heads.pop()) > sizes["kda_heads"]:
        return [stored, {**stored, "kda_heads": padded, "kda": padded * sizes["kda_dim"]}]
    return [stored]


def _variant(run: Run, attention: Iterable[Place]) -> Variant:
    """Which fused forms there are."""
    has = lambda name: any(Key(place, name) in run.keys for place in attention)
    separate = any(has(name) or has(f"{name}") for name in table.BETA_PROJ.names)
    packed = not separate and has(table.IN_PROJ.name)
    return Variant(packed=packed, joint_down=has(table.QKV_DOWN_ROW.name))


def _published(pool: _Pool, config: KimiLinearConfig, stack: Stack) -> dict[str, Blocks]:
    """Every tensor of the model, in the order of published files."""
    out: dict[str, Blocks] = {}
    variant = _variant(pool.run, [pair[0] for pair in stack.places])
    if variant.packed:
        pool.spellings["in_proj"] = "packed"
    if variant.joint_down:
        pool.spellings["down"] = "joint"
    if pool.run.experts:
        pool.spellings["experts"] = pool.run.experts
    first, *last = table.outer_rows(config)
    _add(out, pool, (first,), OUTER, "", config)
    for layer, (attention, mlp) in enumerate(stack.places):
        prefix = f"model.layers.{layer}."
        _add(out, pool, table.attention_rows(config, config.layer_kinds[layer], variant), attention, prefix, config)
        _add(out, pool, table.mlp_rows(config, config.mlp_kinds[layer]), mlp, prefix, config)
    _add(out, pool, last, OUTER, "", config)
    return out


def _add(
    out: dict[str, Blocks], pool: _Pool, rows: Iterable[Row], place: Place, prefix: str, config: KimiLinearConfig
) -> None:
    for row in rows:
        if row.name == "mlp.router.expert_bias" and _has_no_bias(pool, place):
            if pool.partial:
                continue
            zeros = whole(Zeros((config.num_experts,), np.dtype(np.float32)))
            out[prefix + row.sections[0].published] = zeros
            note = "The router has no balancing bias; zeros are written for it, which change nothing."
            pool.notes += [] if note in pool.notes else [note]
            continue
        for expert in range(config.num_experts) if row.expert else (None,):
            tensors = pool.take(row, place, expert)
            for section, tensor in zip(row.sections, tensors or (), strict=tensors is not None):
                name = section.published if expert is None else section.published.replace(EXPERT, str(expert))
                out[prefix + name] = tensor


def _has_no_bias(pool: _Pool, place: Place) -> bool:
    """Whether the router was trained without a balancing bias, by the arguments."""
    stated = (pool.run.args or {}).get("moe_router_enable_expert_bias")
    return stated is False and Key(place, "mlp.router.expert_bias") not in pool.run.keys


def _prediction(pool: _Pool, config: KimiLinearConfig) -> dict[str, Blocks]:
    """Tensors of the layers that predict one more token, named as the layers that follow the last one."""
    places: dict[int, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for key in pool.run.keys:
        if key.place.kind == "mtp":
            places[key.place.number][-1 if key.place.inner is None else key.place.inner].add(key.name)
    out: dict[str, Blocks] = {}
    for number, inner in sorted(places.items()):
        prefix = f"model.layers.{config.num_hidden_layers + number}."
        _add(out, pool, table.PREDICTION, Place("mtp", number), prefix, config)
        for sub, names in sorted(inner.items()):
            if sub < 0:
                continue
            place = Place("mtp", number, sub)
            kda = "self_attention.A_log" in names
            if any(name.startswith("self_attention.") for name in names):
                rows = table.attention_rows(config, "kda" if kda else "mla", _variant(pool.run, [place]))
                _add(out, pool, rows, place, prefix, config)
            if any(name.startswith("mlp.") for name in names):
                kind = "moe" if "mlp.router.weight" in names else "dense"
                _add(out, pool, table.mlp_rows(config, kind), place, prefix, config)
    return out


OPTIMIZER_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(fp32_param|exp_avg|exp_avg_sq)\.(.+)")
SHARDED_STATE = re.compile(r"optimizer\.state\.((?:module\.)*.+)\.(exp_avg|exp_avg_sq|fp32_param|step)")


def optimizer_tensors(found: Megatron) -> dict[str, Blocks]:
    """The optimizer's tensors under published names: `exp_avg.model.layers.0...` and so on."""
    states: dict[str, dict[Key, Blocks]] = defaultdict(dict)
    for name, tensor in found.run.optimizer.items():
        if match := OPTIMIZER_STATE.fullmatch(name):
            kind, parameter = match.groups()
        elif match := SHARDED_STATE.fullmatch(name):
            parameter, kind = match.groups()
        else:
            continue
        if (key := parse_name(parameter)) is not None:
            states[kind][key] = tensor
    out: dict[str, Blocks] = {}
    for kind, stored in states.items():
        tensors = unstacked(stored, found.run.folder)
        shapes = {key: tensor.shape for key, tensor in tensors.items()}
        run = replace(found.run, source=tensors, keys=set(tensors), shapes=shapes)
        pool = _Pool(run, found.config)
        pool.plus_one = False
        pool.partial = True
        published = {**_published(pool, found.config, found.stack), **_prediction(pool, found.config)}
        if pool.problems:
            raise CheckpointError(f"{found.run.folder}: state of the optimizer:\n" + join_problems(pool.problems))
        out |= {f"{kind}.{name}": tensor for name, tensor in published.items()}
    return out
