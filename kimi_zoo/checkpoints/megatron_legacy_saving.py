"""Writing legacy Megatron checkpoints: for each rank, a folder `mp_rank_*` with an archive of what that rank holds."""

import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kimi_zoo.checkpoints.blocks import Blocks, Computed, join, stack, whole
from kimi_zoo.checkpoints.files import CheckpointError, atomic_file
from kimi_zoo.checkpoints.megatron_layout import Parameter, Settled
from kimi_zoo.checkpoints.megatron_legacy import FILES, Layout
from kimi_zoo.checkpoints.megatron_names import Key
from kimi_zoo.checkpoints.megatron_sections import pad
from kimi_zoo.checkpoints.pickle_writing import Made
from kimi_zoo.checkpoints.pickles import Name
from kimi_zoo.checkpoints.tables.megatron import EMBEDDING, HEAD, Row
from kimi_zoo.checkpoints.torch_saving import write_archive
from kimi_zoo.checkpoints.watch import Watch


def namespace(args: Mapping[str, Any]) -> Made:
    """The arguments as training stores them."""
    return Made(Name("argparse", "Namespace"), (), dict(args), new=True)


class Writer:
    """The files of all ranks."""

    def __init__(self, settled: Settled, parameters: Sequence[Parameter], layers: int):
        self.settled, self.layers = settled, layers
        self.parameters = list(parameters)
        tied = not any(parameter.row is HEAD for parameter in parameters)
        if tied and settled.pp * settled.vpp > 1:  # the last stage needs the embedding too
            (embedding,) = (parameter for parameter in parameters if parameter.row is EMBEDDING)
            self.parameters.append(Parameter(Key(embedding.key.place, HEAD.name), HEAD, embedding.sections, layers))
        experts = 1 + max((p.key.expert for p in parameters if p.key.expert is not None), default=0)
        self.experts_here = max(1, experts // settled.ep)
        layout = Layout(settled.tp, settled.pp, settled.ep, settled.etp, settled.vpp)
        self.ranks = {f"{settled.folder}/{layout.folder(*rank)}/{FILES[0]}": rank for rank in layout.ranks()}

    def files(self) -> dict[str, int]:
        """Files and the bytes of their tensors."""
        return self._files

    @functools.cached_property
    def _files(self) -> dict[str, int]:
        return {
            file: sum(tensor.nbytes for model in self._models(*rank) for tensor in model.values())
            for file, rank in self.ranks.items()
        }

    def write(self, path: Path, file: str, watch: Watch, args: Mapping[str, Any]) -> dict[str, Any]:
        """Writes one rank's file."""
        models = self._models(*self.ranks[file])
        virtual = self.settled.vpp > 1
        value = {
            "args": namespace(args),
            "checkpoint_version": 3.0,
            "iteration": self.settled.iteration,
            **{f"model{v}" if virtual else "model": model for v, model in enumerate(models)},
        }
        names = {id(tensor): name for model in models for name, tensor in model.items()}
        with atomic_file(path) as out:
            write_archive(out, value, stream=watch.stream, names=names, root=FILES[0].removesuffix(".pt"))
        return {}

    def finish(self, folder: Path, facts: Mapping[str, Mapping[str, Any]], args: Mapping[str, Any]) -> None:
        """Nothing lies beside the ranks' folders."""

    def _models(self, tp: int, pp: int, ep: int) -> list[dict[str, Blocks]]:
        """What a rank holds, for each of its virtual stages."""
        settled = self.settled
        models: list[dict[str, Blocks]] = [{} for _ in range(settled.vpp)]
        grouped: dict[tuple[int, Key], list[Blocks]] = defaultdict(list)
        for parameter in self.parameters:
            stage, virtual = self._stage(parameter.layer)
            if stage != pp:
                continue
            if parameter.key.expert is not None and parameter.key.expert // self.experts_here != ep:
                continue
            split, rank = (settled.etp, 0 if settled.etp == 1 else tp) if parameter.row.expert else (settled.tp, tp)
            key = self._local(parameter)
            if parameter.key.expert is not None:
                key = key._replace(expert=parameter.key.expert % self.experts_here)
            tensor = self._share(parameter, rank, split)
            if parameter.key.expert is not None and settled.experts == "grouped":
                grouped[virtual, key._replace(expert=None)].append(tensor)
            else:
                models[virtual][self._name(key)] = tensor
        for (virtual, key), tensors in grouped.items():
            name = "weight1" if key.name.endswith("linear_fc1.weight") else "weight2"
            models[virtual][f"{key.prefix}mlp.experts.{name}"] = _grouped(tensors, first=name == "weight1")
        return models

    def _stage(self, layer: int) -> tuple[int, int]:
        if layer < 0:
            return 0, 0
        if layer >= self.layers:
            return self.settled.pp - 1, self.settled.vpp - 1
        return self.settled.stage_of(layer, self.layers)

    def _local(self, parameter: Parameter) -> Key:
        """The key with the number of the layer within its stage."""
        place = parameter.key.place
        if place.kind != "layer":
            return parameter.key
        per_stage = self.layers // (self.settled.pp * self.settled.vpp) * (2 if self.settled.hybrid else 1)
        return parameter.key._replace(place=place._replace(number=place.number % per_stage))

    def _share(self, parameter: Parameter, rank: int, ranks: int) -> Blocks:
        """What one rank holds of a parameter: its share of each section."""
        row = parameter.row
        sections = [pad(s, 0, self.settled.padded_vocab) if row in (EMBEDDING, HEAD) else s for s in parameter.sections]
        if row.axis is not None and not (row.replicable and self.settled.names.get("down_ranks") != "split"):
            sections = [_share(section, row, rank, ranks) for section in sections]
        return join(sections, 0)

    def _name(self, key: Key) -> str:
        if key.expert is None:
            return key.prefix + key.name
        if self.settled.experts == "sequential":
            return f"{key.prefix}{key.name.replace('mlp.experts.', f'mlp.experts.local_experts.{key.expert}.')}"
        return f"{key.prefix}{key.name}{key.expert}"


def _share(tensor: Blocks, row: Row, rank: int, ranks: int) -> Blocks:
    axis = row.axis or 0
    size, rest = divmod(tensor.shape[axis], ranks)
    if rest:
        raise CheckpointError(
            f"This model cannot be split so: a part of {row.name} has {tensor.shape[axis]} of what each rank holds a "
            f"share of, which is not divisible by the {ranks} ranks. Choose another tp."
        )
    return tensor.part(axis, rank * size, (rank + 1) * size)


def _grouped(experts: Sequence[Blocks], *, first: bool) -> Blocks:
    """GroupedMLP's one matrix for all experts, each transposed."""
    stacked = stack([expert.transposed() for expert in experts])
    count, rows, columns = stacked.shape
    shape = (rows, count * columns) if first else (count * rows, columns)
    return whole(Computed(shape, stacked.dtype, lambda: stacked.read().reshape(shape)))


def shares(tensor: Blocks, row: Row, ranks: int) -> Iterator[Blocks]:
    """Equal parts along the axis that a row is split along. **Raises:** `CheckpointError` if it does not divide."""
    return (_share(tensor, row, rank, ranks) for rank in range(ranks))
