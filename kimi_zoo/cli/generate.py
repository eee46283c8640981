"""`kimi-zoo generate`: continue a text, streamed token by token."""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kimi_zoo.cli.runtime import (
    CompileClock,
    add_mesh_options,
    keep_compiled_programs,
    quiet_libraries,
    start_devices,
)
from kimi_zoo.cli.streaming import StopWatch, closing_line, collect, print_stream
from kimi_zoo.cli.terminal import Status, UsageError, is_terminal

DESCRIPTION = """\
Continues PROMPT with a model and prints the new text as it comes. On a terminal the prompt is shown first, dimmed; into
a file or a pipe only the new text goes. Without PROMPT the text starts from the model's begin-of-text token.

What is not given here comes from the model's generation_config.json. The same seed gives the same text."""

EPILOG = """\
examples:
  kimi-zoo generate weights/kimi-linear-stdlib-5m "def "
  kimi-zoo generate MODEL "Once upon" --temperature 0.8 --top-p 0.95 --seed 7
  kimi-zoo generate MODEL --prompt-file draft.txt --max-new-tokens 400 --stop $'\\n\\n'
  echo "import " | kimi-zoo generate MODEL --prompt-file - --json | jq -r .samples[0].text

--json prints, at the end, one object:
  model, prompt, prompt_tokens   folder, text and token ids
  samples                        a list of {text, tokens, log_probs, finish_reason, seed}; finish_reason is "eos",
                                 "stop_string" or "length", log_probs are natural logs
  settings                       what was used: max_new_tokens, temperature, ..., dtype
  timings                        load_s, first_token_s, total_s, compile_s, tokens_per_s (after the first, compiling
                                 not counted; null for a single token)"""

SETTINGS = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser(
        "generate",
        help="continue a text, streamed token by token",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    parser.add_argument("model", metavar="MODEL", help="checkpoint folder, or name of bundled weights")
    parser.add_argument(
        "prompt", metavar="PROMPT", nargs="?", help='text to continue ("--" before one that begins with -)'
    )
    parser.add_argument(
        "--prompt-file", metavar="F", help="read the prompt from a file, - for stdin (less one last line end)"
    )
    choice = parser.add_argument_group("choice of tokens")
    add = choice.add_argument
    add("--temperature", metavar="T", type=_number(float, 0), help="0: always the most likely token")
    add("--top-k", metavar="K", type=_number(int, 0), help="choose among the K most likely tokens (0: all)")
    add(
        "--top-p",
        metavar="P",
        type=_number(float, 0, 1, above=True),
        help="choose among the most likely of mass P (1: all)",
    )
    add(
        "--min-p",
        metavar="P",
        type=_number(float, 0, 1),
        help="leave out tokens less than P times as likely as the top one",
    )
    add(
        "--repetition-penalty",
        metavar="R",
        type=_number(float, 0, above=True),
        help="1: none; 1.1 discourages repetition",
    )
    add("--seed", metavar="S", type=_number(int, 0, 2**32 - 1), default=0, help="seed of the choice (default 0)")
    length = parser.add_argument_group("length")
    add = length.add_argument
    add(
        "--max-new-tokens",
        metavar="N",
        type=_number(int, 1),
        help="tokens to add at most (default: the model's, or 256)",
    )
    add("--stop", metavar="TEXT", action="append", default=[], help="end before this text; may be repeated")
    add("--num-samples", metavar="N", type=_number(int, 1), default=1, help="texts to draw; text i has the seed S + i")
    running = parser.add_argument_group("running and printing")
    add = running.add_argument
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="dtype of weights and computation; auto: float32 on a CPU, as stored elsewhere",
    )
    add_mesh_options(running)
    add("--json", action="store_true", help="print one JSON object at the end instead of the text")
    add("--quiet", action="store_true", help="no progress and no closing line on stderr")


def _number[T: (int, float)](
    kind: type[T], low: int, high: int = 2**31 - 1, *, above: bool = False
) -> Callable[[str], T]:
    """An argument's type: a number from `low` (`above`: not `low` itself) to `high`."""
    limits = f"{'above' if above else 'at least'} {low}" + (f" and at most {high}" if high < 2**31 - 1 else "")

    def parse(text: str) -> T:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not (low < value if above else low <= value) or not value <= high:
            name = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"expected {name} {limits}; got {text!r}")
        return value

    return parse


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    started = time.perf_counter()
    prompt = read_prompt(args)
    if "" in args.stop:
        raise UsageError("--stop needs some text; an empty one would end at once.")
    quiet_libraries()
    talks = start_devices(args)
    args.quiet = args.quiet or not talks
    with Status(wanted=not args.quiet) as status:
        return _generate(args, prompt, started, status, talks)


def _generate(args: argparse.Namespace, prompt: str, started: float, status: Status, talks: bool) -> int:
    status.show("loading")
    from kimi_zoo.bundled import find_weights
    from kimi_zoo.tokenizers import load_tokenizer

    folder = find_weights(args.model)
    tokenizer = load_tokenizer(folder)
    ids = encode_prompt(prompt, tokenizer, folder)
    settings = read_settings(args, folder)
    keep_compiled_programs()
    clock = CompileClock()
    status.clear()  # the progress bar takes its place
    model, dtype = load_model(folder, args)
    loaded = time.perf_counter()
    status.show("preparing (faster the next time)")
    watch = StopWatch(args.num_samples)
    events = watch.watching(start_stream(model, ids, tokenizer, settings, args))
    if not talks:
        collect(events, args.num_samples, args.seed)
        return 0
    if not args.json:
        print_stream(events, prompt, args.num_samples, status)
        if not args.quiet:
            print(closing_line(watch.tokens, watch.timings(clock, started, loaded)), file=sys.stderr)
        return 0
    samples = collect(events, args.num_samples, args.seed)
    report = {
        "model": str(folder),
        "prompt": prompt,
        "prompt_tokens": ids,
        "samples": samples,
        "settings": {name: getattr(settings, name) for name in SETTINGS} | {"stop": args.stop, "dtype": dtype},
        "timings": watch.timings(clock, started, loaded),
    }
    print(json.dumps(report, ensure_ascii=False))
    return 0


def read_prompt(args: argparse.Namespace) -> str:
    """The text to continue: of the command line, a file or stdin.

    **Raises:** `UsageError` if there are two, or the file cannot be read.
    """
    if args.prompt_file is None:
        return args.prompt or ""
    if args.prompt is not None:
        raise UsageError("Give PROMPT or --prompt-file, not both.")
    try:
        data = sys.stdin.buffer.read() if args.prompt_file == "-" else Path(args.prompt_file).read_bytes()
        text = data.decode()
    except OSError as error:
        raise UsageError(f"--prompt-file {args.prompt_file}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--prompt-file {args.prompt_file} is not UTF-8 text: byte {error.start}.") from error
    return text.replace("\r\n", "\n").removesuffix("\n")


def encode_prompt(prompt: str, tokenizer: Any, folder: Path) -> list[int]:
    """Token ids of the prompt, behind the begin-of-text token if the tokenizer's files ask for it or nothing else is
    there.

    **Raises:** `UsageError` if there is neither text nor such a token.
    """
    from kimi_zoo.checkpoints.files import read_json

    path = folder / "tokenizer_config.json"
    asked = path.is_file() and read_json(path).get("add_bos_token") is True
    ids = tokenizer.encode(prompt)
    if tokenizer.bos_id is not None and (asked or not ids):
        return [tokenizer.bos_id, *ids]
    if not ids:
        raise UsageError(f"{folder} names no begin-of-text token to start an empty prompt from: give PROMPT.")
    return ids


def read_settings(args: argparse.Namespace, folder: Path) -> Any:
    """The `GenerationConfig` of the folder, with what the command line says instead.

    **Raises:** `UsageError` if the file cannot be used, or several samples would all be the same.
    """
    from kimi_zoo.generation.config import read_generation_config

    with bad_input():
        settings = read_generation_config(folder)
    given = {name: getattr(args, name) for name in SETTINGS if getattr(args, name) is not None}
    settings = dataclasses.replace(settings, **given)
    if args.num_samples > 1 and settings.temperature == 0:
        raise UsageError(
            f"--num-samples {args.num_samples} at temperature 0 is one text {args.num_samples} times: "
            "add --temperature 0.8, for example."
        )
    return settings


@contextmanager
def bad_input() -> Iterator[None]:
    """Within, a `ValueError` or `TypeError` is about what the user gave."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error


def load_model(folder: Path, args: argparse.Namespace) -> tuple[Any, str]:
    """The model, and the name of the dtype asked for (`stored`: as it is)."""
    import jax

    from kimi_zoo.checkpoints.folder import from_pretrained

    dtype = args.dtype
    if dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "stored"  # CPUs multiply bfloat16 slowly
    progress = not args.quiet and is_terminal(sys.stderr)
    kind = None if dtype == "stored" else dtype
    with bad_input():
        return from_pretrained(folder, dtype=kind, mesh=args.mesh, progress=progress), dtype


def start_stream(model: Any, ids: list[int], tokenizer: Any, settings: Any, args: argparse.Namespace) -> Iterator[Any]:
    """The events of all samples, which are drawn as one batch.

    **Raises:** `UsageError` for a prompt or settings that the model cannot take.
    """
    import jax.numpy as jnp
    import jax.random as jr

    from kimi_zoo.generation.loop import stream_generate

    keys = [jr.key(args.seed + number) for number in range(args.num_samples)]
    with bad_input():
        return stream_generate(
            model,
            [ids] * args.num_samples,
            tokenizer=tokenizer,
            stop=args.stop,
            key=keys[0] if len(keys) == 1 else jnp.stack(keys),
            generation_config=settings,
        )
