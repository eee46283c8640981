"""Kimi Delta Attention in chunks, in plain JAX: one scan over chunks, with a derivative of its own.

The formulas of a chunk, forward and backward, stand in `kda_chunk.py`. The forward scan turns raw inputs into
normalised queries and keys and log-decays chunk by chunk. When a derivative is taken it also keeps the state before
each chunk; the backward scan computes everything else again, from the last chunk to the first.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kimi_zoo.ops.kda_chunk import Tiling, chunk_backward, chunk_forward
from kimi_zoo.ops.kda_gates import Activation, Inputs, Tokens, activate_tokens
from kimi_zoo.ops.kda_recurrent import read_slot, write_slot
from kimi_zoo.ops.packing import align_segments, segment_starts
from kimi_zoo.ops.varying import zeros_like

DEFAULT_CHUNK_SIZE = 64
_CPU_BLOCK_SIZE = 8  # fewest operations per token; elsewhere the fewest operations count: one block
_CPU_FORWARD_CHUNK_SIZE = 32  # a tenth to a fifth faster there than 64, but only while no derivative is taken


class Operands(NamedTuple):
    """What the scan reads. The last three are integers and have no derivative."""

    tokens: Tokens  # raw, `batch seq heads ...`
    states: Float[Array, "batch *segments heads key_dim value_dim"]
    a_log: Float[Array, " heads"] | None
    dt_bias: Float[Array, "heads key_dim"] | None
    real: Bool[Array, "batch seq"] | None  # False at padding
    starts: Bool[Array, "batch seq"] | None  # where a segment starts from a zero state
    slots: Int[Array, "batch chunks"] | None  # which of several states each chunk works on


@dataclasses.dataclass(frozen=True)
class _Static:
    activation: Activation
    chunk: int
    cpu_forward_chunk: int


def kda_chunked(
    inputs: Inputs, activation: Activation, chunk_size: int | None
) -> tuple[Float[Array, "batch seq heads value_dim"], Float[Array, "batch *segments heads key_dim value_dim"]]:
    """Output of every token and the final state, or, for one initial state per segment id, as many final states.

    The inputs are raw: normalisation, scale and gate are applied chunk by chunk.
    """
    tokens, states, a_log, dt_bias, segment_ids = inputs
    batch, seq = tokens.query.shape[:2]
    if batch * seq == 0:
        return tokens.value, states
    chunk = chunk_size or min(DEFAULT_CHUNK_SIZE, 1 << (seq - 1).bit_length())
    if states.ndim == 5 and segment_ids is not None:
        return _scan_segments(inputs, segment_ids, _Static(activation, chunk, chunk))
    real = None if segment_ids is None else segment_ids > 0
    starts = None if segment_ids is None else segment_starts(segment_ids)
    padding = -seq % chunk
    if padding:
        real = jnp.ones(tokens.query.shape[:2], bool) if real is None else real
        tokens, real, starts = jax.tree.map(functools.partial(_pad, padding=padding), (tokens, real, starts))
    static = _Static(activation, chunk, chunk if chunk_size else min(chunk, _CPU_FORWARD_CHUNK_SIZE))
    output, states = _scan(Operands(tokens, states, a_log, dt_bias, real, starts, None), static)
    return output[:, :seq], states


def _scan_segments(inputs: Inputs, segment_ids: Int[Array, "batch seq"], static: _Static):
    """With a state for each segment: every segment is moved to the start of a chunk, which then works on its state."""
    tokens, states, a_log, dt_bias, _ = inputs
    alignment = align_segments(segment_ids, static.chunk, states.shape[1])
    ids = alignment.gather(segment_ids)
    slots = jnp.maximum(jnp.max(ids.reshape(ids.shape[0], -1, static.chunk), axis=-1) - 1, 0)
    tokens = Tokens(*map(alignment.gather, tokens))
    output, states = _scan(Operands(tokens, states, a_log, dt_bias, ids > 0, None, slots), static)
    return alignment.restore(output), states


def _pad(x: Array, padding: int) -> Array:
    return jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _scan(operands: Operands, static: _Static) -> tuple[Array, Array]:
    """Output and final state or states."""
    return _by_platform(_forward, static, static.cpu_forward_chunk, operands)


def _scan_forward(operands: Operands, static: _Static):
    output, final_state, states = _by_platform(functools.partial(_forward, keep=True), static, static.chunk, operands)
    return (output, final_state), (operands, states)


def _scan_backward(static: _Static, residuals: tuple[Operands, Array], cotangents: tuple[Array, Array]):
    return (_by_platform(_backward, static, static.chunk, *residuals, *cotangents),)


_scan.defvjp(_scan_forward, _scan_backward)


def _by_platform(function: Callable, static: _Static, cpu_chunk: int, *operands):
    """Calls the function with the tiling that is fast where the program will run."""
    size = operands[0].tokens.query.dtype.itemsize
    # 16-bit inputs: three bfloat16 passes keep 16 bits of each product on TPUs, which CPUs compute in float32 anyway
    precision = jax.lax.Precision.HIGH if size == 2 else jax.lax.Precision.HIGHEST
    cpu = Tiling(cpu_chunk, min(cpu_chunk, _CPU_BLOCK_SIZE), precision)
    default = Tiling(static.chunk, static.chunk, precision)
    if cpu == default:
        return function(static, default, *operands)
    return jax.lax.platform_dependent(
        *operands, cpu=functools.partial(function, static, cpu), default=functools.partial(function, static, default)
    )


def _take[Tree](tree: Tree, index: Int[Array, ""], chunk: int) -> Tree:
    """The tokens of one chunk. Chunks have an axis of their own, or a TPU would lay the whole arrays out anew."""

    def take(x: Array) -> Array:
        chunks = x.reshape(x.shape[0], -1, chunk, *x.shape[2:])
        return jax.lax.dynamic_index_in_dim(chunks, index, axis=1, keepdims=False)

    return jax.tree.map(take, tree)


def _put(x: Array, piece: Array, index: Int[Array, ""]) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, piece.astype(x.dtype), index * piece.shape[1], axis=1)


def _heads_first(x: Float[Array, "batch chunk heads *dim"]) -> Float[Array, "batch heads chunk *dim"]:
    return jnp.moveaxis(x, 2, 1)


def _number_segments(starts: Bool[Array, "batch chunk"]) -> Int[Array, "batch chunk"]:
    """How many segments have started in the chunk, up to and with each token."""
    up_to = np.tri(starts.shape[-1], dtype=bool)
    return jnp.sum(starts[:, None, :] & up_to, axis=-1, dtype=jnp.int32)


def _forward(static: _Static, tiling: Tiling, operands: Operands, keep: bool = False):
    """Output and final states, and with `keep` the state before each chunk."""
    tokens, initial_states, a_log, dt_bias, real, starts, slots = operands
    chunks = tokens.query.shape[1] // tiling.chunk

    def step(carry, _):
        index, states, output = carry
        raw, real_here, starts_here = _take((tokens, real, starts), index, tiling.chunk)
        activated = activate_tokens(raw, real_here, a_log, dt_bias, static.activation)
        segment = None if starts_here is None else _number_segments(starts_here)
        slot = None if slots is None else slots[:, index]
        before = read_slot(states, slot)
        query, key, value, log_decay, beta = map(_heads_first, activated)
        state, out, _ = chunk_forward(before, query, key, value, log_decay, beta, segment, tiling)
        carry = (index + 1, write_slot(states, slot, state), _put(output, _heads_first(out), index))
        return carry, before if keep else None

    carry = (jnp.int32(0), initial_states, zeros_like(tokens.value))
    (_, states, output), kept = jax.lax.scan(step, carry, length=chunks)
    return (output, states, kept) if keep else (output, states)


def _backward(
    static: _Static, tiling: Tiling, operands: Operands, kept: Array, d_output: Array, d_states: Array
) -> Operands:
    """Cotangents of the operands."""
    tokens, _, a_log, dt_bias, real, starts, slots = operands

    def step(carry, before):
        index, d_states, d_tokens, d_parameters = carry
        raw, real_here, starts_here = _take((tokens, real, starts), index, tiling.chunk)

        def activate(raw, a_log, dt_bias):
            return activate_tokens(raw, real_here, a_log, dt_bias, static.activation)

        activated, activate_backward = jax.vjp(activate, raw, a_log, dt_bias)
        query, key, value, log_decay, beta = map(_heads_first, activated)
        segment = None if starts_here is None else _number_segments(starts_here)
        slot = None if slots is None else slots[:, index]
        _, _, forward = chunk_forward(before, query, key, value, log_decay, beta, segment, tiling)
        d_out = _heads_first(_take(d_output, index, tiling.chunk)).astype(before.dtype)
        d_state, d_activated = chunk_backward(
            before, query, key, beta, segment, forward, read_slot(d_states, slot), d_out, tiling
        )
        d_raw, *d_here = activate_backward(Tokens(*map(_heads_first, d_activated)))
        d_tokens = jax.tree.map(lambda x, piece: _put(x, piece, index), d_tokens, d_raw)
        d_states = write_slot(d_states, slot, d_state)
        return (index - 1, d_states, d_tokens, jax.tree.map(jnp.add, d_parameters, tuple(d_here))), None

    last = jnp.int32(kept.shape[0] - 1)
    carry = (last, d_states, *jax.tree.map(zeros_like, (tokens, (a_log, dt_bias))))
    (_, d_states, d_tokens, (d_a_log, d_dt_bias)), _ = jax.lax.scan(step, carry, kept, reverse=True)
    return Operands(d_tokens, d_states, d_a_log, d_dt_bias, None, None, None)
