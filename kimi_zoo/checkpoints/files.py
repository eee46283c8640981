"""Files of a checkpoint folder: JSON with helpful errors, files and folders that appear whole or not at all."""

import io
import json
import mmap
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

# files beside the weights that belong to the model for its users; copied as they are, never run
CARRIED = """
    generation_config.json tokenizer.json tokenizer_config.json tiktoken.model tokenizer.model special_tokens_map.json
    added_tokens.json vocab.json merges.txt chat_template.jinja chat_template.json
    """.split()

# files that only a checkpoint folder holds
_MARKS = ("config.json", ".metadata", "latest_checkpointed_iteration.txt")


class CheckpointError(ValueError):
    """A checkpoint file or folder that cannot be read or written; the message says which, why, and what to do."""


def parse_json_object(text: str, source: str) -> dict[str, Any]:
    """Returns the JSON object in `text`; `source` is what errors call it (a file path).

    **Raises:** `CheckpointError` with line and column if it is not JSON, if it is not an object, or if a key appears
    twice in one object, where readers differ in which of the two they keep.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        raise CheckpointError(_describe_json_error(text, source, error)) from None
    except (ValueError, RecursionError) as error:  # repeated key, endless digits, endless nesting
        raise CheckpointError(f"{source} is not usable JSON: {error}.") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{source} must hold a JSON object, {{...}}; it holds a {type(value).__name__}.")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {repeated!r} appears twice")
    return result


def _describe_json_error(text: str, source: str, error: json.JSONDecodeError) -> str:
    position, reason = error.pos, error.msg
    closing = re.compile(r"[,\s]*([}\]])").match(text, position)
    if closing and "," in (
        text[:position].rstrip()[-1:],
        text[position],
    ):  # Python 3.13 points at the comma, 3.12 past it
        position, reason = closing.start(1), f"there is a comma before this closing {closing[1]!r}"
    line = text.count("\n", 0, position) + 1
    column = position - text.rfind("\n", 0, position)
    shown = text.splitlines()[line - 1].strip()[:80] if line <= len(text.splitlines()) else ""
    return f"{source} is not valid JSON: line {line}, column {column}: {reason} (the line reads {shown!r})."


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the object in a JSON file such as `config.json`.

    **Raises:** `CheckpointError` naming file, line and column if it cannot be parsed.
    """
    path = Path(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{path} is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}."
        ) from None
    return parse_json_object(text, str(path))


def write_json(path: str | os.PathLike[str], value: dict[str, Any]) -> None:
    """Writes `value` as indented UTF-8 JSON, keys in their given order; the file appears whole or not at all."""
    with atomic_file(path) as file:
        file.write((json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def parse_size(size: int | str) -> int:
    """Returns a number of bytes: `5_000_000_000` and `"5GB"` are the same, `"5GiB"` counts in powers of 1024."""
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B\s*", size, re.IGNORECASE)
        if match is None:
            raise ValueError(f'A size is a number of bytes or text such as "200MB", "5GB" or "4GiB"; got {size!r}.')
        number, unit, binary = match.groups()
        size = int(float(number) * (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " "))
    if size <= 0:
        raise ValueError(f"A size must be more than 0 bytes; got {size}.")
    return size


@contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Opens a temporary sibling for writing; on success it takes the name `path`, on an exception it is removed.

    Readers see the old file or the new one, never a part; whoever still maps the old file keeps its old content.
    """
    path = Path(path)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with _FlowingFile(handle, "wb") as raw, io.BufferedWriter(raw) as file:
            yield file
            file.flush()
            raw.settle()
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp made it private
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        if (
            isinstance(error, OSError) and error.errno is not None and error.filename is None
        ):  # that of a full disk names no file
            error.filename = str(path)  # that of a full disk names none
        raise
    _fsync_folder(path.parent)


FLOWING_BYTES = 1 << 26


class _FlowingFile(io.FileIO):
    """A file that goes to disk while it is being written, so that little is left to wait for at its end."""

    def __init__(self, handle: int, mode: str):
        super().__init__(handle, mode)
        self._waiting, self._thread = 0, ThreadPoolExecutor(1)
        self._flushing: Future[None] | None = None

    def write(self, data: Any) -> int:
        written = super().write(data)
        self._waiting += written
        if self._waiting >= FLOWING_BYTES and (self._flushing is None or self._flushing.done()):
            self._flushed()
            self._flushing, self._waiting = self._thread.submit(os.fsync, self.fileno()), 0
        return written

    def settle(self) -> None:
        """Returns when everything is on disk. **Raises:** `OSError` if that fails or failed before."""
        self._flushed()
        os.fsync(self.fileno())

    def _flushed(self) -> None:
        if self._flushing is not None:
            self._flushing.result()  # the system reports a failure once

    def close(self) -> None:
        self._thread.shutdown()
        super().close()


@contextmanager
def atomic_folder(destination: str | os.PathLike[str], *, overwrite: bool = False) -> Iterator[Path]:
    """Gives a temporary sibling folder to fill; on success it takes the name `destination`, on an exception it goes.

    With `overwrite`, an existing checkpoint folder stays in place until the new one is complete and is then replaced
    as a whole (no file of it is carried over); if anything fails, it is still there.

    **Raises:** `CheckpointError` before any work if `destination` is a file, is a folder with something in it and
    `overwrite` is false, or is a folder that does not look like a checkpoint (no `config.json`, safetensors file or the
    like in it, or a `.git` in it), which is never removed; or if its name is empty or it cannot be
    made.
    """
    if not os.fspath(destination):
        raise CheckpointError("The folder to write to has an empty name.")
    destination = Path(os.path.realpath(destination))
    check_destination(destination, overwrite)
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", suffix=".tmp", dir=destination.parent))
    except OSError as error:  # a file where a folder should be, no permission, a full disk
        raise CheckpointError(f"{destination} cannot be made in {destination.parent}: {error.strerror}.") from None
    folder, replaced = scratch / "new", scratch / "old"
    try:
        folder.mkdir()
        yield folder
        _fsync_tree(folder)
        check_destination(destination, overwrite)  # someone may have filled it in the meantime
        if destination.exists():
            os.rename(destination, replaced)
        os.rename(folder, destination)
        _fsync_folder(destination.parent)
    finally:
        if replaced.exists() and not destination.exists():
            os.rename(replaced, destination)
        shutil.rmtree(scratch, ignore_errors=True)


def check_destination(destination: Path, overwrite: bool) -> None:
    """Checks that a checkpoint folder may be written; see `atomic_folder`."""
    if not os.path.lexists(destination):
        return
    if not destination.is_dir():
        raise CheckpointError(f"{destination} is a file; a checkpoint is written to a folder. Choose another name.")
    present = sorted(entry.name for entry in destination.iterdir())
    if present and not overwrite:
        raise CheckpointError(
            f"{destination} exists and is not empty; it holds {list_some(present)}. "
            "Choose another folder, or pass overwrite=True to replace it."
        )
    looks_like_checkpoint = any(name in _MARKS or name.endswith((".safetensors", ".distcp")) for name in present)
    if present and (not looks_like_checkpoint or ".git" in present):
        raise CheckpointError(
            f"{destination} is not replaced even with overwrite=True: it does not look like a plain checkpoint folder. "
            f"It holds {list_some(present)}. Choose another folder, or remove it yourself."
        )


def _fsync_tree(folder: Path) -> None:
    for root, _, names in os.walk(folder):
        for name in names:
            _fsync(os.path.join(root, name))
        _fsync_folder(root)


def _fsync_folder(folder: str | os.PathLike[str]) -> None:
    with suppress(OSError):  # not every system opens folders
        _fsync(folder)


def _fsync(path: str | os.PathLike[str]) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def list_some(names: list[str], limit: int = 20) -> str:
    """Returns the first `limit` names for an error message, with the number of those left out."""
    shown = ", ".join(str(name) for name in names[:limit])
    return shown + (f", and {len(names) - limit} more" if len(names) > limit else "") if names else "nothing"


def join_problems(problems: list[str], limit: int = 20) -> str:
    """Returns the first `limit` problems for an error message, one a line, with the number of those left out."""
    return "\n".join(problems[:limit]) + (f"\n... and {len(problems) - limit} more" if len(problems) > limit else "")


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns an uninitialised array whose data starts at a multiple of 64 bytes, which JAX on CPU adopts as it is."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    storage = np.empty(nbytes + 63, np.uint8)
    start = -storage.ctypes.data % 64
    return storage[start : start + nbytes].view(dtype).reshape(shape)


MAPPED_AROUND = 1 << 21  # bytes that the system maps at once where one is looked at: a huge page


def release_pages(mapping: mmap.mmap, start: int, size: int) -> None:
    """Gives back the memory that mirrors these bytes of a mapped file, and what the system maps around them.

    Mapped pages count as resident memory once they are looked at; views stay valid and read the file again.
    """
    if hasattr(mmap, "MADV_DONTNEED") and size:  # elsewhere the system decides alone
        begin = max(0, start - MAPPED_AROUND)
        begin -= begin % mmap.PAGESIZE
        mapping.madvise(mmap.MADV_DONTNEED, begin, min(len(mapping), start + size + MAPPED_AROUND) - begin)
