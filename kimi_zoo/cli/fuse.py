"""`kimi-zoo fuse`: add a LoRA adapter to the weights of its model."""

import argparse

from kimi_zoo.cli.runtime import quiet_libraries
from kimi_zoo.cli.terminal import complain

DESCRIPTION = """\
Writes MODEL with the deltas of ADAPTER (a folder in PEFT's layout) added to its weights: summed in float32, rounded
once to the stored dtype. The result is an ordinary checkpoint folder."""

EPILOG = """\
examples:
  kimi-zoo fuse weights/kimi-linear-stdlib-5m run/adapter fused && kimi-zoo generate fused "def " """


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser(
        "fuse",
        help="add a LoRA adapter to the weights of its model",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    parser.add_argument("model", metavar="MODEL", help="checkpoint folder, or name of bundled weights")
    parser.add_argument("adapter", metavar="ADAPTER", help="adapter folder")
    parser.add_argument("output", metavar="OUTPUT", help="folder to write")
    parser.add_argument(
        "--frozen-weights",
        choices=("int8", "nf4"),
        help="what the adapter was trained beside: round the weights so first (default: as they are stored)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a checkpoint in OUTPUT")
    parser.add_argument("--quiet", action="store_true", help="say nothing")


def run(args: argparse.Namespace) -> int:
    """Fuses. **Returns:** the exit code."""
    quiet_libraries()
    from kimi_zoo.training.run import fuse

    fuse(args.model, args.adapter, args.output, frozen_weights=args.frozen_weights, overwrite=args.overwrite)
    if not args.quiet:
        complain(f"written: {args.output}")
    return 0
