"""`kimi-zoo convert`: between Megatron, torch and published checkpoints, without torch."""

import argparse
import dataclasses
import json
import sys
from typing import Any

from kimi_zoo.cli.terminal import complain, is_terminal, printable

DESCRIPTION = """\
Converts a checkpoint bit for bit. What SOURCE is, is found out by looking:
  Megatron      torch_dist, fsdp_dtensor or mp_rank_* folders: what training saved to, or one iteration of it
  torch         distributed checkpoints (.metadata, *.distcp) and *.bin files with published names
  published     config.json and safetensors

Nothing in a pickle is executed. Nothing appears at DESTINATION before everything is written and read back. A conversion
that was stopped goes on when the same command is run again."""

EPILOG = """\
examples:
  kimi-zoo convert ./run/checkpoints ./published                       Megatron to safetensors
  kimi-zoo convert ./run/checkpoints ./published --config config.json  when the checkpoint holds no arguments
  kimi-zoo convert ./published ./megatron --tp 2 --pp 4 --ep 8         and back
  kimi-zoo convert ./published ./megatron --like ./run/checkpoints     laid out as another checkpoint
  kimi-zoo convert ./run/checkpoints ./published --plan                what would be done

--json prints one object with the keys
  source, kind, iteration, layout, destination, target, tensors, bytes, files, left_out, seconds, resumed_files,
  verified_tensors, warnings"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser(
        "convert",
        help="convert Megatron and torch checkpoints to safetensors, and back",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    parser.add_argument("source", metavar="SOURCE", help="checkpoint to read, or name of bundled weights")
    parser.add_argument("destination", metavar="DESTINATION", help="folder to write")
    parser.add_argument(
        "--to", choices=("hf", "megatron"), help="layout to write (default: hf, or megatron if SOURCE is safetensors)"
    )
    parser.add_argument(
        "--config", metavar="PATH", help="config.json, or its folder: what SOURCE does not state about the model"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing checkpoint at DESTINATION")
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of safetensors files (default 5GB)")
    parser.add_argument(
        "--keep-mtp", action="store_true", help="keep layers that predict one more token, after the last layer"
    )
    parser.add_argument(
        "--keep-optimizer", action="store_true", help="write the optimizer's state too, as optimizer*.safetensors"
    )
    parser.add_argument("--no-verify", action="store_true", help="do not read back what was written")
    parser.add_argument("--plan", action="store_true", help="show what would be done, and stop")
    parser.add_argument("--quiet", action="store_true", help="no plan, no progress bar, no summary")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    group = parser.add_argument_group("layout of Megatron checkpoints to write (default: as the model had before)")
    group.add_argument("--format", choices=("torch_dist", "legacy"), help="legacy: mp_rank_* folders")
    for name, text in (
        ("tp", "tensor parallel ranks"),
        ("pp", "pipeline parallel ranks"),
        ("ep", "expert parallel ranks"),
        ("etp", "expert tensor parallel ranks: as many as --tp, or 1"),
        ("vpp", "virtual pipeline stages per rank"),
    ):
        group.add_argument(f"--{name}", type=int, metavar="N", help=text)
    group.add_argument("--stack", choices=("gpt", "hybrid"), help="numbering of layers")
    group.add_argument(
        "--experts",
        choices=("te_grouped", "sequential", "grouped", "singleton"),
        help="names of experts: the first three in legacy, the last in torch_dist (which else stacks them)",
    )
    group.add_argument("--norms", choices=("fused", "separate"), help="names of norms before a projection")
    group.add_argument("--vocab-multiple", type=int, metavar="N", help="pad the vocabulary to N times --tp")
    group.add_argument("--iteration", type=int, metavar="N", help="number of the iteration; 0 writes a release")
    group.add_argument("--like", metavar="PATH", help="a Megatron checkpoint whose layout and arguments to take")


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    from kimi_zoo.bundled import find_weights
    from kimi_zoo.checkpoints.convert import Options, convert, prepare
    from kimi_zoo.checkpoints.megatron_layout import MegatronLayout

    layout = MegatronLayout(**{f.name: getattr(args, f.name) for f in dataclasses.fields(MegatronLayout)})
    source = find_weights(args.source)
    if args.plan:
        options = Options(args.to, layout, args.like, args.max_shard_size, args.keep_mtp, args.keep_optimizer)
        with prepare(
            source, args.destination, config=args.config, options=options, overwrite=args.overwrite
        ) as prepared:
            if args.json:
                print(json.dumps(_as_json(prepared.plan)))
            else:
                print(printable("\n".join(prepared.plan.lines())))
        return 0
    bar = _Bar(wanted=not args.quiet and is_terminal(sys.stderr))
    show = lambda plan: None if args.quiet else print(printable("\n".join(plan.lines())), file=sys.stderr)
    try:
        done = convert(
            source,
            args.destination,
            to=args.to,
            config=args.config,
            layout=layout,
            like=args.like,
            max_shard_size=args.max_shard_size,
            overwrite=args.overwrite,
            keep_prediction=args.keep_mtp,
            keep_optimizer=args.keep_optimizer,
            verify=not args.no_verify,
            progress=bar.show,
            on_plan=show,
        )
    except KeyboardInterrupt:
        bar.close()
        complain("stopped; finished files are kept, and the same command goes on from there.")
        raise
    finally:
        bar.close()
    for warning in done.warnings[len(done.plan.notes) :]:
        complain(f"warning: {warning}")
    if args.json:
        facts = {"seconds": done.seconds, "resumed_files": done.resumed, "verified_tensors": done.verified}
        print(json.dumps({**_as_json(done.plan), **facts, "warnings": list(done.warnings)}))
    elif not args.quiet:
        print(_summary(done))
    return 0


def _as_json(plan: Any) -> dict[str, Any]:
    return {
        "source": str(plan.source),
        "kind": plan.kind,
        "iteration": plan.iteration,
        "layout": plan.layout,
        "destination": str(plan.destination),
        "target": plan.target,
        "tensors": plan.tensors,
        "bytes": plan.nbytes,
        "files": plan.files,
        "left_out": plan.left_out,
    }


def _summary(done: Any) -> str:
    from kimi_zoo.cli.terminal import byte_text

    size = sum(done.plan.files.values())
    speed = f", {byte_text(int(size / done.seconds))}/s" if done.seconds > 1 else ""
    resumed = f", {done.resumed} files from before" if done.resumed else ""
    verified = f"; {done.verified} tensors read back equal" if done.verified else ""
    return (
        f"wrote {done.plan.destination}: {done.plan.tensors} tensors, {byte_text(size)} in {done.seconds:.1f} s{speed}"
        f"{resumed}{verified}"
    )


class _Bar:
    """A progress bar per stage of the work."""

    def __init__(self, *, wanted: bool):
        self.wanted, self.bar, self.stage = wanted, None, ""

    def show(self, stage: str, done: int, total: int) -> None:
        if not self.wanted:
            return
        if stage != self.stage:
            from tqdm import tqdm

            self.close()
            self.stage, self.bar = stage, tqdm(total=total, unit="B", unit_scale=True, desc=stage, leave=False)
        if self.bar is not None:
            self.bar.update(done - self.bar.n)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar, self.stage = None, ""
