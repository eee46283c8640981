"""The command `kimi-zoo`: one thin module per command, which parses arguments, calls the library and prints.

A command's module has `add_parser(commands)` and `run(args) -> int`. It is imported for `--help` too, so it imports
whatever takes time (JAX, numpy, the library) inside `run`.
"""

import argparse
import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import override

from kimi_zoo.cli.runtime import in_a_job
from kimi_zoo.cli.terminal import UsageError, complain, drop_output

COMMANDS = ("generate", "inspect", "convert", "finetune", "evaluate", "fuse")

OK, FAILED, BAD_INPUT, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 130, 141

DESCRIPTION = """\
Hybrid linear-attention language models: continue a text with one, look into a checkpoint, convert one.

A MODEL is a checkpoint folder (config.json, safetensors files, a tokenizer) or the name of weights that come with the
package."""

EPILOG = """\
examples:
  kimi-zoo generate weights/kimi-linear-stdlib-5m "def "      continue a text with the bundled model
  kimi-zoo generate ./Kimi-Linear-48B-A3B-Base "Once"         the same with a checkpoint on disk
  kimi-zoo inspect weights/kimi-linear-stdlib-5m              layers, parameters, sizes; loads no weights
  kimi-zoo convert ./megatron-checkpoint ./converted          from Megatron or torch to safetensors, and back
  kimi-zoo COMMAND --help                                     all options of a command, with examples

exit codes:
  0  done    1  failed while running    2  the command or its input cannot be used
  130  stopped with Ctrl-C    141  the reader of the output went away

environment:
  KIMI_ZOO_CACHE  folder for compiled programs (default ~/.cache/kimi-zoo), or "off"
  KIMI_ZOO_DEBUG  1: show tracebacks, warnings and the logs of JAX"""


class _Version(argparse.Action):
    """Looks the version up only when it is asked for."""

    @override
    def __call__(self, parser, namespace, values, option_string=None):
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"kimi-zoo {version('kimi-zoo')}")
        except PackageNotFoundError:
            print("kimi-zoo, not installed: run from its source")
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; `args.run(args)` then runs the command that was chosen."""
    parser = argparse.ArgumentParser(
        prog="kimi-zoo",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in COMMANDS:
        importlib.import_module(f"kimi_zoo.cli.{name}").add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (default: that of the process). **Returns:** the exit code."""
    if sys.stderr is None:  # closed by the caller, as stdout may be
        sys.stderr = io.StringIO()
    if sys.stdout is None:
        complain("stdout is closed, so there is nowhere to write to.")
        return FAILED
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character gets another one, not an error
    code = _run(argv)
    if code and in_a_job():  # an orderly exit would wait for the other processes, which may wait for this one
        sys.stderr.flush()
        os._exit(code)
    return code


def _run(argv: Sequence[str] | None) -> int:
    try:
        try:
            args = build_parser().parse_args(argv)
            return args.run(args)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        drop_output()
        return PIPE_CLOSED
    except Exception as error:
        if os.environ.get("KIMI_ZOO_DEBUG"):
            if not in_a_job():
                raise
            traceback.print_exc()
        return _report(error)


def _report(error: Exception) -> int:
    """Says what went wrong in one message. **Returns:** the exit code."""
    from kimi_zoo.checkpoints.files import CheckpointError

    if in_a_job():
        from kimi_zoo.parallel.processes import LostProcessError, is_lost_process

        if isinstance(error, LostProcessError) or is_lost_process(error):
            complain(f"{error}\nIf another process of the job ended first, its messages say why.")
            return FAILED
    if isinstance(error, UsageError | CheckpointError):
        complain(str(error))
        return BAD_INPUT
    reason = str(error) or "no further message"
    complain(f"{type(error).__name__}: {reason}\n(KIMI_ZOO_DEBUG=1 shows where it happened.)")
    return FAILED
