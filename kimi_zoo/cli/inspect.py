"""`kimi-zoo inspect`: what a checkpoint holds, without loading weights."""

import argparse
import json
import sys

from kimi_zoo.cli.terminal import line_width, printable

DESCRIPTION = """\
Shows what a checkpoint holds: family and configuration, layers, parameters in total and active per token, dtypes,
sizes, memory per sequence. Reads the headers of files only, so it is as fast for 100 GB as for 10 MB.

PATH is a checkpoint folder (safetensors, Megatron, torch), an index, one file, or the name of weights that come with
the package. Tensors of Megatron checkpoints are shown under the names and shapes they have in published layout."""

EPILOG = """\
layers are drawn as one letter each:
  k  Kimi Delta Attention (KDA)    m  multi-head latent attention (MLA)    a  another kind of attention
  small letter: a mixture of experts follows    capital letter: a dense MLP follows

examples:
  kimi-zoo inspect weights/kimi-linear-stdlib-5m
  kimi-zoo inspect ./checkpoint --tensors | grep A_log
  kimi-zoo inspect ./checkpoint --json | jq .parameters

--json prints one object with the keys
  path, format, run (of Megatron), model_type, loaded (whether this version loads the family), config, quantization,
  files, companions, pattern, layers, parameters {total, active}, routing, parts, dtypes, memory_per_sequence,
  notes and, with --tensors, tensors"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser(
        "inspect",
        help="show layers, parameters, dtypes and sizes of a checkpoint",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    parser.add_argument("path", metavar="PATH", help="checkpoint folder or file, or name of bundled weights")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--tensors", action="store_true", help="list every tensor too")


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    from kimi_zoo.bundled import find_weights
    from kimi_zoo.checkpoints.summary import summarize
    from kimi_zoo.cli.report import as_json, sections

    summary = summarize(find_weights(args.path))
    if args.json:
        print(json.dumps(as_json(summary, tensors=args.tensors), ensure_ascii=False))
    else:
        print(printable("\n\n".join(sections(summary, line_width(sys.stdout), tensors=args.tensors))))
    return 0
