"""Legacy Megatron checkpoints: a folder `mp_rank_*` per rank, each with the tensors that this rank held.

Layers are numbered within their pipeline stage, experts within their rank, and every fused tensor holds a rank's share
of each section. The arguments that lie beside the tensors say how many ranks of each kind there were.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kimi_zoo.checkpoints.blocks import Blocks, whole
from kimi_zoo.checkpoints.files import CheckpointError, list_some
from kimi_zoo.checkpoints.megatron_args import PARALLEL, SAME
from kimi_zoo.checkpoints.megatron_names import STACKED, Key, is_ignored, parse_name
from kimi_zoo.checkpoints.megatron_sections import Misfit, cut_rank, join_ranks
from kimi_zoo.checkpoints.pickles import StandIn
from kimi_zoo.checkpoints.safetensors_header import FLOAT_DTYPES
from kimi_zoo.checkpoints.tables.megatron import Row
from kimi_zoo.checkpoints.torch_files import TorchFile, open_torch_file, plain
from kimi_zoo.checkpoints.torch_storage import StoredTensor

RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
FILES = ("model_optim_rng.pt", "model_rng.pt")
CONSISTENT = (*SAME, *PARALLEL, "num_layers", "hybrid_layer_pattern", "padded_vocab_size")


@dataclass(frozen=True)
class Layout:
    """How many ranks of each kind there are: tensor, pipeline, expert, expert tensor parallel; virtual stages."""

    tp: int
    pp: int
    ep: int
    etp: int
    vpp: int

    @property
    def folded(self) -> bool:
        """Whether expert parallel ranks are taken from the tensor parallel ones, so that experts are whole."""
        return self.etp == 1 and self.tp > 1

    def folder(self, tp: int, pp: int, ep: int) -> str:
        """The name of a rank's folder."""
        name = f"mp_rank_{tp:02d}"
        return name + (f"_{pp:03d}" if self.pp > 1 else "") + (f"_{ep:03d}" if self.ep > 1 else "")

    def ranks(self) -> Iterator[tuple[int, int, int]]:
        """Every rank that has a folder: tensor, pipeline, expert."""
        for pp in range(self.pp):
            for tp in range(self.tp):
                for ep in range(self.ep):
                    if not self.folded or tp % self.ep == ep:
                        yield tp, pp, ep


@dataclass(frozen=True)
class Part:
    """What one rank holds of a parameter."""

    tp: int
    ep: int
    tensor: Blocks
    file: Path


@dataclass
class Legacy:
    """All ranks' tensors: `parts` by parameter, with layers numbered over the whole model.

    `experts` is how experts are named; `split_downs`, found while joining, whether MLA's down projections are split.
    """

    folder: Path
    args: dict[str, Any] | None
    layout: Layout
    parts: dict[Key, list[Part]]
    iteration: int | None
    unknown: list[str]
    left_out: dict[str, int]
    nbytes: int
    experts: str = ""
    split_downs: bool = False
    notes: list[str] = field(default_factory=list)


def is_legacy(folder: Path) -> bool:
    """Whether a folder holds the folders of ranks."""
    return any(RANK.fullmatch(entry.name) and entry.is_dir() for entry in folder.iterdir())


def open_legacy(folder: Path) -> Legacy:
    """Opens every rank's file, and finds out which layers and experts it holds.

    **Raises:** `CheckpointError` for missing and surplus ranks, for ranks whose arguments differ, for a parameter that
    a file holds twice, and for files that cannot be read.
    """
    found = {entry.name: entry for entry in sorted(folder.iterdir()) if RANK.fullmatch(entry.name)}
    first = next(iter(found.values()))
    opened = {first.name: _open(first)}
    args = _args(opened[first.name])
    layout = _layout(args, found, opened[first.name])
    _check_ranks(folder, layout, set(found), args)
    parts: dict[Key, list[Part]] = defaultdict(list)
    out = Legacy(folder, args, layout, parts, _iteration(opened[first.name]), [], defaultdict(int), 0)
    stages: dict[tuple[int, int], int] = {}
    gathered: list[tuple[int, int, Key, Part]] = []
    for tp, pp, ep in layout.ranks():
        name = layout.folder(tp, pp, ep)
        file = opened.get(name) or _open(found[name])
        _check_args(args, _args(file), first.name, name, folder)
        for virtual, models in enumerate(_models(file, layout.vpp)):
            tensors = _tensors(models, file, out)
            depth = 1 + max((key.place.number for key in tensors if key.place.kind == "layer"), default=-1)
            place = (virtual, pp)
            if stages.setdefault(place, depth) != depth:
                raise CheckpointError(
                    f"{file.where} holds {depth} layers of pipeline stage {pp}; other ranks of that stage hold "
                    f"{stages[place]}."
                )
            for key, tensor in _with_global_experts(tensors, args, layout, ep, file.where):
                gathered.append((virtual, pp, key, Part(tp, ep, tensor, Path(file.where))))
    starts, total = {}, 0
    for place in sorted(stages):  # virtual stage first: each goes once through the pipeline
        starts[place] = total
        total += stages[place]
    for virtual, pp, key, part in gathered:
        if key.place.kind == "layer":
            key = key._replace(place=key.place._replace(number=key.place.number + starts[virtual, pp]))
        parts[key].append(part)
    stated = (args or {}).get("num_layers")
    if stated is not None and parts and stated != total:
        raise CheckpointError(f"{folder}: its arguments say num_layers {stated}, its ranks hold {total} layers.")
    return out


def _open(folder: Path) -> TorchFile:
    for name in FILES:
        if (folder / name).is_file():
            file = open_torch_file(folder / name)
            if not isinstance(file.value, dict):
                raise CheckpointError(f"{file.where} holds no dictionary, as a Megatron checkpoint does.")
            return file
    raise CheckpointError(f"{folder} holds no {FILES[0]}.")


def _args(file: TorchFile) -> dict[str, Any] | None:
    args = file.value.get("args")
    if isinstance(args, StandIn):
        args = args.fields
    return {str(name): plain(value) for name, value in args.items()} if isinstance(args, dict) else None


def _iteration(file: TorchFile) -> int | None:
    value = file.value.get("iteration")
    return value if type(value) is int else None


def _models(file: TorchFile, virtual: int) -> list[dict[str, Any]]:
    names = [f"model{v}" for v in range(virtual)] if virtual > 1 or "model" not in file.value else ["model"]
    models = [file.value.get(name) for name in names]
    if not all(isinstance(model, dict) for model in models):
        present = list_some([str(name) for name in file.value])
        raise CheckpointError(f"{file.where} lacks the tensors of {names}; it holds {present}.")
    return [model for model in models if isinstance(model, dict)]


def _layout(args: dict[str, Any] | None, found: Mapping[str, Path], file: TorchFile) -> Layout:
    def size(name: str, default: int) -> int:
        value = (args or {}).get(name)
        if value is None:
            return default
        if type(value) is not int or not 1 <= value <= 100_000:
            raise CheckpointError(f"{file.where}: its arguments say {name} {value!r}.")
        return value

    virtual = sum(1 for name in file.value if re.fullmatch(r"model\d+", str(name)))
    if args is not None:
        tp = size("tensor_model_parallel_size", 1)
        etp = size("expert_tensor_parallel_size", tp)
        pp, ep = size("pipeline_model_parallel_size", 1), size("expert_model_parallel_size", 1)
        vpp = max(size("virtual_pipeline_model_parallel_size", 1), virtual)
        if etp not in (1, tp):
            raise CheckpointError(
                f"{file.where}: expert tensor parallelism {etp} is neither 1 nor {tp}, the tensor parallelism; such "
                "legacy checkpoints are not read. Save the model as torch_dist, which may be split in any way."
            )
        return Layout(tp, pp, ep, etp, vpp)
    numbers = [RANK.fullmatch(name) for name in found]
    counts = [1 + max((int(m[i]) for m in numbers if m and m[i]), default=0) for i in (1, 2, 3)]
    tp, second, third = counts
    everywhere = second > 1 and third == 1 and _holds_embedding(found[max(found)])
    return Layout(tp, 1 if everywhere else second, second if everywhere else third, tp, max(1, virtual))


def _holds_embedding(folder: Path) -> bool:
    """Whether the last rank holds the embedding too: then the second number counts expert parallel ranks."""
    models = _models(_open(folder), 1)
    return any("word_embeddings" in str(name) for model in models for name in model)


def _check_ranks(folder: Path, layout: Layout, found: set[str], args: dict | None) -> None:
    expected = {layout.folder(*rank) for rank in layout.ranks()}
    sizes = f"TP {layout.tp}, PP {layout.pp}, EP {layout.ep}" + (f", ETP {layout.etp}" if layout.folded else "")
    source = "its arguments say" if args is not None else "its folders' names say"
    if missing := sorted(expected - found):
        raise CheckpointError(
            f"{folder} is incomplete: {list_some(missing)} missing of {len(expected)} ranks ({source} {sizes})."
        )
    if surplus := sorted(found - expected):
        raise CheckpointError(
            f"{folder} holds {list_some(surplus)}, which do not belong to it: {source} {sizes}, so the ranks are "
            f"{list_some(sorted(expected), 4)}. Is it left from another run?"
        )


def _check_args(first: dict | None, args: dict | None, name: str, other: str, folder: Path) -> None:
    if (first is None) != (args is None):
        raise CheckpointError(f"{folder}: only one of {name} and {other} holds the arguments of the run.")
    for key in CONSISTENT:
        if first is not None and args is not None and first.get(key) != args.get(key):
            raise CheckpointError(
                f"{folder}: ranks are not of one run: {key} is {first.get(key)!r} in {name}, "
                f"{args.get(key)!r} in {other}."
            )


def _tensors(model: Mapping[str, Any], file: TorchFile, out: Legacy) -> dict[Key, Blocks]:
    tensors: dict[Key, Blocks] = {}
    names: dict[Key, str] = {}
    for name, value in _flat(model):
        if is_ignored(name) or value is None:
            out.left_out["state of fp8 scaling and the like"] += 1
            continue
        key = parse_name(name)
        if not isinstance(value, StoredTensor):
            kind = value.kind if isinstance(value, StandIn) else type(value).__name__
            raise CheckpointError(f"{file.where}: {name:.100} is a {kind}; expected a tensor.")
        if key is None:
            out.unknown.append(name)
        elif key in tensors:
            raise CheckpointError(f"{file.where} holds {key} twice, as {names[key]:.100} and as {name:.100}.")
        else:
            tensors[key], names[key] = whole(value), name
            out.experts = out.experts or _experts_style(name)
            out.nbytes += tensors[key].nbytes
    return tensors


def _experts_style(name: str) -> str:
    if ".experts." not in name or "shared_experts" in name:
        return ""
    return (
        "sequential"
        if "local_experts" in name
        else "grouped"
        if name.endswith(("weight1", "weight2")) and ("linear_fc" not in name)
        else "te_grouped"
    )


def _flat(model: Mapping[str, Any], prefix: str = "", depth: int = 8) -> Iterator[tuple[str, Any]]:
    """Names with dots, also of dictionaries within dictionaries."""
    for name, value in model.items():
        if isinstance(value, dict) and depth:
            yield from _flat(value, f"{prefix}{name}.", depth - 1)
        else:
            yield f"{prefix}{name}", value


def _with_global_experts(
    tensors: Mapping[Key, Blocks], args: dict[str, Any] | None, layout: Layout, ep: int, where: str
) -> Iterator[tuple[Key, Blocks]]:
    """Experts one by one, with their numbers over the whole model."""
    local: dict[Any, set[int]] = defaultdict(set)
    for key in tensors:
        if key.expert is not None and key.expert != STACKED:
            local[key.place].add(key.expert)
    for key, tensor in tensors.items():
        if key.expert is None:
            yield key, tensor
            continue
        router = tensors.get(Key(key.place, "mlp.router.weight"))
        experts = router.shape[0] if router is not None else (args or {}).get("num_experts") or 0
        here = experts // layout.ep
        if not here or experts % layout.ep:
            raise CheckpointError(f"{where}: {experts} experts cannot be on {layout.ep} expert parallel ranks ({key}).")
        if key.expert != STACKED:
            if local[key.place] != set(range(here)):
                raise CheckpointError(
                    f"{where}: {key.prefix}mlp holds experts {sorted(local[key.place])}; expected 0 to {here - 1}, "
                    f"as {experts} experts are on {layout.ep} ranks."
                )
            yield key._replace(expert=ep * here + key.expert), tensor
            continue
        for number, one in enumerate(_unstacked(key, tensor, here, where)):
            name = {"weight1": "linear_fc1.weight", "weight2": "linear_fc2.weight"}.get(key.name.split(".")[-1])
            renamed = key.name if name is None else f"mlp.experts.{name}"
            yield Key(key.place, renamed, ep * here + number), one


def _unstacked(key: Key, tensor: Blocks, experts: int, where: str) -> list[Blocks]:
    """One matrix per expert. GroupedMLP's are stored transposed, as one matrix: `weight1` in the memory order of
    `[experts, in, out]` shown as `[in, experts * out]`, `weight2` as `[experts * in, out]`."""
    kind = key.name.split(".")[-1]
    if kind not in ("weight1", "weight2"):
        if tensor.shape[0] != experts:
            raise CheckpointError(f"{where}: {key} has shape {list(tensor.shape)}; expected {experts} experts.")
        return [tensor.item(0, expert) for expert in range(experts)]
    axis = 1 if kind == "weight1" else 0
    if len(tensor.shape) != 2 or tensor.shape[axis] % experts:
        raise CheckpointError(f"{where}: {key} has shape {list(tensor.shape)}, which {experts} experts cannot share.")
    rows, columns = tensor.shape
    shape = (experts, rows, columns // experts) if kind == "weight1" else (experts, rows // experts, columns)
    stacked = tensor.reshaped(shape)
    return [stacked.item(0, expert).transposed() for expert in range(experts)]


def join_parts(
    legacy: Legacy, key: Key, row: Row, sizes: Mapping[str, int], problems: list[str]
) -> list[Blocks] | None:
    """The sections of a parameter, put together from the ranks; `None` if it cannot be, with the reason in `problems`.

    Copies that several ranks hold must be equal.
    """
    layout, parts = legacy.layout, legacy.parts[key]
    split = layout.etp if row.expert else layout.tp
    rank = lambda part: 0 if split == 1 else part.tp
    by_rank: dict[int, Part] = {}
    cuts: dict[int, tuple[list[Blocks], bool]] = {}
    for part in sorted(parts, key=lambda part: (part.tp, part.ep)):
        try:
            pieces, all_of_it = cut_rank(part.tensor, row, sizes, 1 if row.axis is None else split)
        except Misfit as error:
            problems.append(f"{key} of {part.file.parent.name} {error}")
            return None
        place = 0 if row.axis is None or all_of_it else rank(part)
        if place not in by_rank:
            by_rank[place], cuts[place] = part, (pieces, all_of_it)
        elif not same_values(by_rank[place].tensor, part.tensor):
            names = f"{by_rank[place].file.parent.name} and {part.file.parent.name}"
            if not _same_where_finite(by_rank[place].tensor, part.tensor):
                problems.append(f"{key} differs between {names}, which should hold the same")
                return None
            legacy.notes.append(
                f"{key} differs between {names} where one has NaN or infinity; the first one's values are taken."
            )
    if row.replicable and split > 1 and not any(everywhere for _, everywhere in cuts.values()):
        legacy.split_downs = True
    everywhere = row.axis is None or any(whole_there for _, whole_there in cuts.values())
    holders = {part.tp for part in parts}
    expected = 1 if everywhere else split
    missing = sorted(set(range(layout.tp)) - holders) if not row.expert else []
    if len(by_rank) != expected or missing:
        present = sorted({part.file.parent.name for part in parts})
        absent = f", not on tensor parallel ranks {missing}" if missing else ""
        problems.append(f"{key} is only on some ranks: {list_some(present)}{absent}")
        return None
    try:
        return join_ranks([cuts[place][0] for place in sorted(cuts)], None if everywhere else row.axis)
    except Misfit as error:
        problems.append(f"{key}: {error}")
        return None


def same_values(one: Blocks, other: Blocks) -> bool:
    """Whether two tensors hold the same values, bit for bit."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    mine, theirs = one.blocks, other.blocks
    if len(mine) == len(theirs) == 1 and not mine[0].views and not theirs[0].views:
        return mine[0].source.same_bytes(theirs[0].source)
    pairs = zip(one.stream(), other.stream(), strict=True)
    equal = all(bytes(a) == bytes(b) for a, b in pairs)
    one.release()
    other.release()
    return equal


def _same_where_finite(one: Blocks, other: Blocks) -> bool:
    """Whether two tensors differ only where one of them is NaN or infinite."""
    if (one.shape, one.dtype) != (other.shape, other.dtype) or one.dtype not in FLOAT_DTYPES:
        return False
    mine, theirs = one.read().astype(np.float64), other.read().astype(np.float64)
    finite = np.isfinite(mine) & np.isfinite(theirs)
    return bool(np.array_equal(mine[finite], theirs[finite]) and not finite.all())
