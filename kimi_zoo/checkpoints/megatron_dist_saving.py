"""Writing Megatron's `torch_dist` checkpoints: `.metadata`, a `*.distcp` file per rank, and what is common to all."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kimi_zoo.checkpoints.blocks import Blocks
from kimi_zoo.checkpoints.files import atomic_file, write_json
from kimi_zoo.checkpoints.megatron_layout import Parameter, Settled
from kimi_zoo.checkpoints.megatron_legacy_saving import namespace, shares
from kimi_zoo.checkpoints.megatron_run import COMMON
from kimi_zoo.checkpoints.megatron_sections import pad
from kimi_zoo.checkpoints.pickle_writing import Made, Pairs, instance, write_pickle
from kimi_zoo.checkpoints.pickles import Name
from kimi_zoo.checkpoints.tables.megatron import EMBEDDING, HEAD
from kimi_zoo.checkpoints.torch_dist import METADATA
from kimi_zoo.checkpoints.torch_saving import size, torch_dtype, write_archive
from kimi_zoo.checkpoints.watch import Watch

CLASSES = "torch.distributed.checkpoint.metadata"


@dataclass(frozen=True)
class Piece:
    """A chunk of a tensor: its offset and values, and the rank that stores it."""

    name: str
    offset: tuple[int, ...]
    values: Blocks
    rank: int


class Writer:
    """The files of all ranks."""

    def __init__(self, settled: Settled, parameters: Sequence[Parameter], layers: int):
        self.settled, self.layers = settled, layers
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, np.dtype] = {}
        self.experts = 1 + max((p.key.expert for p in parameters if p.key.expert is not None), default=-1)
        self.pieces: dict[str, list[Piece]] = defaultdict(list)
        for parameter in parameters:
            for piece in self._chunks(parameter):
                self.pieces[f"{settled.folder}/__{piece.rank}_0.distcp"].append(piece)

    def files(self) -> dict[str, int]:
        """Files and the bytes of their tensors."""
        return {file: sum(piece.values.nbytes for piece in pieces) for file, pieces in self.pieces.items()}

    def write(self, path: Path, file: str, watch: Watch, args: Mapping[str, Any]) -> dict[str, Any]:
        """Writes one rank's file. **Returns:** the place of each chunk in it."""
        places = []
        with atomic_file(path) as out:
            for piece in self.pieces[file]:
                begin = out.tell()
                names = {id(piece.values): piece.name}
                length = write_archive(out, piece.values, stream=watch.stream, names=names)
                places.append([piece.name, list(piece.offset), begin, length])
        return {"places": places}

    def finish(self, folder: Path, facts: Mapping[str, Mapping[str, Any]], args: Mapping[str, Any]) -> None:
        """Writes `.metadata`, the arguments, and the name of the format."""
        common = {
            "args": namespace(args),
            "checkpoint_version": 3.0,
            "iteration": self.settled.iteration,
            "content_metadata": {"singleton_local_shards": self.settled.experts == "singleton"},
        }
        with atomic_file(folder / COMMON) as out:
            write_archive(out, common, stream=lambda _, tensor: tensor.stream(), root="common")
        write_json(
            folder / "metadata.json",
            {
                "sharded_backend": "torch_dist",
                "sharded_backend_version": 1,
                "common_backend": "torch",
                "common_backend_version": 1,
            },
        )
        with atomic_file(folder / METADATA) as out:
            out.write(write_pickle(self._metadata(facts)))

    def _chunks(self, parameter: Parameter) -> Iterator[Piece]:
        """How a parameter is stored: its sections by themselves, or one after another, cut for the ranks."""
        row, key = parameter.row, parameter.key
        name = key.prefix + key.name
        singleton = self.settled.experts == "singleton"
        if row.expert:
            number = f"{key.expert}." if singleton else ""
            name = name.replace("mlp.experts.", f"mlp.experts.experts.{number}")
        by_themselves = (row.sections[0].tag.startswith(".") or singleton) and len(row.sections) > 1
        sections = parameter.sections
        if row in (EMBEDDING, HEAD):
            sections = tuple(pad(values, 0, self.settled.padded_vocab) for values in sections)
        start = 0
        for section, values in zip(row.sections, sections, strict=True):
            full = name + (section.tag if by_themselves else "")
            length = values.shape[0] if by_themselves else sum(s.shape[0] for s in sections)
            shape = (length, *values.shape[1:])
            self.shapes[full] = (self.experts, *shape) if row.expert and not singleton else shape
            self.dtypes[full] = values.dtype
            yield from self._cut(parameter, full, values, 0 if by_themselves else start)
            start += values.shape[0]

    def _cut(self, parameter: Parameter, name: str, values: Blocks, start: int) -> Iterator[Piece]:
        settled, row, expert = self.settled, parameter.row, parameter.key.expert
        whole = row.axis is None or (row.replicable and settled.names.get("down_ranks") != "split")
        ranks = 1 if whole else settled.etp if row.expert else settled.tp
        axis = row.axis or 0
        for rank, part in enumerate(shares(values, row, ranks)):
            offset = [0] * len(values.shape)
            offset[0] = start
            offset[axis] += rank * part.shape[axis]
            owner = self._rank(parameter, rank)
            if expert is None or settled.experts == "singleton":
                yield Piece(name, tuple(offset), part, owner)
            else:
                yield Piece(name, (expert, *offset), part.reshaped((1, *part.shape)), owner)

    def _rank(self, parameter: Parameter, tp: int) -> int:
        """The rank over all processes that stores a share, in Megatron's order: tensor, expert, pipeline."""
        settled = self.settled
        pp = 0
        if parameter.layer >= 0:
            last = parameter.layer >= self.layers
            pp = settled.pp - 1 if last else settled.stage_of(parameter.layer, self.layers)[0]
        ep = 0 if parameter.key.expert is None else parameter.key.expert // (self.experts // settled.ep)
        if settled.folded:
            return pp * settled.tp + (tp if parameter.key.expert is None else ep)
        return (pp * settled.ep + ep) * settled.tp + tp

    def _metadata(self, facts: Mapping[str, Mapping[str, Any]]) -> Made:
        chunks: dict[str, list[Piece]] = defaultdict(list)
        for pieces in self.pieces.values():
            for piece in pieces:
                chunks[piece.name].append(piece)
        entries = {
            name: instance(
                CLASSES,
                "TensorStorageMetadata",
                properties=_properties(self.dtypes[name]),
                size=size(self.shapes[name]),
                chunks=[
                    instance(CLASSES, "ChunkStorageMetadata", offsets=size(p.offset), sizes=size(p.values.shape))
                    for p in sorted(pieces, key=lambda piece: piece.offset)
                ],
            )
            for name, pieces in chunks.items()
        }
        places = Pairs()
        for file, fact in facts.items():
            for name, offset, begin, length in fact["places"]:
                index = instance(CLASSES, "MetadataIndex", fqn=name, offset=size(tuple(offset)), index=None)
                place = {"relative_path": Path(file).name, "offset": begin, "length": length}
                info = instance("torch.distributed.checkpoint.filesystem", "_StorageInfo", **place)
                places.items.append((index, info))
        return instance(
            CLASSES,
            "Metadata",
            state_dict_metadata=entries,
            planner_data={name: (name,) for name in entries},
            storage_data=places,
            storage_meta=None,
            version="1.0.0",
        )


def _properties(dtype: np.dtype) -> Made:
    """`TensorProperties`, which has a pickled state of its own: dtype, layout, gradient, memory format, pinned."""
    layout = Made(Name("torch.serialization", "_get_layout"), ("torch.strided",))
    memory = Made(Name(CLASSES, "_MEM_FORMAT_ENCODING"), (0,))
    state = (torch_dtype(dtype), layout, False, memory, False)
    return Made(Name(CLASSES, "TensorProperties"), (), state, new=True)
