"""Rotary position embeddings, with YaRN scaling, in both published layouts."""

import math
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def rope_frequencies(
    dim: int, theta: float, scaling: Mapping[str, object] | None = None
) -> tuple[Float[np.ndarray, " half"], float]:
    """Angular frequencies (radians per position) of `dim / 2` rotations, and the factor on cosine and sine.

    **Arguments:**

    - `dim`: rotated channels, even.
    - `theta`: base of the geometric progression.
    - `scaling`: `rope_scaling` of a published config: `None`, or `type` `"yarn"` with `factor`,
        `original_max_position_embeddings` and optionally `beta_fast`, `beta_slow`, `mscale`, `mscale_all_dim`.

    **Raises:** `ValueError` for an odd `dim`, an unknown type or a missing parameter.

    **Source:** RoPE (arXiv:2104.09864); YaRN (arXiv:2309.00071), equations 17 to 23, with DeepSeek-V3's two mscales.
    """
    if dim % 2:
        raise ValueError(f"Rotary embeddings rotate pairs of channels: the dimension must be even, got {dim}.")
    inverse = 1.0 / theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    if scaling is None:
        return inverse.astype(np.float32), 1.0
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind in (None, "default"):
        return inverse.astype(np.float32), 1.0
    if kind != "yarn":
        raise ValueError(f'`rope_scaling` type {kind!r} is not known; expected "yarn" or "default".')
    missing = {"factor", "original_max_position_embeddings"} - set(scaling)
    if missing:
        raise ValueError(f"`rope_scaling` of type yarn needs {', '.join(sorted(missing))}; got {dict(scaling)}.")
    number = lambda name, default: float(scaling.get(name, default))  # type: ignore[arg-type]
    factor, original = number("factor", 1.0), number("original_max_position_embeddings", 0.0)

    def channel(rotations: float) -> float:
        """The channel pair that turns `rotations` times over the original context."""
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(channel(number("beta_fast", 32.0))), 0)
    high = min(math.ceil(channel(number("beta_slow", 1.0))), dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
    inverse = inverse / factor * ramp + inverse * (1.0 - ramp)
    concentration = yarn_mscale(factor, number("mscale", 1.0)) / yarn_mscale(factor, number("mscale_all_dim", 0.0))
    return inverse.astype(np.float32), concentration


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's attention temperature for a context stretched `factor` times: `0.1 mscale ln(factor) + 1`."""
    return 1.0 if factor <= 1.0 or mscale == 0.0 else 0.1 * mscale * math.log(factor) + 1.0


def apply_rope(
    x: Float[Array, "batch seq heads dim"],
    positions: Int[Array, "batch seq"],
    frequencies: Float[np.ndarray, " half"],
    *,
    concentration: float = 1.0,
    interleaved: bool,
) -> Float[Array, "batch seq heads dim"]:
    """Rotates channel pairs of `x` by `positions * frequencies`, computed in float32.

    `interleaved` pairs channels (0, 1), (2, 3), ... and gives them back as (first halves, second halves), as DeepSeek's
    code does (queries and keys are permuted alike, so scores are those of the rotation in place); otherwise channel `i`
    is paired with `i + dim / 2`.
    """
    angle = positions[..., None].astype(jnp.float32) * jnp.asarray(frequencies)
    cos, sin = (concentration * f(angle)[:, :, None] for f in (jnp.cos, jnp.sin))
    wide = x.astype(jnp.float32)
    if interleaved:
        first, second = wide[..., 0::2], wide[..., 1::2]
    else:
        first, second = jnp.split(wide, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
