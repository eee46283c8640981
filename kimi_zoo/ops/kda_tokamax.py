"""Kimi Delta Attention through tokamax's public operator: layouts, packing and constraints."""

import logging
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kimi_zoo.ops.context import RowPart
from kimi_zoo.ops.kda_gates import Activation, Inputs, Tokens, kda_gate
from kimi_zoo.ops.packing import align_segments, segment_starts

TOKAMAX_CHUNK = 64
TOKAMAX_NAMES: dict[str, Literal["xla", "xla_chunked", "mosaic"]] = {
    "tokamax_xla": "xla",
    "tokamax_xla_chunked": "xla_chunked",
    "tokamax_mosaic": "mosaic",
}


def check_tokamax(
    implementation: str,
    *,
    seq: int,
    key_dim: int,
    dtype: jnp.dtype,
    a_log: Array | None,
    lower_bound: float | None,
    segment_ids: Array | None,
    max_num_segments: int | None,
    varies: bool,
) -> None:
    """Raises `ValueError` when tokamax's implementation does not take these inputs. Needs no tokamax.

    `varies`: whether the inputs are typed as varying over mesh axes, which `jax.shard_map` does when it checks.
    """

    def refuse(reason: str) -> None:
        raise ValueError(f'`implementation="{implementation}"` {reason} Use "chunked", which takes any input.')

    if varies:
        refuse("does not say how its loops vary over a mesh: inside `jax.shard_map` it needs `check_vma=False`.")
    if segment_ids is not None and max_num_segments is None:
        refuse("needs `max_num_segments` when `segment_ids` are given: tokamax keeps one state per segment.")
    if seq == 0:
        refuse("needs at least one token, got seq = 0.")
    if implementation == "tokamax_xla":
        return
    if implementation == "tokamax_xla_chunked" and a_log is None:
        refuse("activates the gate itself: it needs the raw `gate` with `a_log`, not a log-decay.")
    if a_log is not None and lower_bound is None:
        refuse("takes the bounded gate only: it needs `lower_bound` in [-5, 0), got None.")
    if segment_ids is None and seq % TOKAMAX_CHUNK:
        refuse(f"needs a sequence length divisible by {TOKAMAX_CHUNK}, got {seq}.")
    if implementation == "tokamax_mosaic" and key_dim > 256:
        refuse(f"takes key dimensions up to 256, got {key_dim}.")
    if implementation == "tokamax_mosaic" and dtype not in (jnp.bfloat16, jnp.float32):
        refuse(f"takes bfloat16 and float32, got {dtype}.")


def kda_tokamax(
    implementation: str, inputs: Inputs, activation: Activation
) -> tuple[Float[Array, "batch seq heads value_dim"], Float[Array, "batch segments heads key_dim value_dim"]]:
    """Output of every token and one state per segment id; the inputs hold one for each.

    tokamax wants segments numbered in order with all padding at the end, so real tokens are moved together first.

    **Raises:** `ValueError` when tokamax says that the implementation does not run here.
    """
    tokens, initial_state, a_log, dt_bias, segment_ids = inputs
    alignment, slots, run_states = None, None, initial_state
    if segment_ids is not None:
        if implementation == "tokamax_mosaic":
            inputs = _activate(inputs, segment_ids > 0, activation)
            tokens, _, a_log, dt_bias, _ = inputs
        alignment = align_segments(segment_ids, 1, initial_state.shape[1])
        tokens = Tokens(*map(alignment.gather, tokens))
        slots = _number_runs(segment_ids, initial_state.shape[1])
        run_states = _take_states(initial_state, slots.id_of_run)
        segment_ids = alignment.gather(slots.run)
    output, state = _call_tokamax(
        implementation,
        *(jnp.moveaxis(x, 2, 0) for x in tokens),
        a_log=a_log,
        delta_time_bias=None if dt_bias is None else dt_bias.reshape(-1),
        scale=activation.scale,
        initial_state=run_states,
        output_final_state=True,
        use_qk_l2norm=activation.use_qk_l2norm,
        use_gate_in_kernel=a_log is not None,
        segment_ids=segment_ids,
        lower_bound=activation.lower_bound,
    )
    output = jnp.moveaxis(output, 0, 2)
    if alignment is not None and slots is not None:
        output = alignment.restore(output)
        present = slots.run_of_id[..., None, None, None] > 0
        state = jnp.where(present, _take_states(state, slots.run_of_id), initial_state)
    return output, state


def tokamax_crosses_ranks(
    implementation: str | None, key_dim: int, value_dim: int, *, states: bool, max_num_segments: int | None
) -> bool:
    """Whether tokamax's kernel can itself combine ranks; otherwise it runs on each, and this package combines them.

    `states`: whether initial or final states are asked for.
    """
    wide = key_dim % 128 == 0 and value_dim % 128 == 0
    return implementation == "tokamax_mosaic" and wide and not states and max_num_segments is not None


def kda_tokamax_over_ranks(
    inputs: Inputs, part: RowPart, activation: Activation, max_num_segments: int, axis: str
) -> Float[Array, "batch seq heads value_dim"]:
    """Output of every token by tokamax's own context-parallel kernel, inside `jax.shard_map`.

    It takes a document to go on where neighbours' last and first ids agree, so a rank that holds padding only is given
    a token of the document before it, whose inputs are all 0: it changes nothing.
    """
    from tokamax._src.ops import kda  # public nowhere else; takes seconds to import: only when it is used

    mesh: Any = jax.sharding.get_abstract_mesh()  # the size and the name of the axis are all it is asked for
    inputs = _activate(inputs, part.documents > 0, activation)
    alignment = align_segments(part.documents, 1, part.documents.shape[1])
    documents = alignment.gather(part.documents)
    filled = jnp.where(part.first > 0, documents[:, 0], part.before)
    output, _ = _call_tokamax(
        "tokamax_mosaic",
        *(jnp.moveaxis(alignment.gather(x), 2, 0) for x in inputs.tokens),
        scale=activation.scale,
        use_qk_l2norm=activation.use_qk_l2norm,
        segment_ids=documents.at[:, 0].set(filled),
        max_num_segments=max_num_segments,
        context_parallel_metadata=kda.ContextParallelMetadata(mesh, axis),
    )
    return alignment.restore(jnp.moveaxis(output, 0, 2))


def _activate(inputs: Inputs, real: Bool[Array, "batch seq"], activation: Activation) -> Inputs:
    """With log-decays: the kernel's own activation takes places between segments, never written, into `a_log`'s
    gradient."""
    tokens, _, a_log, dt_bias, _ = inputs
    if a_log is None:
        return inputs
    gate = jnp.where(real[..., None, None], tokens.gate, jnp.zeros((), tokens.gate.dtype))
    gate = kda_gate(gate, a_log, dt_bias, activation.lower_bound)
    return inputs._replace(tokens=tokens._replace(gate=gate), a_log=None, dt_bias=None)


class _Runs(NamedTuple):
    """tokamax numbers the segments of a row in order, we by their ids: the way between the two numberings."""

    run: Int[Array, "batch seq"]  # 0 at padding
    id_of_run: Int[Array, "batch segments"]  # 0 where there is no such run
    run_of_id: Int[Array, "batch segments"]  # 0 where no token has the id


def _number_runs(segment_ids: Int[Array, "batch seq"], segments: int) -> _Runs:
    ids = segment_ids.astype(jnp.int32)
    run = jnp.where(ids > 0, jnp.cumsum(segment_starts(ids), axis=1, dtype=jnp.int32) + 1, 0)
    rows = jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None]
    none = jnp.zeros((ids.shape[0], segments + 1), jnp.int32)  # column 0 collects the padding
    return _Runs(run, none.at[rows, run].max(ids)[:, 1:], none.at[rows, ids].max(run)[:, 1:])


def _take_states(states: Array, number: Int[Array, "batch segments"]) -> Array:
    """The states with these 1-based numbers; the first one where the number is 0."""
    index = jnp.maximum(number - 1, 0)[..., None, None, None]
    return jnp.take_along_axis(states, index, axis=1)


def _call_tokamax(implementation: str, *args: Array, **kwargs) -> tuple[Array, Any]:
    """Output, and the final states if asked for."""
    from tokamax.ops import kimi_delta_attention  # takes seconds to import: only when it is used

    silence_cache_misses()
    try:
        output, states = kimi_delta_attention(*args, **kwargs, implementation=TOKAMAX_NAMES[implementation])
    except NotImplementedError as error:
        message = f'`implementation="{implementation}"` cannot run here: {error}'
        raise ValueError(message) from error
    return output, states


def _without_cache_misses(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Autotuning cache miss")


def silence_cache_misses() -> None:
    """tokamax warns at each trace that its autotuning cache holds nothing for these shapes: true and of no use."""
    logging.getLogger("absl").addFilter(_without_cache_misses)
