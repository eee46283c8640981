"""Optax optimizers by name, with a learning rate that warms up and falls, and decay for matrices alone."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from kimi_zoo.training.trainable import NOT_DECAYED, decays, place_of

Schedule = Literal["cosine", "linear", "constant"]
OPTIMIZERS = ("adamw", "muon", "lion", "adafactor", "sgd")


def learning_rate(peak: float, steps: int, *, warmup: int, schedule: Schedule = "cosine") -> optax.Schedule:
    """The learning rate at each step: linear from 0 over `warmup` steps, then constant, or falling to 0 at `steps`.

    **Raises:** `ValueError` for a warm-up longer than the run, or an unknown schedule.
    """
    if not 0 <= warmup <= steps:
        raise ValueError(f"The warm-up of {warmup} steps does not fit into a run of {steps}.")
    rest = max(steps - warmup, 1)
    falling = {
        "cosine": optax.cosine_decay_schedule(peak, rest),
        "linear": optax.linear_schedule(peak, 0.0, rest),
        "constant": optax.constant_schedule(peak),
    }
    if schedule not in falling:
        raise ValueError(f"The schedule is one of {', '.join(falling)}; got {schedule!r}.")
    rising = optax.linear_schedule(peak / (warmup + 1), peak, max(warmup, 1))  # its first step moves as well
    return optax.join_schedules([rising, falling[schedule]], [warmup]) if warmup else falling[schedule]


def make_optimizer(
    name: str, rate: optax.Schedule | float, *, weight_decay: float = 0.0, betas: tuple[float, float] = (0.9, 0.95)
) -> optax.GradientTransformation:
    """One of `OPTIMIZERS`. Norms, biases, convolutions, `a_log` and `dt_bias` do not decay.

    Muon moves projections, `[..., out, in]` in every layer and expert, and leaves the rest to Adam.

    **Source:** Muon with AdamW's step sizes: arXiv:2502.16982.

    **Raises:** `ValueError` for an unknown name.
    """
    decayed = lambda: optax.add_decayed_weights(weight_decay, decays) if weight_decay else optax.identity()
    b1, b2 = betas
    match name:
        case "adamw":
            return optax.adamw(rate, b1=b1, b2=b2, weight_decay=weight_decay, mask=decays)
        case "lion":
            return optax.lion(rate, b1=b1, b2=b2, weight_decay=weight_decay, mask=decays)
        case "muon":
            return optax.contrib.muon(
                rate,
                weight_decay=weight_decay,
                weight_decay_mask=decays,
                consistent_rms=0.2,
                muon_weight_dimension_numbers=_matrices,
                adam_b1=b1,
                adam_b2=b2,
            )
        case "adafactor":
            return optax.chain(decayed(), optax.adafactor(rate))
        case "sgd":
            return optax.chain(decayed(), optax.sgd(rate, momentum=b1))
    raise ValueError(f"The optimizer is one of {', '.join(OPTIMIZERS)}; got {name!r}.")


def _matrices(params: Any) -> Any:
    """Which parameters Muon takes, and which of their axes are output and input."""

    def spec(path: tuple, leaf: Any) -> optax.contrib.MuonDimensionNumbers | None:
        _, _, name = place_of(path)
        if leaf.ndim < 3 or name.endswith(NOT_DECAYED) or "router" in name:
            return None
        return optax.contrib.MuonDimensionNumbers(leaf.ndim - 1, leaf.ndim - 2)

    return jax.tree_util.tree_map_with_path(spec, params)


def masked_updates(wanted: Any) -> optax.GradientTransformation:
    """Leaves the layers of a stack alone which `wanted` (see `trainable.select`) does not train."""

    def scale(choice: Any, update: jax.Array | None) -> jax.Array | None:
        if update is None or isinstance(choice, bool):
            return update
        return update * jnp.asarray(choice, update.dtype).reshape(-1, *[1] * (update.ndim - 1))

    apply: Callable[..., Any] = lambda updates, _params=None: jax.tree.map(scale, wanted, updates)
    return optax.stateless(apply)
