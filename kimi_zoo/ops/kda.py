"""Kimi Delta Attention on arrays: checks the inputs, picks an implementation; and the one-token step for decoding."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kimi_zoo.ops.kda_chunked import kda_chunked
from kimi_zoo.ops.kda_gates import Activation, accumulation_dtype, activate_tokens, check_gate
from kimi_zoo.ops.kda_recurrent import delta_step, kda_recurrent
from kimi_zoo.ops.packing import segment_starts

IMPLEMENTATIONS = ("recurrent", "chunked")


def kimi_delta_attention(
    query: Float[Array, "batch seq heads key_dim"],
    key: Float[Array, "batch seq heads key_dim"],
    value: Float[Array, "batch seq heads value_dim"],
    gate: Float[Array, "batch seq heads key_dim"],
    beta: Float[Array, "batch seq heads"],
    *,
    a_log: Float[Array, " heads"] | None = None,
    dt_bias: Float[Array, "..."] | None = None,
    lower_bound: float | None = None,
    scale: float | None = None,
    initial_state: Float[Array, "batch heads key_dim value_dim"] | None = None,
    output_final_state: bool = False,
    segment_ids: Int[Array, "batch seq"] | None = None,
    max_num_segments: int | None = None,
    use_qk_l2norm: bool = False,
    chunk_size: int | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "batch seq heads value_dim"], Float[Array, "batch *segments heads key_dim value_dim"] | None]:
    """Kimi Delta Attention over whole sequences: output in the value's dtype, and the final state in float32 or None."""
    batch, seq, heads, key_dim = query.shape
    check_gate(heads, key_dim, a_log, dt_bias, lower_bound)
    dt_bias = None if dt_bias is None else dt_bias.reshape(heads, key_dim)
    dtype = accumulation_dtype(query.dtype)
    activation = Activation(key_dim**-0.5 if scale is None else scale, lower_bound, use_qk_l2norm)
    if initial_state is None:
        initial_state = jnp.zeros((batch, heads, key_dim, value.shape[-1]), dtype)
    real = None if segment_ids is None else segment_ids > 0
    starts = None if segment_ids is None else segment_starts(segment_ids)
    if implementation == "recurrent":
        inputs = activate_tokens(query, key, value, gate, beta, real, a_log, dt_bias, activation)
        output, state = kda_recurrent(*inputs, initial_state.astype(dtype), starts)
    else:
        output, state = kda_chunked(
            query,
            key,
            value,
            gate,
            beta,
            initial_state.astype(dtype),
            a_log,
            dt_bias,
            real,
            starts,
            activation,
            chunk_size,
        )
    return output.astype(value.dtype), state if output_final_state else None


def kda_step(
    query: Float[Array, "batch heads key_dim"],
    key: Float[Array, "batch heads key_dim"],
    value: Float[Array, "batch heads value_dim"],
    gate: Float[Array, "batch heads key_dim"],
    beta: Float[Array, "batch heads"],
    state: Float[Array, "batch heads key_dim value_dim"],
    *,
    a_log: Float[Array, " heads"] | None = None,
    dt_bias: Float[Array, "..."] | None = None,
    lower_bound: float | None = None,
    scale: float | None = None,
    use_qk_l2norm: bool = False,
) -> tuple[Float[Array, "batch heads value_dim"], Float[Array, "batch heads key_dim value_dim"]]:
    """One token of `kimi_delta_attention`, for decoding: the output and the state after it.

    The arguments mean what they mean there. The state is float32; donate it to the jitted step that calls this.
    """
    heads, key_dim = query.shape[-2:]
    check_gate(heads, key_dim, a_log, dt_bias, lower_bound)
    dt_bias = None if dt_bias is None else dt_bias.reshape(heads, key_dim)
    activation = Activation(key_dim**-0.5 if scale is None else scale, lower_bound, use_qk_l2norm)
    tokens = [x[:, None] for x in (query, key, value, gate, beta)]
    tokens = activate_tokens(*tokens, None, a_log, dt_bias, activation)
    state, output = delta_step(state.astype(tokens[0].dtype), *(x[:, 0] for x in tokens))
    return output.astype(value.dtype), state
