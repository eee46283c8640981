"""`kimi-zoo finetune`: from a model and data files to a better checkpoint."""

import argparse
import json
import sys
from typing import Any

from kimi_zoo.cli.runtime import add_mesh_options, keep_compiled_programs, quiet_libraries, start_devices
from kimi_zoo.cli.terminal import UsageError, complain, is_terminal

DESCRIPTION = """\
Trains MODEL on data and writes everything into one folder: the model in published layout (or, with --lora, an adapter
in PEFT's), metrics.jsonl, loss.png and checkpoints. Stopped at any moment, --resume goes on to the same result.

Data files are .txt, .jsonl, .json or .parquet; folders stand for all such files in them. A row has "text" (all is
learned), "prompt" and "completion" (the completion is learned), or "messages" (what the assistant says is learned)."""

EPILOG = """\
examples:
  kimi-zoo finetune weights/kimi-linear-stdlib-5m --data examples/data/docstrings.jsonl --output run
  kimi-zoo finetune MODEL --data chats.jsonl --output run --lora 16 --epochs 3
  kimi-zoo finetune MODEL --data texts/ --output run --steps 500 --dtype bfloat16 --remat full --resume
  kimi-zoo finetune MODEL --data texts/ --output run --mesh fsdp=4,context=2 --dtype bfloat16
  kimi-zoo generate run/model "def "
  kimi-zoo fuse MODEL run/adapter fused

Patterns (--train, --freeze, --lora-targets) are of published names, as "kimi-zoo inspect" shows them, from any dot on:
  q_proj   self_attn.*_proj   model.layers.3.*   A_log   *norm.weight"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser(
        "finetune",
        help="train a model on text, prompts or chats",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    parser.add_argument("model", metavar="MODEL", help="checkpoint folder, or name of bundled weights")
    add = parser.add_argument_group("data").add_argument
    add("--data", metavar="FILE", nargs="+", required=True, help="files or folders to learn from")
    add("--validation-data", metavar="FILE", nargs="+", default=[], help="files or folders to judge by")
    add("--validation", metavar="SHARE", type=float, default=0.05, help="share of --data held out (default 0.05)")
    add("--seq-length", metavar="N", type=int, default=512, help="tokens in a row (default 512)")
    add("--overlong", choices=("split", "truncate", "drop"), default="split", help="longer examples (default split)")
    add("--no-packing", action="store_true", help="one example in a row")
    add = parser.add_argument_group("run").add_argument
    add("--output", metavar="DIR", required=True, help="folder of the run")
    add("--steps", metavar="N", type=int, help="optimizer steps")
    add("--epochs", metavar="N", type=int, help="passes over the data (default 1)")
    add("--seed", metavar="S", type=int, default=0, help="of shuffling and initialising (default 0)")
    add("--save-every", metavar="N", type=int, default=100, help="steps between checkpoints (default 100)")
    add("--keep", metavar="K", type=int, default=2, help="latest checkpoints kept beside the best (default 2)")
    add("--evaluate-every", metavar="N", type=int, help="steps between looks at the held-out loss (default: 10 in all)")
    add("--resume", action="store_true", help="go on with the run in --output, if there is one")
    add = parser.add_argument_group("what trains").add_argument
    add("--lora", metavar="RANK", type=int, default=0, help="train low-rank deltas of this rank (default: everything)")
    add("--lora-alpha", metavar="A", type=float, help="deltas are scaled by A / RANK (default: 2 * RANK)")
    add(
        "--lora-targets",
        metavar="P",
        nargs="+",
        help="layers with deltas (default: all linear but routed experts)",
    )
    add("--frozen-weights", choices=("int8", "nf4"), help="with --lora: hold what does not train in 8 or 4 bits")
    add("--train", metavar="P", nargs="+", default=[], help="what trains; with --lora: beside the deltas")
    add("--freeze", metavar="P", nargs="+", default=[], help="what does not")
    add = parser.add_argument_group("optimizer").add_argument
    add("--optimizer", choices=("adamw", "muon", "lion", "adafactor", "sgd"), default="adamw")
    add("--learning-rate", metavar="LR", type=float, help="after warm-up (default by optimizer; adamw 3e-4)")
    add("--schedule", choices=("cosine", "linear", "constant"), default="cosine")
    add("--warmup", metavar="SHARE", type=float, default=0.05, help="share of the steps (default 0.05)")
    add("--weight-decay", metavar="W", type=float, default=0.01, help="of matrices (default 0.01)")
    add("--clip", metavar="NORM", type=float, default=1.0, help="largest gradient norm, 0 for any (default 1)")
    add("--batch-size", metavar="N", type=int, default=8, help="rows at a time (default 8)")
    add("--accumulate", metavar="N", type=int, default=1, help="batches per step (default 1)")
    add("--on-nonfinite", choices=("stop", "skip"), default="stop", help="at a loss or gradient that is not finite")
    add = parser.add_argument_group("loss and memory").add_argument
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the computation (parameters: float32)")
    add("--remat", choices=("none", "dots", "full"), default="none", help="recompute in gradients (saves memory)")
    add("--z-loss", metavar="W", type=float, default=0.0, help="weight of the squared log-sum-exp of the logits")
    add("--balance-loss", metavar="W", type=float, default=0.0, help="weight of the experts' balancing loss")
    add(
        "--bias-rate",
        metavar="R",
        type=float,
        default=0.0,
        help="moves of the balancing bias (default 0: fixed)",
    )
    add_mesh_options(parser.add_argument_group("devices"))
    add = parser.add_argument_group("telling").add_argument
    add("--tensorboard", action="store_true", help="also write for TensorBoard (needs the extra of this name)")
    add("--json", action="store_true", help="print a summary as JSON at the end")
    add("--quiet", action="store_true", help="no progress")


def run(args: argparse.Namespace) -> int:
    """Trains. **Returns:** the exit code."""
    quiet_libraries()
    from tqdm import tqdm

    talks = start_devices(args)
    args.quiet, args.tensorboard, args.json = args.quiet or not talks, args.tensorboard and talks, args.json and talks
    keep_compiled_programs()
    from kimi_zoo.training.examples import DataError
    from kimi_zoo.training.lora import ALL_LINEAR
    from kimi_zoo.training.options import RunOptions
    from kimi_zoo.training.run import Report, finetune

    bar: Any = tqdm(desc="reading", unit=" tokens", leave=False, disable=args.quiet or not is_terminal(sys.stderr))

    def step(line: dict[str, Any], steps: int) -> None:
        if bar.total != steps:
            bar.reset(total=steps)
            bar.set_description_str("training")
            bar.unit = " steps"
            bar.initial = line["step"] - 1
            bar.n = line["step"] - 1
        bar.set_postfix(loss=f"{line['loss']:.3f}" if line["loss"] else "-", tok_s=f"{line['tokens_per_second']:.0f}")
        bar.update(1)

    def prepared(tokens: int) -> None:
        bar.update(tokens - bar.n)

    def say(text: str) -> None:
        if not args.quiet:
            bar.clear()
            complain(text)

    try:
        options = RunOptions(
            model=args.model,
            data=tuple(args.data),
            validation_data=tuple(args.validation_data),
            validation=args.validation,
            steps=args.steps,
            epochs=args.epochs,
            rows=args.batch_size,
            accumulate=args.accumulate,
            seq_length=args.seq_length,
            overlong=args.overlong,
            packed=not args.no_packing,
            seed=args.seed,
            optimizer=args.optimizer,
            learning_rate=args.learning_rate,
            schedule=args.schedule,
            warmup=args.warmup,
            weight_decay=args.weight_decay,
            clip=args.clip,
            lora=args.lora,
            lora_alpha=args.lora_alpha,
            lora_targets=tuple(args.lora_targets) if args.lora_targets else ALL_LINEAR,
            frozen_weights=args.frozen_weights,
            train=tuple(args.train),
            freeze=tuple(args.freeze),
            dtype=args.dtype,
            remat=args.remat,
            z_loss=args.z_loss,
            balance_loss=args.balance_loss,
            bias_rate=args.bias_rate,
            evaluate_every=args.evaluate_every,
            on_nonfinite=args.on_nonfinite,
        )
        summary = finetune(
            options,
            args.output,
            resume=args.resume,
            save_every=args.save_every,
            keep=args.keep,
            mesh=args.mesh,
            report=Report(say, step, prepared),
            on_metrics=_tensorboard(args.output) if args.tensorboard else lambda _line: None,
        )
    except (DataError, ValueError) as error:
        raise UsageError(str(error)) from error
    finally:
        bar.close()
    if args.json:
        print(json.dumps(summary))
    elif not args.quiet:
        before, after = summary["validation_loss_before"], summary["validation_loss_after"]
        if before is not None:
            complain(f"held-out loss {before:.4f} -> {after:.4f} nats per token ({(after / before - 1):+.1%})")
        complain(f"written: {summary['output']}")
    return 0


def _tensorboard(output: str) -> Any:
    """Writes every number of a line under its name."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise UsageError("--tensorboard needs tensorboardX: pip install 'kimi-zoo[tensorboard]'.") from None
    writer = SummaryWriter(f"{output}/tensorboard")

    def write(line: dict[str, Any]) -> None:
        for name, value in line.items():
            if name != "step" and value is not None:
                writer.add_scalar(name, value, line["step"])
        writer.flush()

    return write
