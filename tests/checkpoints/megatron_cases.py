"""The stored Megatron cases, unpacked once per run, and what tests do with checkpoints."""

import functools
import json
import shutil
import tarfile
import tempfile
from pathlib import Path

import numpy as np
from helpers import DATA

from kimi_zoo.checkpoints.configs import write_config
from kimi_zoo.checkpoints.files import write_json
from kimi_zoo.checkpoints.megatron_output import published_shapes
from kimi_zoo.checkpoints.safetensors import open_checkpoint, save_tensors

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


def random_model(folder, config, dtype, seed=0):
    """A random checkpoint in published layout."""
    draw = np.random.default_rng(seed)
    tensors = {}
    for name, shape in published_shapes(config).items():
        wide = name.endswith(("A_log", "dt_bias", "e_score_correction_bias"))
        tensors[name] = draw.standard_normal(shape).astype(np.float32 if wide else dtype)
    save_tensors(tensors, folder)
    write_json(folder / "config.json", write_config(config, None, np.dtype(dtype).name))
    return folder
