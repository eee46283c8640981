"""From logits to a token: greedy choice, temperature, top-k, top-p, min-p and the repetition penalty.

Everything here is a pure function of arrays and may be traced. The vocabulary is never sorted: top-k and top-p both ask
for the largest threshold above which enough remains, and 32 masked sums find it exactly, bit by bit.
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, Key, UInt32

NON_FINITE = -1  # stands in place of a token id where the logits hold NaN or infinity


class Sampling(eqx.Module):
    """How a token is chosen. `None` switches a part off, so that it is neither traced nor computed.

    The values are traced: another temperature runs the same compiled program, switching a part on or off does not.

    - `temperature`: divides the logits; `None` is the greedy choice.
    - `top_k`: keep the `k` most likely tokens (and those that tie with the last of them).
    - `top_p`: keep the fewest most likely tokens with at least this probability, taken after temperature and top-k.
    - `min_p`: keep tokens at least this fraction as likely as the most likely one.
    - `repetition_penalty`: logits of tokens seen before are divided by it where positive, multiplied where negative.
    """

    temperature: Float32[Array, ""] | None
    top_k: Int32[Array, ""] | None
    top_p: Float32[Array, ""] | None
    min_p: Float32[Array, ""] | None
    repetition_penalty: Float32[Array, ""] | None


def make_sampling(
    *,
    temperature: float | int = 0.0,
    top_k: int = 0,
    top_p: float | int = 1.0,
    min_p: float | int = 0.0,
    repetition_penalty: float | int = 1.0,
) -> Sampling:
    """Checks the parameters and leaves out those that have no effect.

    Temperature 0 is the greedy choice, for which `top_k`, `top_p` and `min_p` have none; `top_k=0`, `top_p=1`,
    `min_p=0` and `repetition_penalty=1` are off.

    **Raises:** `ValueError` naming the parameter that is out of its range.
    """
    _check(
        "temperature", temperature, temperature >= 0 and math.isfinite(temperature), "finite and at least 0 (0: greedy)"
    )
    _check("top_k", top_k, top_k >= 0, "at least 0 (0: off)")
    _check("top_p", top_p, 0 < top_p <= 1, "above 0 and at most 1 (1: off)")
    _check("min_p", min_p, 0 <= min_p <= 1, "between 0 and 1 (0: off)")
    positive = repetition_penalty > 0 and math.isfinite(repetition_penalty)
    _check("repetition_penalty", repetition_penalty, positive, "finite and above 0 (1: off)")
    random = temperature > 0
    return Sampling(
        temperature=_float32(temperature) if random else None,
        top_k=jnp.asarray(min(top_k, np.iinfo(np.int32).max), jnp.int32) if random and top_k > 0 else None,
        top_p=_float32(top_p) if random and top_p < 1 else None,
        min_p=_float32(min_p) if random and min_p > 0 else None,
        repetition_penalty=_float32(repetition_penalty) if repetition_penalty != 1 else None,
    )


def _float32(value: float | int) -> Float32[Array, ""]:
    """A positive number as the nearest one that float32 holds at full precision: neither 0 nor infinite."""
    range_ = np.finfo(np.float32)
    return jnp.asarray(min(max(value, float(range_.smallest_normal)), float(range_.max)), jnp.float32)


def sample(
    logits: Float[Array, "batch vocab"],
    sampling: Sampling,
    *,
    keys: Key[Array, " batch"],
    seen: Bool[Array, "batch vocab"] | None = None,
) -> tuple[Int32[Array, " batch"], Float32[Array, " batch"]]:
    """Chooses one token per row; returns it and its log-probability.

    - `keys`: one PRNG key per row, so a row's choice does not depend on its neighbours. Not used by the greedy choice.
    - `seen`: tokens under the repetition penalty; needed when `sampling.repetition_penalty` is set.

    The log-probability (natural log, float32) is that of the unmodified model distribution: temperature 1, no penalty,
    nothing cut away. A row with any NaN or infinity in its logits gives the token `NON_FINITE`.

    The parts apply in the order of transformers: penalty, temperature, top-k, top-p, min-p.

    **Raises:** `ValueError` for a repetition penalty without `seen`.
    """
    logits = logits.astype(jnp.float32)
    scores = logits
    if sampling.repetition_penalty is not None:
        if seen is None:
            raise ValueError("`repetition_penalty` needs `seen`: which tokens of the vocabulary each row has had.")
        scores = penalise(scores, seen, sampling.repetition_penalty)
    if sampling.temperature is None:
        tokens = _first_of_largest(scores)
    else:
        scores = restrict(temper(scores, sampling.temperature), sampling)
        tokens = jax.vmap(jr.categorical)(keys, scores).astype(jnp.int32)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    log_probs = chosen - jax.nn.logsumexp(logits, axis=-1)
    finite = jnp.isfinite(logits).all(axis=-1)
    return jnp.where(finite, tokens, NON_FINITE), log_probs


def _first_of_largest(scores: Float32[Array, "batch vocab"]) -> Int32[Array, " batch"]:
    """`jnp.argmax`, which takes five times as long on a CPU. A row with NaN gives a number past the last."""
    places = jnp.arange(scores.shape[-1], dtype=jnp.int32)
    largest = scores == jnp.max(scores, axis=-1, keepdims=True)
    return jnp.min(jnp.where(largest, places, scores.shape[-1]), axis=-1)


def penalise(
    logits: Float32[Array, "batch vocab"],
    seen: Bool[Array, "batch vocab"],
    penalty: Float32[Array, ""],
) -> Float32[Array, "batch vocab"]:
    """Makes the tokens marked in `seen` less likely (more likely, for a penalty below 1).

    **Source:** CTRL (arXiv:1909.05858), with the sign rule of transformers: a negative logit is multiplied.
    """
    penalised = jnp.where(logits < 0, logits * penalty, logits / penalty)
    largest = jnp.finfo(jnp.float32).max  # an infinite score would leave nothing to choose by
    return jnp.where(seen, jnp.clip(penalised, -largest, largest), logits)


def temper(logits: Float32[Array, "batch vocab"], temperature: Float32[Array, ""]) -> Float32[Array, "batch vocab"]:
    """Divides by the temperature, relative to the largest logit: results are at most 0 and no temperature overflows."""
    return (logits - logits.max(axis=-1, keepdims=True)) / temperature


def restrict(scores: Float32[Array, "batch vocab"], sampling: Sampling) -> Float32[Array, "batch vocab"]:
    """Sets the scores that top-k, top-p and min-p cut away to minus infinity. The most likely token always stays."""
    if sampling.top_k is not None:
        scores = _keep_mass(scores, jnp.ones_like(scores), sampling.top_k.astype(jnp.float32))
    if sampling.top_p is not None:
        scores = _keep_mass(scores, jax.nn.softmax(scores, axis=-1), sampling.top_p)
    if sampling.min_p is not None:
        least = scores.max(axis=-1, keepdims=True) + jnp.log(sampling.min_p)
        scores = jnp.where(scores >= least, scores, -jnp.inf)
    return scores


def _keep_mass(
    scores: Float32[Array, "batch vocab"], mass: Float32[Array, "batch vocab"], target: Float32[Array, ""]
) -> Float32[Array, "batch vocab"]:
    """Keeps the highest scores, as few as have a total mass of at least `target`; everything if all together have less.

    The highest one always stays, however small the target. The threshold is built from its highest bit down: a bit
    stays set while the mass at or above it is still enough.
    """
    order = _ordered_bits(scores)

    def set_bit(i: Int[Array, ""], threshold: UInt32[Array, " batch"]) -> UInt32[Array, " batch"]:
        candidate = threshold | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        above = jnp.where(order >= candidate[:, None], mass, 0.0).sum(axis=-1)
        return jnp.where(above >= target, candidate, threshold)

    threshold = jax.lax.fori_loop(0, 32, set_bit, jnp.zeros(scores.shape[0], jnp.uint32))
    threshold = jnp.minimum(threshold, order.max(axis=-1))
    return jnp.where(order >= threshold[:, None], scores, -jnp.inf)


def _ordered_bits(x: Float32[Array, "..."]) -> UInt32[Array, "..."]:
    """Unsigned integers in the order of the floats: sign bit set for positive, all bits turned for negative ones."""
    x = jnp.where(x == 0.0, 0.0, x)  # the two zeros compare equal; `x + 0.0` would be simplified away
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits < sign, bits | sign, ~bits)


def _check(name: str, value: float | int, valid: bool, expected: str) -> None:
    if not valid:
        raise ValueError(f"`{name}` must be {expected}; got {value!r}.")
