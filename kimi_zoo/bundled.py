"""Weights that come with the package, found by name: from a checkout and from an installed wheel alike."""

import os
from pathlib import Path

from kimi_zoo.checkpoints.files import CheckpointError, list_some


def bundled_weights() -> dict[str, Path]:
    """Name -> folder of every checkpoint that comes with the package, in order of name.

    They lie in `weights/` of a checkout, in `kimi_zoo/weights/` of an installed package.
    """
    package = Path(__file__).resolve().parent
    roots = [package / "weights"]
    if (package.parent / "pyproject.toml").is_file():
        roots.append(package.parent / "weights")
    found = {config.parent.name: config.parent for root in roots for config in root.glob("*/config.json")}
    return dict(sorted(found.items()))


def find_weights(name_or_path: str | os.PathLike[str]) -> Path:
    """The path itself if it exists; otherwise the folder of the bundled weights called `NAME` or `weights/NAME`.

    **Raises:** `CheckpointError` that lists the names there are.
    """
    path = Path(name_or_path)
    if path.exists():
        return path
    bundled = bundled_weights()
    parts = path.parts[1:] if path.parts[:1] == ("weights",) else path.parts
    if len(parts) == 1 and parts[0] in bundled:
        return bundled[parts[0]]
    raise CheckpointError(
        f"{os.fspath(name_or_path)!r} is no file or folder here, nor the name of bundled weights, which are: "
        f"{list_some(list(bundled))}. Names on a hub are not looked up: download the checkpoint and give its folder."
    )
