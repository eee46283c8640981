"""JAX as a command wants it: quiet, and with compiled programs kept between runs."""

import argparse
import logging
import os
import sys
import time
import warnings
from pathlib import Path

from kimi_zoo.cli.terminal import UsageError, complain

_OFF = ("off", "0", "none", "")


def quiet_libraries() -> None:
    """Keeps the log lines and warnings of JAX and others from users; those of this package become short messages.

    Call it before JAX is imported. `KIMI_ZOO_DEBUG=1` leaves everything as it is.
    """
    if os.environ.get("KIMI_ZOO_DEBUG"):
        return
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    for name in ("jax", "absl", "tokamax"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    warnings.filterwarnings("always", category=UserWarning, module=r"kimi_zoo\.")
    warnings.showwarning = lambda message, *_args, **_kwargs: complain(f"warning: {message}")
    logger = logging.getLogger("kimi_zoo")
    logger.addHandler(_Complaints(logging.WARNING))
    logger.propagate = False


class _Complaints(logging.Handler):
    """Log records as messages to the user."""

    def emit(self, record: logging.LogRecord) -> None:
        complain(f"{record.levelname.lower()}: {record.getMessage()}")


def cache_folder() -> Path | None:
    """Where compiled programs are kept; `None` if they are not.

    `KIMI_ZOO_CACHE` names kimi-zoo's cache folder or says `off`; the default is `kimi-zoo` in `XDG_CACHE_HOME`, or in
    `~/.cache`.
    """
    chosen = os.environ.get("KIMI_ZOO_CACHE")
    if chosen is not None:
        return None if chosen.strip().lower() in _OFF else Path(chosen).expanduser() / "xla"
    shared = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(shared) if os.path.isabs(shared) else Path.home() / ".cache"
    except RuntimeError:  # no home
        return None
    return base / "kimi-zoo" / "xla"


def keep_compiled_programs() -> None:
    """Turns JAX's persistent compilation cache on, so that a second start is fast.

    A cache set up through JAX's own `JAX_COMPILATION_CACHE_DIR` is left as it is, and a folder that cannot be written
    means no cache.
    """
    import jax

    folder = cache_folder()
    if folder is None or os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # many small programs add up too


def add_mesh_options(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Adds the options of commands that run on several devices."""
    add = parser.add_argument
    add("--mesh", metavar="AXES", help="devices, as fsdp=4,context=2 (axes: data fsdp expert context heads tensor)")
    add("--distributed", action="store_true", help="join the processes of a job: JAX_COORDINATOR_ADDRESS, SLURM, TPU")


def start_devices(args: argparse.Namespace) -> bool:
    """Joins the processes of the job, if asked to. **Returns:** whether this one writes and talks.

    **Raises:** `UsageError` if the job cannot be found, or there is no mesh to use its devices.
    """
    if not args.distributed:
        return True
    if not args.mesh:
        raise UsageError("--distributed needs --mesh, which says how the devices of all processes are used.")
    from kimi_zoo.parallel.processes import is_first, start_processes

    # libraries that connect processes print to the standard output, which belongs to the result
    own = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(own, "w", encoding=sys.stdout.encoding, errors="replace")
    try:
        start_processes()
    except (ValueError, RuntimeError) as error:
        raise UsageError(str(error)) from error
    return is_first()


def in_a_job() -> bool:
    """Whether this process has joined others."""
    return "jax" in sys.modules and sys.modules["jax"].distributed.is_initialized()


class CompileClock:
    """Counts the seconds in which JAX traced and compiled."""

    def __init__(self):
        import jax.monitoring

        self._spans: list[tuple[float, float]] = []
        jax.monitoring.register_event_duration_secs_listener(self._record)

    def _record(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.startswith("/jax/core/compile/"):
            now = time.perf_counter()
            self._spans.append((now - duration_secs, now))

    def between(self, start: float, end: float) -> float:
        """Seconds of compiling from `start` to `end`, on the clock of `time.perf_counter`."""
        total, reached = 0.0, start
        for begin, finish in sorted(self._spans):  # tracing nests, so spans overlap
            finish = min(finish, end)
            total += max(0.0, finish - max(begin, reached))
            reached = max(reached, finish)
        return total
