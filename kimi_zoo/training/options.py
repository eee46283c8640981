"""What decides the result of a run."""

import dataclasses
import math
from typing import get_args

import jax

from kimi_zoo.training.dataset import Overlong
from kimi_zoo.training.lora import ALL_LINEAR
from kimi_zoo.training.optimizers import OPTIMIZERS, Schedule
from kimi_zoo.training.quantization import Kind

REMAT = {"none": False, "full": True, "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}

CHOICES: dict[str, tuple[str, ...]] = {
    "remat": tuple(REMAT),
    "dtype": ("float32", "bfloat16"),
    "on_nonfinite": ("stop", "skip"),
    "overlong": get_args(Overlong),
    "schedule": get_args(Schedule),
    "optimizer": OPTIMIZERS,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What decides the result of a run; written to `run.json`, and to be the same when it is resumed.

    Of `steps` and `epochs` one is given, or neither: one epoch. `rows` of `seq_length` tokens make a batch,
    `accumulate` batches a step. `warmup` is a share of the steps. `lora` is the rank, 0 for training everything that
    `train` and not `freeze` selects (see `trainable.select`); with LoRA, `train` adds parameters beside the deltas,
    `freeze` excludes from both, and `frozen_weights` ("int8" or "nf4") is how the layers that do not train are held:
    see `quantize_frozen`.
    """

    model: str
    data: tuple[str, ...]
    validation_data: tuple[str, ...] = ()
    validation: float = 0.05
    steps: int | None = None
    epochs: int | None = None
    rows: int = 8
    accumulate: int = 1
    seq_length: int = 512
    overlong: Overlong = "split"
    packed: bool = True
    seed: int = 0
    optimizer: str = "adamw"
    learning_rate: float | None = None
    schedule: Schedule = "cosine"
    warmup: float = 0.05
    weight_decay: float = 0.01
    clip: float = 1.0
    lora: int = 0
    lora_alpha: float | None = None
    lora_targets: tuple[str, ...] = ALL_LINEAR
    frozen_weights: str | None = None
    train: tuple[str, ...] = ()
    freeze: tuple[str, ...] = ()
    dtype: str = "float32"
    remat: str = "none"
    z_loss: float = 0.0
    balance_loss: float = 0.0
    bias_rate: float = 0.0
    evaluate_every: int | None = None
    on_nonfinite: str = "stop"

    def __post_init__(self):
        """**Raises:** `ValueError` for options that make no run."""
        if self.steps is not None and self.epochs is not None:
            raise ValueError("Give `steps` or `epochs`, not both.")
        for name in ("steps", "epochs", "rows", "accumulate", "seq_length", "evaluate_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`{name}` is at least 1; got {value}.")
        if self.seq_length < 2:
            raise ValueError("`seq_length` is at least 2: a token and the next.")
        if self.frozen_weights is not None and not self.lora:
            raise ValueError("`frozen_weights` go with `lora`: without it every weight trains, and none is frozen.")
        if self.frozen_weights not in (None, *get_args(Kind)):
            raise ValueError(f"`frozen_weights` is one of {', '.join(get_args(Kind))}; got {self.frozen_weights!r}.")
        for name in ("lora", "weight_decay", "clip", "z_loss", "balance_loss", "bias_rate"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"`{name}` is a number, at least 0; got {value}.")
        for name in ("learning_rate", "lora_alpha"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"`{name}` is a number above 0; got {value}.")
        if not 0 <= self.warmup <= 1:
            raise ValueError(f"`warmup` is a share of the steps, from 0 to 1; got {self.warmup}.")
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(f"`{name}` is one of {', '.join(known)}; got {getattr(self, name)!r}.")
        if not 0 <= self.validation < 1:
            raise ValueError(f"`validation` is a share of the examples, at least 0 and below 1; got {self.validation}.")

    @property
    def peak_rate(self) -> float:
        """The learning rate after warm-up; by default what is usual for the optimizer, three times that for LoRA."""
        if self.learning_rate is not None:
            return self.learning_rate
        base = {"adamw": 3e-4, "muon": 1e-3, "lion": 3e-5, "adafactor": 1e-3, "sgd": 1e-2}.get(self.optimizer, 3e-4)
        return base * (3 if self.lora else 1)
