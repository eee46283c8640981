"""Cross entropy of the output head by tokamax's fused TPU kernel: logits live in blocks, in the chip's fast memory."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from kimi_zoo.models.kimi_linear import KimiLinear
from kimi_zoo.ops.kda_tokamax import silence_cache_misses

SUBLANES = 8  # the kernel takes hidden sizes that are multiples of it


def fused_is_valid(model: KimiLinear) -> bool:
    """Whether this program runs on one TPU whose kernel takes the model's output head.

    Decided when traced, from the devices there are: tokamax asks the TPU for its sizes at that time, so that a choice
    at lowering (`jax.lax.platform_dependent`) could not even be traced elsewhere. XLA cannot cut a kernel into shards,
    so several devices use the chunked form.
    """
    if jax.default_backend() != "tpu" or jax.device_count() > 1:
        return False
    from jax.experimental.pallas import tpu as pltpu

    bias = None if model.head is None else model.head.bias
    return pltpu.get_tpu_info().generation >= 5 and bias is None and model.config.hidden_size % SUBLANES == 0


def fused_token_losses(
    hidden: Float[Array, "tokens hidden_size"],
    targets: Int[Array, " tokens"],
    weight: Float[Array, "vocab_size hidden_size"],
) -> tuple[Float32[Array, " tokens"], Float32[Array, " tokens"]]:
    """Cross entropy of every token in nats, and the log-sum-exp of its logits, which is the loss plus the target's
    logit: tokamax returns the loss alone.

    **Raises:** `NotImplementedError` by tokamax where there is no TPU of generation 5 or later.
    """
    import tokamax

    silence_cache_misses()
    weight = weight.astype(hidden.dtype)
    losses = tokamax.linear_softmax_cross_entropy_loss(
        hidden, targets.astype(jnp.int32), weight.T, reduction="none", implementation="mosaic_tpu"
    ).astype(jnp.float32)
    chosen = jnp.einsum("th,th->t", hidden, weight[targets], preferred_element_type=jnp.float32)
    return losses, losses + chosen
