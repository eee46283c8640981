"""Kimi Delta Attention on arrays: checks the inputs, picks an implementation; and the one-token step for decoding."""

import functools
import logging

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kimi_zoo.ops.context import RowPart, axis_size, check_row_segments, from_last, row_part
from kimi_zoo.ops.kda_chunked import kda_chunked
from kimi_zoo.ops.kda_context import kda_over_ranks
from kimi_zoo.ops.kda_gates import Activation, Inputs, Tokens, accumulation_dtype, activate_tokens, check_gate
from kimi_zoo.ops.kda_recurrent import delta_step, kda_recurrent
from kimi_zoo.ops.kda_tokamax import (
    TOKAMAX_CHUNK,
    TOKAMAX_NAMES,
    check_tokamax,
    kda_tokamax,
    kda_tokamax_over_ranks,
    tokamax_crosses_ranks,
)
from kimi_zoo.ops.packing import check_segments
from kimi_zoo.ops.varying import vary_alike, varying_axes

IMPLEMENTATIONS = ("recurrent", "chunked", *TOKAMAX_NAMES)
SMALL_STATE = (
    8192  # key_dim * value_dim: a CPU scans over tokens faster at 64 x 64 (1.4 to 2 times), slower at 128 x 128
)

logger = logging.getLogger("kimi_zoo")


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
    initial_state: Float[Array, "batch heads key_dim value_dim"]
    | Float[Array, "batch segments heads key_dim value_dim"]
    | None = None,
    output_final_state: bool = False,
    segment_ids: Int[Array, "batch seq"] | None = None,
    max_num_segments: int | None = None,
    use_qk_l2norm: bool = False,
    chunk_size: int | None = None,
    implementation: str | None = None,
    context_axis: str | None = None,
) -> tuple[Float[Array, "batch seq heads value_dim"], Float[Array, "batch *state heads key_dim value_dim"] | None]:
    """Kimi Delta Attention over whole sequences.

    Per head, with a state `S` of key_dim by value_dim: `S <- exp(log_decay)[:, None] * S`, then
    `S <- S + beta * key (value - S^T key)^T`, and the output is `scale * S^T query`.

    **Arguments:**

    - `query`, `key`, `value`: after the short convolution; float32, bfloat16 or float16 (float64 works too). All sums
        and states are float32.
    - `gate`: the log-decay (natural log, at most 0, per token), or, when `a_log` is given, the raw gate that
        `kimi_zoo.ops.kda_gate` turns into it.
    - `beta`: write strength after the sigmoid.
    - `a_log`, `dt_bias` (`[heads * key_dim]` or `[heads, key_dim]`), `lower_bound`: see `kda_gate`.
    - `scale`: factor on the query, `key_dim ** -0.5` by default.
    - `initial_state`: float32 state that the first segment of each row continues from, `[batch, heads, key_dim,
        value_dim]`; with `max_num_segments` also one per segment id, `[batch, segments, heads, key_dim, value_dim]`.
    - `output_final_state`: whether to return the state after the last real token of each row.
    - `segment_ids`: 1, 2, ... for packed documents and 0 for padding, wherever it stands. The state is zero at the
        start of each segment but the row's first. At padding the output is 0 and the state stays as it is, whatever
        the inputs hold there, NaN included.
    - `max_num_segments`: asks for a final state per segment id, and says how many ids there may be. The tokens of each
        segment must then stand together. Ids without tokens keep their initial state.
    - `use_qk_l2norm`: whether to L2-normalise query and key (`x / sqrt(sum(x^2) + 1e-6)`) before scaling.
    - `chunk_size`: tokens per chunk of the chunked form, a power of two; 64 by default.
    - `implementation`: `None` for the best one where the program is lowered to, or one of `recurrent`, `chunked`,
        `tokamax_xla`, `tokamax_xla_chunked`, `tokamax_mosaic`: that one, or an error that says why not.
    - `context_axis`: inside `jax.shard_map`, the mesh axis over whose ranks each row is split into consecutive parts
        (no other order: a state depends on all that came before). Initial and final states are then those of the whole
        rows, the same on every rank; what is sent does not grow with the number of tokens.

    Derivatives are taken in reverse mode, also repeatedly, and forward mode over reverse; forward mode alone
    (`jax.jvp`) works with `recurrent` only.

    **Returns:** the output in the value's dtype, and the final state in float32 (`[batch, heads, key_dim, value_dim]`,
    or `[batch, segments, heads, key_dim, value_dim]` with `max_num_segments`), or `None` unless asked for.

    **Raises:** `ValueError` for shapes that do not fit, gate parameters out of range, and a named implementation that
    cannot run on these inputs.

    **Source:** Kimi Linear (arXiv:2510.26692), the KDA recurrence and its chunked form.
    """
    batch, seq, heads, key_dim = _check_tokens(query, key, value, gate, beta)
    check_gate(heads, key_dim, a_log, dt_bias, lower_bound)
    state_shape = (batch, heads, key_dim, value.shape[-1])
    _check_packing((batch, seq), state_shape, initial_state, segment_ids, max_num_segments)
    if implementation in TOKAMAX_NAMES:
        check_tokamax(
            implementation,
            seq=seq,
            key_dim=key_dim,
            dtype=query.dtype,
            a_log=a_log,
            lower_bound=lower_bound,
            segment_ids=segment_ids,
            max_num_segments=max_num_segments,
            varies=bool(varying_axes(query)),
        )
    _check_implementation(implementation, chunk_size)

    dtype = accumulation_dtype(query.dtype)
    dt_bias = None if dt_bias is None else dt_bias.reshape(heads, key_dim)
    activation = Activation(key_dim**-0.5 if scale is None else scale, lower_bound, use_qk_l2norm)
    if max_num_segments is not None and segment_ids is None:
        segment_ids = jnp.ones((batch, seq), jnp.int32)
    kernel_crosses = tokamax_crosses_ranks(
        implementation,
        key_dim,
        value.shape[-1],
        states=initial_state is not None or output_final_state,
        max_num_segments=max_num_segments,
    )
    axis, part = None, None
    if context_axis is not None and axis_size(context_axis, "context_axis") > 1 and seq:
        axis = context_axis
        part = None if segment_ids is None else row_part(segment_ids, axis)
    if max_num_segments is not None and segment_ids is not None:
        if part is None:
            segment_ids = check_segments(segment_ids, max_num_segments)
        else:
            segment_ids = check_row_segments(part, max_num_segments)
    from_zero = initial_state is None
    if initial_state is None:  # an outer product of nothing, so that it is laid out over devices as they are
        nothing = [jnp.zeros_like(jnp.sum(x, axis=1), dtype) for x in (query, value)]
        initial_state = nothing[0][..., :, None] * nothing[1][..., None, :]
    states = _initial_states(initial_state.astype(dtype), segment_ids, max_num_segments, part)
    tokens = Tokens(query, key, value, gate, beta)
    inputs = vary_alike(Inputs(tokens, states, a_log, dt_bias, segment_ids))
    run = lambda inputs: _run(implementation, inputs, activation, chunk_size)
    if axis is not None and part is not None and max_num_segments is not None and kernel_crosses:
        output, states = kda_tokamax_over_ranks(inputs, part, activation, max_num_segments, axis), None
    elif axis is not None:
        output, states = kda_over_ranks(run, inputs, part, axis, from_zero=from_zero)
    else:
        output, states = run(inputs)
        if context_axis is not None:
            states = from_last(states, context_axis)
    return output.astype(value.dtype), states if output_final_state else None


def kda_step(
    query: Float[Array, "batch heads key_dim"],
    key: Float[Array, "batch heads key_dim"],
    value: Float[Array, "batch heads value_dim"],
    gate: Float[Array, "batch heads key_dim"],
    beta: Float[Array, "batch heads"],
    state: Float[Array, "batch heads key_dim value_dim"],
    *,
    real: Bool[Array, " batch"] | None = None,
    a_log: Float[Array, " heads"] | None = None,
    dt_bias: Float[Array, "..."] | None = None,
    lower_bound: float | None = None,
    scale: float | None = None,
    use_qk_l2norm: bool = False,
) -> tuple[Float[Array, "batch heads value_dim"], Float[Array, "batch heads key_dim value_dim"]]:
    """One token of `kimi_delta_attention`, for decoding: the output and the state after it.

    The arguments mean what they mean there. The state is float32; donate it to the jitted step that calls this. Rows
    that are not `real` keep their state to the bit, and their output is 0.
    """
    batch, _, heads, key_dim = _check_tokens(*(x[:, None] for x in (query, key, value, gate, beta)))
    check_gate(heads, key_dim, a_log, dt_bias, lower_bound)
    if state.shape != (batch, heads, key_dim, value.shape[-1]):
        raise ValueError(f"`state` must have shape {(batch, heads, key_dim, value.shape[-1])}, got {state.shape}.")
    dt_bias = None if dt_bias is None else dt_bias.reshape(heads, key_dim)
    activation = Activation(key_dim**-0.5 if scale is None else scale, lower_bound, use_qk_l2norm)
    token = activate_tokens(Tokens(query, key, value, gate, beta), real, a_log, dt_bias, activation)
    state, output = delta_step(state.astype(token.query.dtype), *token)
    return output.astype(value.dtype), state


def _run(implementation: str | None, inputs: Inputs, activation: Activation, chunk_size: int | None):
    """Output and final states of the implementation asked for."""
    if implementation is None:
        return _run_best(inputs, activation, chunk_size)
    if implementation == "chunked":
        return kda_chunked(inputs, activation, chunk_size)
    if implementation == "recurrent":
        return _recurrent(inputs, activation)
    if inputs.states.ndim == 5:
        return kda_tokamax(implementation, inputs, activation)
    output, states = kda_tokamax(implementation, inputs._replace(states=inputs.states[:, None]), activation)
    return output, states[:, 0]


def _recurrent(inputs: Inputs, activation: Activation):
    real = None if inputs.segment_ids is None else inputs.segment_ids > 0
    tokens = activate_tokens(inputs.tokens, real, inputs.a_log, inputs.dt_bias, activation)
    output, states = kda_recurrent(*tokens, inputs.states, inputs.segment_ids)
    return output.astype(inputs.tokens.value.dtype), states


def kda_implementation(
    key_dim: int,
    value_dim: int,
    *,
    platform: str,
    derivative: bool = False,
    max_num_segments: int | None = None,
    chunk_size: int | None = None,
) -> str:
    """The implementation that `kimi_delta_attention(..., implementation=None)` runs as.

    **Arguments:**

    - `key_dim`, `value_dim`, `max_num_segments`, `chunk_size`: as there.
    - `platform`: where the program will run, `"cpu"`, `"gpu"` or `"tpu"`: that of the lowering.
    - `derivative`: whether a derivative is taken.

    **Returns:** `"recurrent"` for forward passes on a CPU with states of at most 8192 numbers, one state per row and no
    chunk size asked for, at any length; else `"chunked"`. Measured by `benchmarks/kda.py` on a CPU; elsewhere the
    chunked form is the one that is right for every gate and differentiable in little memory.
    """
    small = key_dim * value_dim <= SMALL_STATE
    if platform == "cpu" and small and not derivative and max_num_segments is None and chunk_size is None:
        return "recurrent"
    return "chunked"


def _run_best(inputs: Inputs, activation: Activation, chunk_size: int | None):
    seq, key_dim = inputs.tokens.key.shape[1], inputs.tokens.key.shape[-1]
    bounded = inputs.a_log is not None and activation.lower_bound is not None
    _log_kernel(bounded and key_dim <= 256 and seq % TOKAMAX_CHUNK == 0)
    segments = inputs.states.shape[1] if inputs.states.ndim == 5 else None
    value_dim = inputs.states.shape[-1]
    on_cpu = kda_implementation(key_dim, value_dim, platform="cpu", max_num_segments=segments, chunk_size=chunk_size)
    if on_cpu == "recurrent":
        _log_choice(
            '"recurrent" where it is lowered to a CPU and not differentiated, "chunked" elsewhere',
            f"on a CPU the scan over tokens is the faster forward pass for states up to {SMALL_STATE} numbers",
        )
        return _recurrent_or_chunked(inputs, activation)
    _log_choice('"chunked"', "it takes every gate and is the fastest to differentiate")
    return kda_chunked(inputs, activation, chunk_size)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _recurrent_or_chunked(inputs: Inputs, activation: Activation):
    def recurrent(inputs: Inputs):
        return _recurrent(inputs, activation)

    def chunked(inputs: Inputs):
        return kda_chunked(inputs, activation, None)

    return jax.lax.platform_dependent(inputs, cpu=recurrent, default=chunked)


def _chunked_forward(inputs: Inputs, activation: Activation):
    inputs = jax.tree.map(jnp.array, inputs)  # constants arrive as something that is no `jax.Array`
    return jax.vjp(lambda inputs: kda_chunked(inputs, activation, None), inputs)


def _chunked_backward(activation: Activation, pullback, cotangents: tuple):
    return pullback(cotangents)


_recurrent_or_chunked.defvjp(_chunked_forward, _chunked_backward)


@functools.cache
def _log_choice(choice: str, reason: str) -> None:
    """Says once what was chosen, and why."""
    logger.info("kimi_delta_attention runs as %s: %s.", choice, reason)


@functools.cache
def _log_kernel(possible: bool) -> None:
    """Says once that a kernel may be faster, on the one platform that has one."""
    if possible and jax.default_backend() == "tpu":
        logger.info(
            'kimi_delta_attention runs as "chunked" on a TPU. For this bounded gate "tokamax_mosaic" may be several '
            "times faster from generation 6 on. It has not been measured with this package: it has to be asked for."
        )


def _initial_states(
    state: Float[Array, "batch *segments heads key_dim value_dim"],
    segment_ids: Array | None,
    max_num_segments: int | None,
    part: RowPart | None,
) -> Float[Array, "batch *states heads key_dim value_dim"]:
    """The state before each row, or before each segment id: a row's single state belongs to its first segment."""
    if max_num_segments is None or segment_ids is None or state.ndim == 5:
        return state
    batch, seq = segment_ids.shape
    first = jnp.zeros((batch,), segment_ids.dtype)
    if part is not None:
        first = part.first_id
    elif seq:
        first_real = jnp.argmax(segment_ids > 0, axis=1)
        first = jnp.take_along_axis(segment_ids, first_real[:, None], axis=1)[:, 0]
    owner = jnp.maximum(first, 1)[:, None] == jnp.arange(1, max_num_segments + 1, dtype=segment_ids.dtype)
    return jnp.where(owner[:, :, None, None, None], state[:, None], jnp.zeros_like(state)[:, None])


def _check_tokens(query: Array, key: Array, value: Array, gate: Array, beta: Array) -> tuple[int, int, int, int]:
    """Shapes of the inputs that have one entry per token; returns batch, seq, heads and key_dim."""
    if query.ndim != 4 or value.ndim != 4:
        raise ValueError(
            f"`query` and `value` must have the axes [batch, seq, heads, dim], got {query.shape} and {value.shape}."
        )
    if value.shape[2] != query.shape[2]:
        raise ValueError(
            "`query`, `key` and `value` need equally many heads (grouped value heads are not taken; repeat query, key "
            f"and gate for them), got {query.shape[2]} in `query` and {value.shape[2]} in `value`."
        )
    expected = {"key": (key, query.shape), "gate": (gate, query.shape), "beta": (beta, query.shape[:3])}
    for name, (array, shape) in expected.items():
        if array.shape != shape:
            raise ValueError(f"`{name}` must have shape {shape} to go with `query`, got {array.shape}.")
    if value.shape[:3] != query.shape[:3]:
        raise ValueError(f"`value` must have {query.shape[:3]} as its first axes, as `query`, got {value.shape}.")
    batch, seq, heads, key_dim = query.shape
    return batch, seq, heads, key_dim


def _check_packing(
    rows: tuple[int, int],
    state_shape: tuple[int, int, int, int],
    initial_state: Array | None,
    segment_ids: Array | None,
    max_num_segments: int | None,
) -> None:
    if segment_ids is not None and segment_ids.shape != rows:
        raise ValueError(f"`segment_ids` must have shape [batch, seq] = {rows}, got {segment_ids.shape}.")
    if segment_ids is not None and not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise ValueError(f"`segment_ids` must be integers, got {segment_ids.dtype}.")
    if max_num_segments is not None and max_num_segments < 1:
        raise ValueError(f"`max_num_segments` must be at least 1, got {max_num_segments}.")
    allowed: list[tuple[int, ...]] = [state_shape]
    if max_num_segments is not None:
        allowed.append((state_shape[0], max_num_segments, *state_shape[1:]))
    if initial_state is not None and initial_state.shape not in allowed:
        raise ValueError(
            f"`initial_state` must have shape {' or '.join(map(str, allowed))}, got {initial_state.shape}."
        )


def _check_implementation(implementation: str | None, chunk_size: int | None) -> None:
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        available = ", ".join(f'"{name}"' for name in IMPLEMENTATIONS)
        raise ValueError(f'there is no `implementation="{implementation}"`; available are {available}, or None.')
    if chunk_size is None:
        return
    if implementation not in (None, "chunked"):
        raise ValueError(f'`chunk_size` belongs to the chunked form; `implementation="{implementation}"` has none.')
    if chunk_size < 1 or chunk_size & (chunk_size - 1):
        raise ValueError(f"`chunk_size` must be a power of two, got {chunk_size}.")
