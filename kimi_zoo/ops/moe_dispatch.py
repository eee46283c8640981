"""Experts spread over devices: every token is sent to the devices that hold its experts, and what they give comes back.

For use inside `jax.shard_map`. Left to the compiler, the exchange would gather all tokens on every device.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from kimi_zoo.ops.moe import combine, expert_mlps
from kimi_zoo.ops.varying import vary_alike


def run_experts(
    x: Float[Array, "tokens hidden"],
    expert_ids: Int[Array, "tokens top_k"],
    expert_weights: Float32[Array, "tokens top_k"],
    gate: Float[Array, "experts inner hidden"],
    up: Float[Array, "experts inner hidden"],
    down: Float[Array, "experts hidden inner"],
    *,
    limit: float | int | None = None,
    expert_axis: str | None = None,
    expert_capacity: float | None = None,
    real: Bool[Array, " tokens"] | None = None,
) -> Float[Array, "tokens hidden"]:
    """`kimi_zoo.ops.moe.expert_mlps`, or with the mesh axis over which experts and tokens are split, inside
    `jax.shard_map`, `dispatched_expert_mlps`. There, tokens that are not `real` are not sent, and give 0."""
    if expert_axis is not None and real is not None:
        expert_ids = without_padding(expert_ids, real, gate.shape[0] * jax.lax.axis_size(expert_axis))
    arguments = (x, expert_ids, expert_weights, gate, up, down)
    if expert_axis is None:
        return expert_mlps(*arguments, limit=limit)
    return dispatched_expert_mlps(*arguments, expert_axis=expert_axis, capacity=expert_capacity, limit=limit)


def dispatched_expert_mlps(
    x: Float[Array, "tokens hidden"],
    expert_ids: Int[Array, "tokens top_k"],
    expert_weights: Float32[Array, "tokens top_k"],
    gate: Float[Array, "local_experts inner hidden"],
    up: Float[Array, "local_experts inner hidden"],
    down: Float[Array, "local_experts hidden inner"],
    *,
    expert_axis: str,
    capacity: float | None = None,
    limit: float | int | None = None,
) -> Float[Array, "tokens hidden"]:
    """As `expert_mlps`, with the experts split over the mesh axis `expert_axis`, in order.

    Rows go out and come back in two all-to-alls: padded ones, `[devices, places, hidden]`, where the program is lowered
    to a CPU; elsewhere ragged ones, which send no empty places.

    **Arguments:**

    - `expert_ids`: of all experts, counted over the devices; the number behind the last stands for none, takes no place
        and gives 0.
    - `capacity`: places for (token, expert) pairs on each device, as a multiple of an even share; pairs beyond it are
        dropped and give 0, those of later tokens first (`dropped_pairs` counts them). `None` makes room for all pairs
        that could come: none is dropped, in more memory.

    **Source:** GShard (arXiv:2006.16668), section 3; capacity as in Switch Transformers (arXiv:2101.03961).
    """
    arguments = vary_alike((x, expert_ids, expert_weights, gate, up, down))
    options = {"expert_axis": expert_axis, "capacity": capacity, "limit": limit}
    padded, ragged = (functools.partial(form, **options) for form in (_padded, _ragged))
    return jax.lax.platform_dependent(*arguments, cpu=padded, default=ragged)


def _padded(
    x: Array,
    expert_ids: Array,
    expert_weights: Array,
    gate: Array,
    up: Array,
    down: Array,
    *,
    expert_axis: str,
    capacity: float | None,
    limit: float | int | None,
) -> Array:
    """Every device sends every other as many rows as there are places, empty ones included."""
    tokens, top_k = expert_ids.shape
    devices, local = jax.lax.axis_size(expert_axis), gate.shape[0]
    places = places_per_device(tokens, top_k, local, devices, capacity)
    flat = expert_ids.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    device = flat[order] // local
    counts = jnp.bincount(device, length=devices)
    rank = jnp.arange(flat.size) - (jnp.cumsum(counts) - counts)[jnp.minimum(device, devices - 1)]
    nowhere = devices * places
    place = jnp.where((rank < places) & (device < devices), device * places + rank, nowhere)
    source = jnp.full(nowhere, tokens).at[place].set(order // top_k, mode="drop")
    expert = jnp.full(nowhere, local).at[place].set(flat[order] % local, mode="drop")

    def exchange(rows: Array) -> Array:
        rows = rows.reshape(devices, places, *rows.shape[1:])
        return jax.lax.all_to_all(rows, expert_axis, 0, 0, tiled=True).reshape(nowhere, *rows.shape[2:])

    rows = exchange(jnp.take(x, source, axis=0, mode="fill", fill_value=0))
    outputs = exchange(_run(rows, exchange(expert), gate, up, down, limit))
    where = jnp.full(flat.size, nowhere).at[order].set(place).reshape(tokens, top_k)
    return combine(jnp.take(outputs, where, axis=0, mode="fill", fill_value=0), expert_weights, x.dtype)


def _run(rows: Array, expert: Array, gate: Array, up: Array, down: Array, limit: float | int | None) -> Array:
    """Each row through its expert; rows of none, a number beyond the last, give 0."""
    some = jnp.where(expert < gate.shape[0], 1.0, 0.0).astype(jnp.float32)
    return expert_mlps(rows, expert[:, None], some[:, None], gate, up, down, limit=limit)


class _Route(NamedTuple):
    """Which rows go where in a ragged exchange: for each device, where they start here, how many are sent, where they
    start there, and how many are received from it."""

    start: Int32[Array, " devices"]
    sent: Int32[Array, " devices"]
    start_there: Int32[Array, " devices"]
    received: Int32[Array, " devices"]


def _ragged(
    x: Array,
    expert_ids: Array,
    expert_weights: Array,
    gate: Array,
    up: Array,
    down: Array,
    *,
    expert_axis: str,
    capacity: float | None,
    limit: float | int | None,
) -> Array:
    """Only rows that there are go out and back; what arrives stands together, in the order of the devices."""
    tokens, top_k = expert_ids.shape
    devices, local = jax.lax.axis_size(expert_axis), gate.shape[0]
    places = places_per_device(tokens, top_k, local, devices, capacity)
    flat = expert_ids.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    mine = jnp.bincount(flat, length=devices * local).reshape(devices, local).astype(jnp.int32)
    counts = jax.lax.all_gather(mine, expert_axis)  # [from, to, expert of it]
    kept = jnp.diff(jnp.minimum(jnp.cumsum(counts, axis=-1), places), axis=-1, prepend=0)
    sizes = jnp.sum(kept, axis=-1)  # [from, to]
    before = jnp.cumsum(jnp.sum(counts, axis=-1), axis=1) - jnp.sum(counts, axis=-1)  # where they start at their source
    arrival = jnp.cumsum(sizes, axis=0) - sizes  # where they start at their destination
    here = jax.lax.axis_index(expert_axis)
    out = _Route(before[here], sizes[here], arrival[here], sizes[:, here])
    back = _Route(arrival[:, here], sizes[:, here], before[:, here], sizes[here])

    rows = _exchange(x[order // top_k], devices * places, out, back, expert_axis)
    numbers = jnp.tile(jnp.arange(local, dtype=jnp.int32), devices)
    expert = jnp.repeat(numbers, kept[:, here].reshape(-1), total_repeat_length=devices * places)
    expert = jnp.where(jnp.arange(devices * places) < jnp.sum(sizes[:, here]), expert, local)
    outputs = _exchange(_run(rows, expert, gate, up, down, limit), flat.size, back, out, expert_axis)
    return combine(outputs[jnp.argsort(order)].reshape(tokens, top_k, -1), expert_weights, x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 4))
def _exchange(rows: Float[Array, "rows hidden"], length: int, out: _Route, back: _Route, axis: str) -> Array:
    """What arrives here, zeros behind it. The derivative goes back the same way."""
    return _send(rows, length, out, axis)


def _send(rows: Array, length: int, out: _Route, axis: str) -> Array:
    empty = jnp.zeros_like(rows, shape=(length, rows.shape[1]))
    rows, empty, *route = vary_alike((rows, empty, *out))
    return jax.lax.ragged_all_to_all(rows, empty, *route, axis_name=axis)


def _exchange_forward(rows: Array, length: int, out: _Route, back: _Route, axis: str):
    return _send(rows, length, out, axis), (rows[:, :0], back)  # an empty slice stands for the number of rows


def _exchange_backward(length: int, axis: str, saved: tuple, cotangent: Array):
    rows, back = saved
    return _send(cotangent, rows.shape[0], back, axis), None, None


_exchange.defvjp(_exchange_forward, _exchange_backward)


def without_padding(
    expert_ids: Int[Array, "tokens top_k"], real: Bool[Array, " tokens"], experts: int
) -> Int[Array, "tokens top_k"]:
    """The ids, and that of no expert for tokens that are not real."""
    return jnp.where(real[:, None], expert_ids, jnp.asarray(experts, expert_ids.dtype))


def places_per_device(tokens: int, top_k: int, local_experts: int, devices: int, capacity: float | None) -> int:
    """How many (token, expert) pairs one device can send to another."""
    most = max(tokens * min(top_k, local_experts), 1)
    return most if capacity is None else min(most, math.ceil(capacity * tokens * top_k / devices))


def dropped_pairs(
    expert_ids: Int[Array, "tokens top_k"], local_experts: int, devices: int, capacity: float | None
) -> Int32[Array, ""]:
    """How many of this device's pairs `dispatched_expert_mlps` drops."""
    tokens, top_k = expert_ids.shape
    places = places_per_device(tokens, top_k, local_experts, devices, capacity)
    counts = jnp.bincount(expert_ids.reshape(-1) // local_experts, length=devices)
    return jnp.sum(jnp.maximum(counts - places, 0)).astype(jnp.int32)
