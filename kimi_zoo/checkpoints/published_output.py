"""Writing published layout: safetensors, `config.json`, and what a Megatron run said about itself."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kimi_zoo.checkpoints.blocks import Blocks
from kimi_zoo.checkpoints.files import CheckpointError, write_json
from kimi_zoo.checkpoints.megatron import Megatron, optimizer_tensors
from kimi_zoo.checkpoints.safetensors import open_checkpoint
from kimi_zoo.checkpoints.safetensors_saving import LazyTensor, plan_files, write_file, write_index
from kimi_zoo.checkpoints.sources import Opened, published_blocks, published_config
from kimi_zoo.checkpoints.watch import Watch

RUN_FILE = "megatron.json"
"""Facts of the run, for people and for the way back."""


class PublishedOutput:
    """A checkpoint in published layout; see `convert.Output`."""

    target = "published layout (safetensors)"
    same_names = True

    def __init__(self, opened: Opened, max_shard_size: int | str, keep_prediction: bool, keep_optimizer: bool):
        self.opened = opened
        found = opened.megatron
        self.kept = dict(opened.tensors)
        if found is not None and found.prediction:
            if keep_prediction:
                self.kept |= found.prediction
            else:
                opened.left_out["tensors of layers that predict one more token"] = len(found.prediction)
        self.state = _optimizer(opened, found) if keep_optimizer else {}
        self.raw = published_config(opened, prediction=keep_prediction)
        self.metadata = {"format": "pt", **_short_facts(found)}
        self.plans = {"model": plan_files(self.kept, max_shard_size)}
        if self.state:
            self.plans["optimizer"] = plan_files(self.state, max_shard_size, "optimizer")

    def files(self) -> dict[str, int]:
        """Weight files and the bytes of their tensors."""
        every = self.originals()
        return {
            file: sum(every[name].nbytes for name in names)
            for plan in self.plans.values()
            for file, names in plan.items()
        }

    def write(self, folder: Path, file: str, watch: Watch) -> dict[str, Any]:
        """Writes one file."""
        names = next(plan[file] for plan in self.plans.values() if file in plan)
        every = self.originals()
        lazy = {name: _lazy(name, every[name], watch) for name in names}
        write_file(folder / file, names, lazy, self.metadata)
        return {}

    def finish(self, folder: Path, facts: Mapping[str, Mapping[str, Any]]) -> None:
        """Writes the index, the configuration and the facts of the run."""
        every = self.originals()
        for plan in self.plans.values():
            write_index(folder, plan, every)
        if self.raw is not None:
            write_json(folder / "config.json", self.raw)
        if self.opened.megatron is not None:
            write_json(folder / RUN_FILE, run_facts(self.opened.megatron))

    def tensors(self, folder: Path) -> dict[str, Blocks]:
        """What lies there now."""
        out = published_blocks(open_checkpoint(folder))
        for file in self.plans.get("optimizer", ()):
            out |= published_blocks(open_checkpoint(folder / file))
        return out

    def originals(self) -> dict[str, Blocks]:
        """What should lie there."""
        return {**self.kept, **self.state}


def _lazy(name: str, tensor: Blocks, watch: Watch) -> LazyTensor:
    return LazyTensor(tensor.shape, tensor.dtype, tensor.read, lambda: watch.stream(name, tensor))


def _short_facts(found: Megatron | None) -> dict[str, str]:
    if found is None:
        return {}
    facts = {"iteration": found.run.iteration, "kda_disable_fp8": (found.run.args or {}).get("kda_disable_fp8")}
    return {f"megatron.{name}": str(value) for name, value in facts.items() if value is not None}


def run_facts(found: Megatron) -> dict[str, Any]:
    """What belongs to a run and not to its weights."""
    run = found.run
    return {
        "format": run.kind,
        "iteration": run.iteration,
        "parallel": run.parallel,
        "stack": "hybrid" if found.stack.hybrid else "gpt",
        "names": found.spellings,
        "left_out": run.left_out,
        "notes": found.notes,
        "args": run.args,
    }


def _optimizer(opened: Opened, found: Megatron | None) -> dict[str, Blocks]:
    if found is None or not found.run.optimizer:
        raise CheckpointError(
            f"{opened.path} has no optimizer state with the names of parameters, which only distributed Megatron "
            "checkpoints (torch_dist, fsdp_dtensor) have. Convert without keep_optimizer (--keep-optimizer), which "
            "leaves it out, or save the checkpoint as torch_dist."
        )
    state = optimizer_tensors(found)
    opened.left_out.pop("entries of the optimizer", None)
    if rest := len(found.run.optimizer) - len(state):
        opened.notes.append(f"{len(state)} tensors of the optimizer are kept (of {rest + len(state)} entries).")
    return state
