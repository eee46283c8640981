"""Several processes as one: starting them, what one of them does for all, and values that all agree on."""

import os
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from kimi_zoo.parallel.axes import Parallelism


class LostProcessError(RuntimeError):
    """Another process of the job ended, so that nothing can be computed together any more."""


# words of the libraries that connect processes; the errors come as several types
_BROKEN = ("Gloo", "NCCL", "UNAVAILABLE", "ABORTED", "heartbeat", "Connection closed", "Connection reset")


def is_lost_process(error: BaseException) -> bool:
    """Whether an error says that another process of the job is gone."""
    return jax.process_count() > 1 and any(word in str(error) for word in _BROKEN)


def start_processes() -> None:
    """Joins the processes of a job, by `jax.distributed.initialize`; call it before anything else of JAX.

    They are found from `JAX_COORDINATOR_ADDRESS` (host:port), `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`, or else as JAX
    finds them: under SLURM, Open MPI, Kubernetes, and on Cloud TPUs.

    **Raises:** `ValueError` for variables that are not whole, or if nothing says which processes there are.
    """
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    given = {name: os.environ[name] for name in names if os.environ.get(name)}
    if given and len(given) < len(names):
        missing = ", ".join(name for name in names if name not in given)
        raise ValueError(f"{', '.join(given)} is set, but not {missing}: set all three, or none.")
    try:
        if given:
            address, count, index = given.values()
            jax.distributed.initialize(address, int(count), int(index))
        else:
            jax.distributed.initialize()
    except ValueError as error:
        raise ValueError(
            f"The processes of this job cannot be found ({str(error).rstrip('.')}). Set {', '.join(names)}, or start "
            "them with SLURM, Open MPI or on Cloud TPUs, which JAX knows."
        ) from None


def is_first() -> bool:
    """Whether this is the process that writes files and talks."""
    return jax.process_index() == 0


def wait_for_all(reason: str) -> None:
    """Returns when every process has come here."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(reason)


def any_process(flag: bool) -> bool:
    """Whether the flag is set in any process; every process must ask."""
    if jax.process_count() == 1:
        return flag
    from jax.experimental import multihost_utils

    return bool(np.any(multihost_utils.process_allgather(np.asarray(flag))))


def whole_value(array: Any) -> np.ndarray:
    """The values of an array, also of one that is spread over processes; every process must ask."""
    if not isinstance(array, jax.Array) or array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def spread_tokens(tree: Any, parallelism: Parallelism | None, *, leading: int = 0) -> Any:
    """Arrays `[..., batch, seq]` that every process holds, spread over the mesh; each device gets its part.

    **Arguments:** `leading`: axes before the batch.

    **Raises:** `ValueError` for a batch that the mesh cannot split evenly.
    """
    if parallelism is None:
        return tree
    spec = parallelism.axes.token_spec()
    sharding = NamedSharding(parallelism.mesh, type(spec)(*[None] * leading, *spec))

    def spread(array: np.ndarray) -> jax.Array:
        parallelism.check_tokens(*array.shape[leading : leading + 2])
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    return jax.tree.map(spread, tree)
