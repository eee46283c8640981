"""A fine-tuning run in a folder: what `kimi-zoo finetune` does, from a model and data files to a better checkpoint.

Everything of the run is in its folder: `run.json` (the options), `data/` (tokenised examples), `metrics.jsonl` (a line
per step), `loss.png`, `checkpoints/`, and at the end `model/` (published layout) or `adapter/` (PEFT's layout). A run
that was stopped at any moment goes on from its last checkpoint and gives what it would have given.
"""

import dataclasses
import json
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jax.sharding import Mesh

from kimi_zoo.bundled import find_weights
from kimi_zoo.checkpoints.configs import read_config
from kimi_zoo.checkpoints.files import CheckpointError, write_json
from kimi_zoo.checkpoints.folder import from_pretrained, save_pretrained
from kimi_zoo.checkpoints.safetensors import open_checkpoint
from kimi_zoo.models.kimi_linear import KimiLinear, Published, with_published
from kimi_zoo.parallel.axes import Parallelism, as_parallelism
from kimi_zoo.parallel.processes import (
    LostProcessError,
    any_process,
    is_first,
    is_lost_process,
    spread_tokens,
    wait_for_all,
    whole_value,
)
from kimi_zoo.tokenizers import load_tokenizer
from kimi_zoo.training.checkpoints import RunCheckpoints
from kimi_zoo.training.dataset import prepare, split
from kimi_zoo.training.lora import add_lora, load_adapter, lora_leaves, merge_lora, save_adapter, select_deltas
from kimi_zoo.training.loss import batch_sums
from kimi_zoo.training.metrics import MetricsLog
from kimi_zoo.training.optimizers import learning_rate, make_optimizer, masked_updates
from kimi_zoo.training.options import REMAT, RunOptions
from kimi_zoo.training.packing import Batch, Batches, in_order
from kimi_zoo.training.quantization import Kind, quantize_frozen, whole_layers
from kimi_zoo.training.step import Metrics, StepOptions, TrainState, as_computed, joined, start, train_step
from kimi_zoo.training.stopping import StopSignals
from kimi_zoo.training.trainable import BALANCING_BIAS, place_of, select, table_of, trains


class NonFiniteError(ArithmeticError):
    """Loss or gradient became NaN or infinite; the message names the step."""


@dataclasses.dataclass(frozen=True)
class Report:
    """How a run tells what it does: `say` a line, `step` after each step (with its line of `metrics.jsonl`), `prepared`
    tokens so far."""

    say: Callable[[str], None] = lambda _text: None
    step: Callable[[dict[str, Any], int], None] = lambda _line, _steps: None
    prepared: Callable[[int], None] = lambda _tokens: None


def finetune(
    options: RunOptions,
    output: str | Path,
    *,
    resume: bool = False,
    save_every: int = 100,
    keep: int = 2,
    mesh: Parallelism | Mesh | str | None = None,
    report: Report | None = None,
    on_metrics: Callable[[dict[str, Any]], None] = lambda _line: None,
) -> dict[str, Any]:
    """Fine-tunes a model. **Returns:** a summary: `steps`, `loss` before and after on the validation set, `output`.

    **Arguments:**

    - `resume`: go on with the run in `output`, whose options must be the same; a new run if there is none yet.
    - `save_every`: steps between checkpoints, of which the last `keep` and the best are kept.
    - `mesh`: the devices to train on, such as `"fsdp=4,context=2"`; a run may be resumed on others. With several
        processes, all call this alike, and share the folder.
    - `on_metrics`: called with every line of `metrics.jsonl`.

    **Raises:** `DataError`, `CheckpointError` or `ValueError` before any training for what cannot work;
    `NonFiniteError`; `KeyboardInterrupt` after a checkpoint has been saved; `LostProcessError` if another ended.
    """
    for name, value in (("save_every", save_every), ("keep", keep)):
        if value < 1:
            raise ValueError(f"`{name}` is at least 1; got {value}.")
    report = report or Report()
    output = Path(output)
    parallelism = as_parallelism(mesh)
    _check_folder(output, options, resume)
    wait_for_all("folder checked")
    if parallelism is not None:
        parallelism.check_tokens(options.rows, options.seq_length)
    data = _read_data(options, output, report)
    parts = _build(options, data.steps, parallelism, report)
    if is_first():
        write_json(output / "run.json", _as_json(options))  # everything that can be checked has been

    def validation_loss(state: TrainState) -> float | None:
        if not data.holds_out:
            return None
        return mean_loss(joined(state, parts.frozen), data.held_out(), options.dtype, mesh=parallelism)[0]

    state, done, skipped = parts.state, 0, 0
    every = options.evaluate_every or max(1, data.steps // 10)
    with (
        RunCheckpoints(output / "checkpoints", keep=keep) as checkpoints,
        MetricsLog(output, on_metrics, writes=is_first()) as log,
        StopSignals() as signals,
    ):
        if resume and checkpoints.steps():
            done = checkpoints.steps()[-1]
            state = checkpoints.restore(done, state)
            report.say(f"Resuming behind step {done}.")
        log.keep(done)
        counted = int(state.step)  # without those skipped: what the learning rate goes by
        initial = {"initial_validation_loss": validation_loss(state)} if done == 0 and data.holds_out else {}
        began = time.perf_counter()
        try:
            for number, batch in enumerate(prefetch(data.batches(done)), start=done + 1):
                batch = spread_tokens(batch, parallelism, leading=1)
                state, metrics = train_step((parts.frozen, batch, parts.optimizer, parts.options), state)
                line = _line(number, metrics, float(np.asarray(parts.rate(counted))), began) | initial
                if parallelism is not None and parallelism.expert_capacity is not None:
                    line["dropped_pairs"] = int(metrics.dropped)
                initial, began, counted = {}, time.perf_counter(), counted + bool(metrics.finite)
                if not bool(metrics.finite):
                    skipped += 1
                    _nonfinite(number, line, options, report)
                if number % every == 0 or number == data.steps:
                    line["validation_loss"] = validation_loss(state)
                done = number
                log.write(line)
                report.step(line, data.steps)
                if number % save_every == 0 or number == data.steps:
                    checkpoints.save(number, state, line.get("validation_loss"))
                signals.asked = any_process(signals.asked)
                signals.check()
        except KeyboardInterrupt:
            if done and done not in checkpoints.steps():
                checkpoints.save(done, state)
            checkpoints.wait()
            report.say(f"Stopped behind step {done} of {data.steps}, which is saved; go on with --resume.")
            raise
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            if not is_lost_process(error):
                raise
            raise LostProcessError(
                f"Process {jax.process_index()} lost another process of the job in step {done + 1}. Look there for the "
                f"reason; the run goes on with --resume, on any mesh, behind its last checkpoint. ({error})"
            ) from error
        checkpoints.wait()
        log.draw()
        lines = log.lines
    # steps are traced once for all models of a shape: what they return may name another model's folder
    finished = with_published(joined(state, parts.frozen), parts.published)
    return {
        "steps": data.steps,
        "validation_loss_before": lines[0].get("initial_validation_loss"),
        "validation_loss_after": lines[-1].get("validation_loss"),
        "skipped_steps": skipped,
        "output": str(_save(finished, parts.beside, options, output)),
    }


class _Data(NamedTuple):
    """What a run reads: batches from a step on, and held-out batches, anew at each call."""

    steps: int
    batches: Callable[[int], Iterator[Batch]]
    held_out: Callable[[], Iterator[Batch]]
    holds_out: bool


def _read_data(options: RunOptions, output: Path, report: Report) -> _Data:
    folder = find_weights(options.model)
    config, _ = read_config(folder)
    if options.seq_length > config.model_max_length:
        raise ValueError(f"`seq_length` {options.seq_length} exceeds the model's {config.model_max_length} tokens.")
    tokenizer = load_tokenizer(folder)
    read = lambda paths, name: prepare(
        paths,
        tokenizer,
        output / "data" / name,
        seq_length=options.seq_length,
        overlong=options.overlong,
        progress=report.prepared,
        warn=report.say,
    )
    if not is_first():  # the first process writes, the others find it written
        wait_for_all("data prepared")
    dataset = read(options.data, "train")
    held_data = read(options.validation_data, "validation") if options.validation_data else dataset
    if is_first():
        wait_for_all("data prepared")
    if options.validation_data:
        training, held = np.arange(len(dataset)), np.arange(len(held_data))
    else:
        training, held = split(len(dataset), options.validation, options.seed)
    shape = (options.accumulate, options.rows)
    batches = Batches(dataset, training, options.seq_length, shape, options.seed, options.packed)
    epochs = options.epochs or 1
    steps = options.steps or batches.steps_in(epochs)
    report.say(
        f"{len(training)} example{'' if len(training) == 1 else 's'} to learn from, {len(held)} held out; "
        f"{dataset.counts['learned_tokens']} tokens learned of {dataset.counts['tokens']}; "
        f"rows {batches.efficiency():.0%} full; {steps} step{'' if steps == 1 else 's'}."
    )
    last_epoch = None if options.steps else epochs - 1
    return _Data(
        steps,
        lambda start: batches.read(start, steps, last_epoch=last_epoch),
        lambda: in_order(held_data, held.tolist(), options.seq_length, options.rows, packed=options.packed),
        len(held) > 0,
    )


class _Parts(NamedTuple):
    """What a run computes with."""

    state: TrainState
    frozen: Any
    optimizer: optax.GradientTransformation
    rate: optax.Schedule
    options: StepOptions
    published: Published
    beside: Any  # what trains beside deltas


def _build(options: RunOptions, steps: int, mesh: Parallelism | None, report: Report) -> _Parts:
    loaded = from_pretrained(options.model, dtype="float32" if options.lora == 0 else None, mesh=mesh)
    model, wanted = trainable_model(loaded, options)
    report.say("\n".join(table_of(model, wanted)))
    if not any(jax.tree.leaves(trains(wanted))):
        raise ValueError(f"Nothing trains: `freeze` {list(options.freeze)} excludes all that would.")
    warmup = min(round(options.warmup * steps), steps)
    rate = learning_rate(options.peak_rate, steps, warmup=warmup, schedule=options.schedule)
    with jax.numpy_dtype_promotion("standard"):  # optax counts in integers
        optimizer = make_optimizer(options.optimizer, rate, weight_decay=options.weight_decay)
        if any(not isinstance(choice, bool) for choice in jax.tree.leaves(wanted)):
            optimizer = optax.chain(optimizer, masked_updates(wanted_leaves(wanted)))
        state, frozen = start(model, trains(wanted), optimizer, mesh)
    step_options = StepOptions(
        compute_dtype=options.dtype,
        remat=REMAT[options.remat],
        clip=options.clip,
        z_loss=options.z_loss,
        balance_loss=options.balance_loss,
        bias_rate=options.bias_rate,
        mesh=mesh,
    )
    beside = _beside_deltas(model, wanted, options) if options.lora else None
    return _Parts(state, frozen, optimizer, rate, step_options, loaded.published, beside)


def _beside_deltas(model: KimiLinear, wanted: Any, options: RunOptions) -> Any:
    """A tree like the model: what an adapter holds whole, since it trains and is no delta."""

    def chosen(path: tuple, is_delta: bool, choice: Any) -> Any:
        moved = options.bias_rate > 0 and place_of(path)[2].endswith(BALANCING_BIAS)
        return moved or (not is_delta and choice)

    beside = jax.tree_util.tree_map_with_path(chosen, lora_leaves(model), wanted)
    return beside if options.frozen_weights is None else whole_layers(model, beside)


def _save(model: KimiLinear, beside: Any, options: RunOptions, output: Path) -> Path:
    """Writes the result: an adapter, or the whole model in the dtype that it was stored in."""
    folder = find_weights(options.model)
    if options.lora:
        written = jax.tree.map(lambda is_delta, choice: is_delta or bool(np.any(choice)), lora_leaves(model), beside)
        tuned, rest = eqx.partition(model, written)
        model = eqx.combine(jax.tree.map(whole_value, tuned), rest)
        if is_first():
            save_adapter(model, output / "adapter", base=str(folder), beside=beside, overwrite=True)
        return output / "adapter"
    save_pretrained(model, output / "model", dtype=stored_dtype(folder), overwrite=True)
    return output / "model"


def trainable_model(model: KimiLinear, options: RunOptions) -> tuple[KimiLinear, Any]:
    """The model, with deltas if LoRA is wanted, and which of its leaves train: see `trainable.select`."""
    if not options.lora:
        return model, select(model, train=options.train or ("*",), freeze=options.freeze)
    key = jr.key(options.seed)
    model = add_lora(model, rank=options.lora, alpha=options.lora_alpha, targets=options.lora_targets, key=key)
    wanted = lambda model: select(model, train=options.train, freeze=options.freeze)
    if options.frozen_weights is not None:
        model = quantize_frozen(model, cast(Kind, options.frozen_weights), trains=wanted(model))
    deltas = select_deltas(model, freeze=options.freeze)
    return model, jax.tree.map(lambda delta, choice: delta if np.any(delta) else choice, deltas, wanted(model))


def wanted_leaves(wanted: Any) -> Any:
    """The choices of the leaves that train; `None` for the others, as in a gradient."""
    return jax.tree.map(lambda choice: choice if np.any(choice) else None, wanted)


def stored_dtype(folder: Path) -> str:
    """The dtype that most weights of a folder are stored in, to save the result alike."""
    sizes: dict[str, int] = {}
    with open_checkpoint(folder) as checkpoint:
        for info in checkpoint.tensors.values():
            sizes[str(info.dtype)] = sizes.get(str(info.dtype), 0) + info.nbytes
    most = max(sizes, key=sizes.__getitem__)
    return most if most in ("float32", "bfloat16", "float16") else "bfloat16"


@eqx.filter_jit
def _sums(model: KimiLinear, batch: Batch, dtype: str, mesh: Parallelism | None):
    sums = batch_sums(as_computed(model, jnp.dtype(dtype)), Batch(*map(jnp.asarray, batch)), mesh=mesh)
    return sums.loss, sums.tokens


def mean_loss(
    model: KimiLinear, batches: Iterable[Batch], dtype: str = "float32", *, mesh: Parallelism | None = None
) -> tuple[float, int]:
    """Mean loss in nats over all learned tokens of the batches, and their number."""
    total, tokens = 0.0, 0
    for batch in batches:
        loss, count = _sums(model, spread_tokens(batch, mesh), dtype, mesh)
        total, tokens = total + float(loss), tokens + int(count)
    return total / max(tokens, 1), tokens


def prefetch(batches: Iterator[Batch], ahead: int = 2) -> Iterator[Batch]:
    """The same batches, made in another thread while the step before runs."""
    ready: queue.Queue = queue.Queue(ahead)
    stopped = threading.Event()

    def work() -> None:
        item: Any = None
        try:
            for item in batches:
                while not stopped.is_set():
                    try:
                        ready.put((item, None), timeout=0.1)
                        break
                    except queue.Full:
                        continue
                if stopped.is_set():
                    return
            ready.put((None, None))
        except Exception as error:
            ready.put((None, error))

    threading.Thread(target=work, daemon=True).start()
    try:
        while True:
            item, error = ready.get()
            if error is not None:
                raise error
            if item is None:
                return
            yield item
    finally:
        stopped.set()


def _check_folder(output: Path, options: RunOptions, resume: bool) -> None:
    """**Raises:** `CheckpointError` unless the folder is new, or holds the run to go on with, with the same options."""
    file = output / "run.json"
    if file.exists():
        if not resume:
            raise CheckpointError(f"{output} holds a run already: go on with --resume, or choose another folder.")
        before, now = json.loads(file.read_text()), _as_json(options)
        changed = [f"{k}: {before.get(k)!r} then, {now[k]!r} now" for k in now if before.get(k) != now[k]]
        if changed:
            raise CheckpointError(f"The run in {output} has other options:\n- " + "\n- ".join(changed))
    elif output.exists() and (not output.is_dir() or any(entry.name != "data" for entry in output.iterdir())):
        raise CheckpointError(f"{output} is not empty and holds no run: choose another folder.")


def _as_json(options: RunOptions) -> dict[str, Any]:
    """The options as they are when read back: lists in the place of tuples."""
    return json.loads(json.dumps(dataclasses.asdict(options)))


def _line(number: int, metrics: Metrics, rate: float, began: float) -> dict[str, Any]:
    tokens = int(metrics.tokens)
    loss = float(metrics.loss)
    seconds = time.perf_counter() - began
    return {
        "step": number,
        "loss": loss if math.isfinite(loss) else None,
        "tokens": tokens,
        "learning_rate": rate,
        "gradient_norm": float(metrics.gradient_norm) if math.isfinite(float(metrics.gradient_norm)) else None,
        "most_loaded_expert": float(metrics.most_loaded),
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
    }


def _nonfinite(number: int, line: dict[str, Any], options: RunOptions, report: Report) -> None:
    count = options.rows * options.accumulate
    where = f"rows {(number - 1) * count} to {number * count - 1} of the shuffled data, seed {options.seed}"
    shown = lambda value: "not finite" if value is None else value
    text = f"Step {number} ({where}): loss {shown(line['loss'])}, gradient norm {shown(line['gradient_norm'])}."
    if options.on_nonfinite == "skip":
        report.say(text + " The step is skipped.")
        return
    raise NonFiniteError(text + " The run stops; a lower learning rate may help, or --on-nonfinite skip.")


def fuse(
    model: str | Path,
    adapter: str | Path,
    output: str | Path,
    *,
    frozen_weights: Kind | None = None,
    overwrite: bool = False,
) -> None:
    """Writes the model with an adapter's deltas added to its weights, in the dtypes that these are stored in.

    **Arguments:** `frozen_weights`: what they were rounded to when the adapter was trained; the deltas are added to
    these, as in training, and every linear layer is written so rounded. By default they are added to the weights as
    they are stored.
    """
    loaded = from_pretrained(model)
    rounded = loaded if frozen_weights is None else quantize_frozen(loaded, frozen_weights)
    merged = merge_lora(load_adapter(rounded, adapter))
    merged = jax.tree.map(lambda new, old: new.astype(old.dtype) if eqx.is_array(old) else new, merged, loaded)
    save_pretrained(merged, output, overwrite=overwrite)
