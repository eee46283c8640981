"""Kimi Delta Attention over rows that are split across devices: what a rank adds to the state that reaches it.

The recurrence is linear in its state: behind a rank's tokens it is `U + M S`, and its outputs are `o + R S`, with `S`
the state before them. A rank learns all four by running the operator once, on values `[v | 0]` from the state
`[0 | I]`: the state behind is `[U | M]`, the output `[o | R]`. Two neighbours together are

    M = M2 M1        U = M2 U1 + U2

which is associative, so that states reach every rank in `log2` many exchanges of key_dim * (key_dim + value_dim)
numbers per head, whatever the length of the rows. Nothing is divided and no exponent is positive, as in the operator.
A document that begins on a rank cuts what comes from the left: its `M` is 0.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kimi_zoo.ops.context import RowPart, edge_id, exclusive_scan, from_last
from kimi_zoo.ops.kda_gates import Inputs


class Transition(NamedTuple):
    """What a stretch of tokens does to the state before it: `update + matrix @ state`."""

    update: Float[Array, "*batch heads key_dim value_dim"]
    matrix: Float[Array, "*batch heads key_dim key_dim"]

    def __call__(self, state: Float[Array, "*batch heads key_dim value_dim"]) -> Array:
        """The state behind the stretch."""
        return self.update + _matmul(self.matrix, state)

    def behind(self, left: "Transition") -> "Transition":
        """Both stretches, `left` first."""
        return Transition(self(left.update), _matmul(self.matrix, left.matrix))


def kda_over_ranks(
    run: Callable[[Inputs], tuple[Array, Array]], inputs: Inputs, part: RowPart | None, axis: str, *, from_zero: bool
) -> tuple[Float[Array, "batch seq heads value_dim"], Float[Array, "batch *segments heads key_dim value_dim"]]:
    """Output of this rank's tokens, and the final states of the whole rows.

    **Arguments:**

    - `run`: the operator on one device: output and final states.
    - `inputs`: this rank's tokens; states are those before the whole rows, one per row or per segment id.
    - `part`: where the tokens stand in packed rows; given with segment ids.
    - `from_zero`: whether the states before the rows are zero, which saves sending one matrix.
    """
    if inputs.states.ndim == 5 and part is not None:
        return _per_segment(run, inputs, part, axis)
    states = inputs.states
    start = Transition(jnp.zeros_like(states), _identity(states))
    output, read, own = _run_both(run, inputs, start)
    if part is not None:
        own = own._replace(matrix=_where(part.breaks, jnp.zeros_like(own.matrix), own.matrix))
    left = _scan(own, start, axis)
    before = left.update if from_zero else left(states)
    reaches = before if part is None else _where(part.breaks, jnp.zeros_like(before), before)
    return _add_read(output, read, reaches), from_last(own(before), axis)


def _per_segment(run: Callable, inputs: Inputs, part: RowPart, axis: str) -> tuple[Array, Array]:
    """With a state per segment id only the one document that goes on across a boundary has a transition to send."""
    states, ids = inputs.states, part.segment_ids
    numbers = jnp.arange(1, states.shape[1] + 1, dtype=ids.dtype)
    goes_on = part.continues[:, None] & (edge_id(ids, first=True)[:, None] == numbers)
    start = Transition(
        _where(goes_on, jnp.zeros_like(states), states), _where(goes_on, _identity(states), _zero_matrix(states))
    )
    output, read, ends = _run_both(run, inputs, start)

    last = edge_id(ids, first=False)
    slot = jnp.maximum(last - 1, 0)[:, None, None, None, None]
    nothing = Transition(jnp.zeros_like(states[:, 0]), _identity(states[:, 0]))
    own = Transition(*(jnp.take_along_axis(x, slot, axis=1)[:, 0] for x in ends))
    own = Transition(*(_where(last > 0, x, y) for x, y in zip(own, nothing, strict=True)))
    before = _scan(own, nothing, axis).update

    rank = jax.lax.axis_index(axis)
    here = jnp.any(ids[..., None] == numbers, axis=1)
    holder = jax.lax.pmax(jnp.where(here, rank, -1), axis)  # the last rank with tokens of the segment
    untouched = (holder < 0) & (rank == 0)
    final = _where(untouched, states, jnp.zeros_like(states))
    final = _where(here & (holder == rank), ends(before[:, None]), final)
    return _add_read(output, read, before), jax.lax.psum(final, axis)


def _run_both(run: Callable, inputs: Inputs, start: Transition) -> tuple[Array, Array, Transition]:
    """The operator with values beside the identity: `o`, `R`, and `[U | M]`."""
    value, dtype = inputs.tokens.value, start.update.dtype
    value_dim = value.shape[-1]
    wide = jnp.concatenate([value.astype(dtype), jnp.zeros(inputs.tokens.key.shape, dtype)], axis=-1)
    tokens = inputs.tokens._replace(value=wide)
    output, ends = run(inputs._replace(tokens=tokens, states=jnp.concatenate(start, axis=-1)))
    return output[..., :value_dim], output[..., value_dim:], Transition(ends[..., :value_dim], ends[..., value_dim:])


def _scan(own: Transition, nothing: Transition, axis: str) -> Transition:
    return exclusive_scan(lambda left, right: right.behind(left), own, nothing, axis)


def _add_read(output: Array, read: Array, state: Array) -> Array:
    return output + jnp.einsum("bthk,bhkv->bthv", read, state, precision=jax.lax.Precision.HIGHEST)


def _matmul(x: Array, y: Array) -> Array:
    return jnp.einsum("...ij,...jk->...ik", x, y, precision=jax.lax.Precision.HIGHEST)


def _zero_matrix(states: Array) -> Array:
    return jnp.zeros((*states.shape[:-1], states.shape[-2]), states.dtype)


def _identity(states: Array) -> Array:
    return _zero_matrix(states) + jnp.eye(states.shape[-2], dtype=states.dtype)


def _where(condition: Array, x: Array, y: Array) -> Array:
    return jnp.where(condition.reshape(condition.shape + (1,) * (x.ndim - condition.ndim)), x, y)
