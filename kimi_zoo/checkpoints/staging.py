"""A folder that is written file by file, can be continued after a stop, and appears under its name whole or not at all.

Files go to a hidden folder beside the destination, with a journal of those that are finished. Whoever writes the same
thing to the same destination again finds them and goes on; anything else starts anew.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kimi_zoo.checkpoints.files import CheckpointError, check_destination

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None

JOURNAL = "journal.jsonl"


@dataclass
class Staging:
    """What is being written: `folder` takes its files, `done` has a record of each finished one."""

    folder: Path
    journal: Path
    done: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def resumed(self) -> int:
        """How many files were finished before."""
        return self._resumed

    _resumed: int = 0

    def record(self, file: str, facts: dict[str, Any]) -> None:
        """Notes that a file is finished."""
        self.done[file] = facts
        with open(self.journal, "a", encoding="utf-8") as journal:
            journal.write(json.dumps({"file": file, "size": self._size(file), **facts}) + "\n")
            journal.flush()
            os.fsync(journal.fileno())

    def _size(self, file: str) -> int:
        return (self.folder / file).stat().st_size

    def recall(self, identity: str) -> bool:
        """Takes up what the journal says is finished. **Returns:** whether it is about the same thing."""
        try:
            lines = [json.loads(line) for line in self.journal.read_text("utf-8").splitlines()]
        except (OSError, ValueError):  # the last line may be half written
            lines = _readable(self.journal)
        if not lines or lines[0].get("identity") != identity:
            return False
        for line in lines[1:]:
            path = self.folder / str(line.get("file"))
            if path.is_file() and path.stat().st_size == line.get("size"):
                self.done[line["file"]] = {k: v for k, v in line.items() if k not in ("file", "size")}
        for path in [path for path in self.folder.rglob("*") if path.is_file()]:
            if path.relative_to(self.folder).as_posix() not in self.done:  # left by a process that was killed
                path.unlink()
        self._resumed = len(self.done)
        return True


def _readable(journal: Path) -> list[dict[str, Any]]:
    lines = []
    with contextlib.suppress(OSError, ValueError):
        for line in journal.read_bytes().splitlines():
            lines.append(json.loads(line))
    return lines


def identity_of(*parts: Any) -> str:
    """A short text that is the same for the same values only."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def partial_folder(destination: Path) -> Path:
    """Where the files are until all are there."""
    return destination.parent / f".{destination.name}.partial"


@contextmanager
def stage(destination: str | os.PathLike[str], identity: str, *, overwrite: bool = False) -> Iterator[Staging]:
    """Gives a place to fill; on success it takes the name `destination`.

    After an interruption or a failure of the system (a full disk, for instance) finished files stay for the next time;
    after a `CheckpointError` nothing stays.

    **Raises:** `CheckpointError` before any work if the destination may not be written or someone else is writing it.
    """
    destination = Path(os.path.realpath(destination))
    check_destination(destination, overwrite)
    destination.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_folder(destination)
    partial.mkdir(exist_ok=True)
    with _lock(partial, destination):
        staging = Staging(partial / "new", partial / JOURNAL)
        if not staging.recall(identity):
            for entry in (staging.folder, partial / "old"):
                shutil.rmtree(entry, ignore_errors=True)
            staging.done.clear()
            staging.journal.write_text(json.dumps({"identity": identity}) + "\n", "utf-8")
        staging.folder.mkdir(exist_ok=True)
        try:
            yield staging
            _commit(staging.folder, partial, destination, overwrite)
        except CheckpointError:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise DiskFull(
                f"The disk of {destination.parent} is full. {destination} was not written; {len(staging.done)} "
                f"finished files are kept in {partial}. Free some space and run the same command again to go on, or "
                "delete that folder."
            ) from None


class DiskFull(OSError):
    """There is no space left; what is finished is kept."""


def _commit(folder: Path, partial: Path, destination: Path, overwrite: bool) -> None:
    for root, _, _ in os.walk(folder):
        _fsync(Path(root))
    check_destination(destination, overwrite)  # someone may have filled it in the meantime
    replaced = partial / "old"
    try:
        if destination.exists():
            os.rename(destination, replaced)
        os.rename(folder, destination)
    except OSError:
        if replaced.exists() and not destination.exists():
            os.rename(replaced, destination)
        raise
    _fsync(destination.parent)
    shutil.rmtree(partial, ignore_errors=True)


def _fsync(folder: Path) -> None:
    with contextlib.suppress(OSError):  # not every system opens folders
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def _lock(partial: Path, destination: Path) -> Iterator[None]:
    with open(partial / "lock", "w") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise CheckpointError(f"{destination} is being written by another process.") from None
        yield
