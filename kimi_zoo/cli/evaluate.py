"""`kimi-zoo evaluate`: perplexity and bits per byte of a model on data."""

import argparse
import json
import sys

from kimi_zoo.cli.runtime import add_mesh_options, keep_compiled_programs, quiet_libraries, start_devices
from kimi_zoo.cli.terminal import UsageError, complain, is_terminal

DESCRIPTION = """\
Measures how well MODEL predicts data: the mean loss per learned token, its exponential (perplexity), and the bits per
byte of the learned text. Rows are read as "kimi-zoo finetune" reads them, each by itself, packed or not."""

EPILOG = """\
examples:
  kimi-zoo evaluate weights/kimi-linear-stdlib-5m --data examples/data/docstrings.jsonl
  kimi-zoo evaluate MODEL --adapter run/adapter --data held_out.jsonl --json"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser(
        "evaluate",
        help="perplexity and bits per byte on data",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    parser.add_argument("model", metavar="MODEL", help="checkpoint folder, or name of bundled weights")
    add = parser.add_argument
    add("--data", metavar="FILE", nargs="+", required=True, help="files or folders")
    add("--adapter", metavar="DIR", help="a LoRA adapter of the model")
    add("--frozen-weights", choices=("int8", "nf4"), help="measure with weights so rounded")
    add("--seq-length", metavar="N", type=int, default=512, help="longest example (default 512)")
    add("--overlong", choices=("split", "truncate", "drop"), default="split", help="longer examples (default split)")
    add("--batch-size", metavar="N", type=int, default=8, help="rows at a time (default 8)")
    add("--no-packing", action="store_true", help="one example in a row: slower, the same result")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the computation (default float32)")
    add_mesh_options(parser)
    add("--json", action="store_true", help="print one JSON object")
    add("--quiet", action="store_true", help="no progress")


def run(args: argparse.Namespace) -> int:
    """Measures. **Returns:** the exit code."""
    quiet_libraries()
    talks = start_devices(args)
    from kimi_zoo.training.evaluation import evaluate
    from kimi_zoo.training.examples import DataError

    keep_compiled_programs()
    try:
        result = evaluate(
            args.model,
            args.data,
            adapter=args.adapter,
            frozen_weights=args.frozen_weights,
            seq_length=args.seq_length,
            overlong=args.overlong,
            rows=args.batch_size,
            packed=not args.no_packing,
            dtype=args.dtype,
            mesh=args.mesh,
            progress=talks and not args.quiet and is_terminal(sys.stderr),
            warn=complain if talks and not args.quiet else (lambda _text: None),
        )
    except (DataError, ValueError) as error:
        raise UsageError(str(error)) from error
    if not talks:
        return 0
    if args.json:
        print(json.dumps(result))
    else:
        print(f"loss           {result['loss']:.4f} nats per token")
        print(f"perplexity     {result['perplexity']:.3f}")
        print(f"bits per byte  {result['bits_per_byte']:.4f}")
        print(f"tokens         {result['tokens']} learned in {result['examples']} examples, {result['bytes']} bytes")
    return 0
