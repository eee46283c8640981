"""The stored Megatron cases, unpacked once per run, and what tests do with checkpoints."""

import functools
import json
import shutil
import tarfile
import tempfile
from pathlib import Path

import numpy as np
from helpers import DATA

from kimi_zoo.checkpoints.safetensors import open_checkpoint

ARCHIVE = DATA / "megatron" / "cases.tar.xz"


@functools.cache
def unpacked() -> Path:
    """The folder of all cases."""
    folder = Path(tempfile.mkdtemp(prefix="megatron-cases-"))
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder / "cases"


def case_names() -> list[str]:
    """Names of the good cases."""
    with tarfile.open(ARCHIVE) as archive:
        found = {name.split("/")[1] for name in archive.getnames() if name.endswith("/case.json")}
    return sorted(found - {"malformed"})


def malformed_names() -> list[str]:
    with tarfile.open(ARCHIVE) as archive:
        names = [name.split("/") for name in archive.getnames() if name.endswith("/case.json")]
    return sorted(parts[2] for parts in names if parts[1] == "malformed" and not parts[2].startswith("base_"))


def facts(case: Path) -> dict:
    return json.loads((case / "case.json").read_text())


def copy_of(case: str, folder: Path) -> Path:
    """A copy of a case's Megatron folder that may be changed."""
    return Path(shutil.copytree(unpacked() / case / "megatron", folder / "megatron"))


def tensors_of(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Name -> dtype, shape, bytes of a published checkpoint."""
    with open_checkpoint(folder) as stored:
        return {
            name: (str(info.dtype), info.shape, np.asarray(stored.read(name)).tobytes())
            for name, info in stored.tensors.items()
        }
