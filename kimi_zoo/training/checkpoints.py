"""Checkpoints of a run by orbax: written in the background, whole or not at all; the last few and the best are kept."""

import errno
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np

from kimi_zoo.checkpoints.files import CheckpointError, list_some


@final
class RunCheckpoints:
    """The checkpoints in a folder, by step. Use it as a context: leaving it waits until all are written."""

    def __init__(self, folder: Path, *, keep: int = 2):
        """**Arguments:** `keep`: how many of the latest are kept, beside the one with the least `validation_loss`."""
        absl = logging.getLogger("absl")
        absl.setLevel(max(absl.level, logging.ERROR))  # orbax tells of every file
        import orbax.checkpoint as ocp
        from orbax.checkpoint import checkpoint_managers as managers

        best = managers.BestN(
            get_metric_fn=lambda metrics: -metrics["validation_loss"], n=1, keep_checkpoints_without_metrics=False
        )
        policy = managers.AnyPreservationPolicy([managers.LatestN(keep), best])
        options = ocp.CheckpointManagerOptions(preservation_policy=policy, cleanup_tmp_directories=True)
        self._folder = folder
        handler = ocp.StandardCheckpointHandler()
        self._manager = ocp.CheckpointManager(folder.resolve(), options=options, item_handlers=handler)

    def __enter__(self) -> "RunCheckpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        if kind in (None, KeyboardInterrupt) or jax.process_count() == 1:  # closing waits for all processes
            with self._writing():
                self._manager.close()

    def steps(self) -> list[int]:
        """The steps of which there is a whole checkpoint, ascending."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, validation_loss: float | None = None) -> None:
        """Starts writing a state; the arrays are copied first, so the state may be donated at once.

        **Raises:** `OSError` if this or an earlier one cannot be written.
        """
        import orbax.checkpoint as ocp

        metrics = None if validation_loss is None else {"validation_loss": validation_loss}
        with self._writing():
            self._manager.save(step, args=ocp.args.StandardSave(named_leaves(state)), metrics=metrics)

    def wait(self) -> None:
        """Returns when everything is written. **Raises:** as `save`."""
        with self._writing():
            self._manager.wait_until_finished()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Makes one `OSError` of the many that a full disk is told by."""
        try:
            yield
        except (OSError, ValueError) as error:  # tensorstore's are a ValueError
            number = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
            told = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise OSError(number, f"the checkpoint cannot be written: {told}", str(self._folder)) from error

    def restore(self, step: int, like: Any) -> Any:
        """The state of a step, in the structure, dtypes and sharding of `like`.

        **Raises:** `CheckpointError` naming what the checkpoint lacks, holds beyond it, or holds in another shape.
        """
        import orbax.checkpoint as ocp

        wanted = named_leaves(like)
        try:
            found = self._manager.item_metadata(step)
            stored = {} if found is None else dict(found.items())
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"The checkpoint {self._folder / str(step)} cannot be read: {error}.") from None
        problems = []
        for what, names in (("lacks", wanted.keys() - stored.keys()), ("also has", stored.keys() - wanted.keys())):
            if names:
                problems.append(f"it {what} {list_some(sorted(names))}")
        for name in wanted.keys() & stored.keys():
            if tuple(stored[name].shape) != wanted[name].shape:
                problems.append(f"{name} has shape {tuple(stored[name].shape)}, not {wanted[name].shape}")
        if problems:
            text = "; ".join(problems)
            raise CheckpointError(f"The checkpoint {self._folder / str(step)} is not one of this run: {text}.")
        values = self._manager.restore(step, args=ocp.args.StandardRestore(jax.tree.map(_abstract, wanted)))
        arrays, static = eqx.partition(like, eqx.is_array)
        names = [_name(path) for path, _ in jtu.tree_leaves_with_path(arrays)]
        restored = jax.tree.unflatten(jax.tree.structure(arrays), [values[name] for name in names])
        return eqx.combine(restored, static)


def named_leaves(tree: Any) -> dict[str, Any]:
    """The arrays of a tree by the text of their paths."""
    arrays = eqx.filter(tree, eqx.is_array)
    return {_name(path): leaf for path, leaf in jtu.tree_leaves_with_path(arrays)}


def _name(path: tuple) -> str:
    return jtu.keystr(path, simple=True, separator=".")


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = leaf.sharding if isinstance(leaf, jax.Array) else None
    return jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype, sharding=sharding)
