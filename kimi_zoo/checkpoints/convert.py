"""Converting checkpoints: plan, write, verify. Values are streamed, so memory does not grow with the model."""

import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from kimi_zoo.checkpoints.blocks import Blocks
from kimi_zoo.checkpoints.checksums import crc32_combine
from kimi_zoo.checkpoints.files import CARRIED, CheckpointError, check_destination, list_some
from kimi_zoo.checkpoints.megatron_output import MegatronLayout, MegatronOutput
from kimi_zoo.checkpoints.published_output import PublishedOutput
from kimi_zoo.checkpoints.sources import Opened, open_source, read_given_config
from kimi_zoo.checkpoints.staging import Staging, identity_of, stage
from kimi_zoo.checkpoints.watch import RELEASE_BYTES, Watch

READERS = 2  # threads that read back
Target = Literal["hf", "megatron"]


@dataclass(frozen=True)
class Plan:
    """What a conversion is going to do.

    - `source`, `kind`: what was found. `target`: what is written, in words.
    - `tensors`, `nbytes`: of the model, in published layout.
    - `layout`: what the source is split over; empty if nothing. `files`: names and bytes of weight files to be written.
    - `left_out`: what -> how many entries are not converted. `notes`: what a user should know.
    """

    source: Path
    kind: str
    destination: Path
    target: str
    tensors: int
    nbytes: int
    layout: dict[str, int]
    files: dict[str, int]
    left_out: dict[str, int]
    notes: tuple[str, ...]
    iteration: int | None = None

    def lines(self) -> list[str]:
        """The plan for people."""
        split = ", ".join(f"{name} {size}" for name, size in self.layout.items() if size > 1) or "not split"
        step = "" if self.iteration is None else f", iteration {self.iteration}"
        out = [
            f"from  {self.source}",
            f"      {self.kind}{step}: {self.tensors} tensors, {self.nbytes:,} bytes, {split}",
            f"to    {self.destination}",
            f"      {self.target}: {len(self.files)} weight file{'s' * (len(self.files) != 1)}",
        ]
        out += [f"left out: {count} {what}" for what, count in self.left_out.items()]
        return out + [f"note: {note}" for note in self.notes]


@dataclass(frozen=True)
class Conversion:
    """What a conversion did.

    - `plan`: what was intended. `warnings`: what a user should look at, such as tensors with NaN.
    - `seconds`: in all. `resumed`: files that a stopped conversion had finished. `verified`: tensors read back and
        found equal; 0 if that was not wanted.
    """

    plan: Plan
    seconds: float
    resumed: int
    verified: int
    warnings: tuple[str, ...]


@runtime_checkable
class Output(Protocol):
    """One format that can be written.

    `same_names`: whether `Watch` sees its tensors under the names that they are read back by.
    """

    target: str
    same_names: bool

    def files(self) -> dict[str, int]:
        """Weight files and the bytes of their tensors."""
        ...

    def write(self, folder: Path, file: str, watch: Watch) -> dict[str, Any]:
        """Writes one of them. **Returns:** what `finish` needs to know of it, as JSON can hold it."""
        ...

    def finish(self, folder: Path, facts: Mapping[str, Mapping[str, Any]]) -> None:
        """Writes what belongs beside the weight files."""
        ...

    def tensors(self, folder: Path) -> dict[str, Blocks]:
        """The tensors that lie there now, by the names that `Watch` saw or by published ones."""
        ...

    def originals(self) -> dict[str, Blocks]:
        """The tensors that should lie there, by the same names."""
        ...


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    to: Target | None = None,
    config: str | Path | Mapping[str, Any] | None = None,
    layout: MegatronLayout | None = None,
    like: str | Path | None = None,
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
    keep_prediction: bool = False,
    keep_optimizer: bool = False,
    verify: bool = True,
    progress: Callable[[str, int, int], None] | None = None,
    on_plan: Callable[[Plan], None] | None = None,
) -> Conversion:
    """Converts a checkpoint between Megatron, torch and published (safetensors) layout, bit for bit.

    The format of the source is recognised by looking. Values keep their dtypes. Nothing appears at `destination` before
    everything is written and read back; a conversion that was stopped goes on where it was when it is called again.

    **Arguments:**

    - `source`: a Megatron checkpoint (`torch_dist`, `fsdp_dtensor` or `mp_rank_*`; the folder that training saved to,
        or one iteration), a torch distributed checkpoint or `.bin` files with published names, or safetensors.
    - `to`: `"hf"` or `"megatron"`; by default Megatron for safetensors, else published layout.
    - `config`: a `config.json`, the folder with it, or its fields: what the source does not state about the model. What
        both state must agree.
    - `layout`: for Megatron: format, ranks and naming; by default that which the model came from, or one rank.
    - `like`: a Megatron checkpoint whose layout and arguments to take.
    - `max_shard_size`: for published layout: bytes of tensors per file.
    - `overwrite`: whether an existing checkpoint folder may be replaced.
    - `keep_prediction`: keep layers that predict one more token (MTP), under the names after the last layer.
    - `keep_optimizer`: write the optimizer's state of a distributed Megatron checkpoint beside the weights, as
        `optimizer*.safetensors`.
    - `verify`: read back what was written and compare it.
    - `progress`: called with what is going on, bytes done and bytes in all. `on_plan`: called before work begins.

    **Raises:** `CheckpointError` that says what is wrong with the source or destination; then nothing was written.
    """
    started = time.perf_counter()
    options = Options(to, layout, None if like is None else Path(like), max_shard_size, keep_prediction, keep_optimizer)
    with prepare(source, destination, config=config, options=options, overwrite=overwrite) as prepared:
        plan, output = prepared.plan, prepared.output
        if on_plan is not None:
            on_plan(plan)
        report = progress or (lambda what, done, total: None)
        with stage(destination, prepared.identity, overwrite=overwrite) as staging:
            watch = _write(output, staging, report)
            output.finish(staging.folder, staging.done)
            _carry(prepared.beside, staging.folder)
            verified = _verify(output, staging.folder, watch.checksums, report) if verify else 0
            resumed = staging.resumed
    warnings = [f"{name} has values that are not finite." for name in dict.fromkeys(watch.not_finite)]
    return Conversion(plan, time.perf_counter() - started, resumed, verified, (*plan.notes, *warnings))


@dataclass(frozen=True)
class Options:
    """What is wanted; see `convert`."""

    to: Target | None = None
    layout: MegatronLayout | None = None
    like: Path | None = None
    max_shard_size: int | str = "5GB"
    keep_prediction: bool = False
    keep_optimizer: bool = False


@dataclass(frozen=True)
class Prepared:
    """A conversion that can begin: everything is opened and checked, nothing is written."""

    plan: Plan
    output: Output
    identity: str
    beside: tuple[Path | None, ...]


@contextmanager
def prepare(
    source: str | Path,
    destination: str | Path,
    *,
    config: str | Path | Mapping[str, Any] | None = None,
    options: Options = Options(),
    overwrite: bool = False,
) -> Iterator[Prepared]:
    """Opens a source and plans its conversion. **Raises:** `CheckpointError` as `convert` does."""
    source, destination = Path(source), Path(destination)
    check_destination(destination.resolve(), overwrite)
    _check_apart(source, destination)
    given = read_given_config(config)
    beside = Path(config) if isinstance(config, str | Path) and Path(config).is_dir() else None
    with open_source(source, config=given) as opened:
        wanted = options.to or ("megatron" if opened.kind == "safetensors" else "hf")
        if wanted == "hf":
            output: Output = PublishedOutput(
                opened, options.max_shard_size, options.keep_prediction, options.keep_optimizer
            )
        else:
            if options.keep_optimizer:
                raise CheckpointError("The optimizer's state is only written beside weights in published layout.")
            output = MegatronOutput(opened, options.layout, options.like, options.keep_prediction)
        plan = _plan(opened, output, destination)
        _check_space(destination, sum(plan.files.values()))
        stamps = {name: (opened.folder / name).stat().st_mtime_ns for name in opened.files}
        identity = identity_of(str(source.resolve()), opened.files, stamps, vars(options), given, plan.files)
        yield Prepared(plan, output, identity, (opened.folder, beside))


def _check_apart(source: Path, destination: Path) -> None:
    one, other = source.resolve(), destination.resolve()
    if one == other or one.is_relative_to(other) or (other.is_relative_to(one) and one.is_dir()):
        raise CheckpointError(f"{destination} and {source} lie within one another; choose a destination elsewhere.")


def _plan(opened: Opened, output: Output, destination: Path) -> Plan:
    found = opened.megatron
    return Plan(
        source=opened.path,
        kind=opened.detail,
        destination=destination,
        target=output.target,
        tensors=len(opened.tensors),
        nbytes=opened.nbytes,
        layout={} if found is None else found.run.parallel,
        files=output.files(),
        left_out=dict(opened.left_out),
        notes=tuple(opened.notes),
        iteration=None if found is None else found.run.iteration,
    )


def _check_space(destination: Path, needed: int) -> None:
    place = next(parent for parent in destination.resolve().parents if parent.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise CheckpointError(
            f"{destination} needs {needed:,} bytes, but only {free:,} are free on the disk of {place}. "
            "Free some space, or choose another disk."
        )


def _write(output: Output, staging: Staging, report: Callable[[str, int, int], None]) -> Watch:
    files = output.files()
    total, done = sum(files.values()), 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        report("writing", done, total)

    watch = Watch(advance)
    for file, nbytes in files.items():
        if file in staging.done:
            advance(nbytes)
            watch.checksums |= staging.done[file]["checksums"]
            watch.not_finite += staging.done[file]["not_finite"]
            continue
        fresh = Watch(advance, summed=output.same_names)
        (staging.folder / file).parent.mkdir(parents=True, exist_ok=True)
        with closing(fresh):
            facts = output.write(staging.folder, file, fresh)
        staging.record(file, {**facts, "checksums": fresh.checksums, "not_finite": fresh.not_finite})
        watch.checksums |= fresh.checksums
        watch.not_finite += fresh.not_finite
    return watch


def _carry(folders: tuple[Path | None, ...], destination: Path) -> None:
    """Copies tokenizer and generation files."""
    for folder in folders:
        for name in CARRIED:
            if folder is not None and (folder / name).is_file() and not (destination / name).exists():
                shutil.copyfile(folder / name, destination / name)


def _verify(output: Output, folder: Path, checksums: Mapping[str, int], report: Callable[[str, int, int], None]) -> int:
    """Reads everything back. **Returns:** how many tensors were compared.

    **Raises:** `CheckpointError` if a tensor is not what it should be.
    """
    expected, written = output.originals(), output.tensors(folder)
    if set(expected) != set(written):
        raise CheckpointError(
            f"Written tensors are not those expected: {list_some(sorted(set(expected) ^ set(written)))}."
        )
    total, done = sum(tensor.nbytes for tensor in expected.values()), 0
    for name, tensor in written.items():
        wanted = expected[name]
        if (tensor.shape, tensor.dtype) != (wanted.shape, wanted.dtype):
            raise CheckpointError(
                f"{name} was written as {tensor.dtype} {list(tensor.shape)}; "
                f"expected {wanted.dtype} {list(wanted.shape)}."
            )

    def equal(name: str) -> bool:
        known = checksums.get(name)
        return _checksum(name, written[name]) == (_checksum(name, expected[name]) if known is None else known)

    with ThreadPoolExecutor(READERS) as readers:
        for name, same in zip(written, readers.map(equal, written), strict=True):
            if not same:
                raise CheckpointError(f"{name} does not read back as it was written. Is the disk or memory faulty?")
            done += written[name].nbytes
            report("verifying", done, total)
    return len(written)


def _checksum(name: str, tensor: Blocks) -> int:
    checksum, mirrored = 0, 0
    for piece in tensor.pieces():
        found, length = 0, 0
        for part in piece.parts:
            found = zlib.crc32(part, found)
            length += part.nbytes
            mirrored += part.nbytes
            if mirrored > RELEASE_BYTES:
                tensor.release()
                mirrored = 0
        piece.compare(found, name)
        checksum = crc32_combine(checksum, found, length)
    tensor.release()
    return checksum
