"""Experts spread over devices: every token is sent to the devices that hold its experts, and what they give comes back.

For use inside `jax.shard_map`. Left to the compiler, the exchange would gather all tokens on every device.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32

from kimi_zoo.ops.moe import combine, expert_mlps


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

    Rows go out and come back in two all-to-alls, `[devices, places, hidden]`.

    **Arguments:**

    - `expert_ids`: of all experts, counted over the devices.
    - `capacity`: places for (token, expert) pairs on each device, as a multiple of an even share; pairs beyond it are
        dropped and give 0, those of later tokens first (`dropped_pairs` counts them). `None` makes room for all pairs
        that could come: none is dropped, in more memory.

    **Source:** GShard (arXiv:2006.16668), section 3; capacity as in Switch Transformers (arXiv:2101.03961).
    """
    tokens, top_k = expert_ids.shape
    devices, local = jax.lax.axis_size(expert_axis), gate.shape[0]
    places = places_per_device(tokens, top_k, local, devices, capacity)
    flat = expert_ids.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    device = flat[order] // local
    counts = jnp.bincount(device, length=devices)
    rank = jnp.arange(flat.size) - (jnp.cumsum(counts) - counts)[device]
    nowhere = devices * places
    place = jnp.where(rank < places, device * places + rank, nowhere)
    source = jnp.full(nowhere, tokens).at[place].set(order // top_k, mode="drop")
    expert = jnp.full(nowhere, local).at[place].set(flat[order] % local, mode="drop")

    def exchange(rows: Array) -> Array:
        rows = rows.reshape(devices, places, *rows.shape[1:])
        return jax.lax.all_to_all(rows, expert_axis, 0, 0, tiled=True).reshape(nowhere, *rows.shape[2:])

    rows = exchange(jnp.take(x, source, axis=0, mode="fill", fill_value=0))
    expert = exchange(expert)
    whole = jnp.where(expert < local, 1.0, 0.0).astype(jnp.float32)
    outputs = exchange(expert_mlps(rows, expert[:, None], whole[:, None], gate, up, down, limit=limit))
    where = jnp.full(flat.size, nowhere).at[order].set(place).reshape(tokens, top_k)
    return combine(jnp.take(outputs, where, axis=0, mode="fill", fill_value=0), expert_weights, x.dtype)


def places_per_device(tokens: int, top_k: int, local_experts: int, devices: int, capacity: float | None) -> int:
    """How many (token, expert) pairs one device can send to another."""
    most = tokens * min(top_k, local_experts)
    return most if capacity is None else min(most, math.ceil(capacity * tokens * top_k / devices))


def dropped_pairs(
    expert_ids: Int[Array, "tokens top_k"], local_experts: int, devices: int, capacity: float | None
) -> Int32[Array, ""]:
    """How many of this device's pairs `dispatched_expert_mlps` drops."""
    tokens, top_k = expert_ids.shape
    places = places_per_device(tokens, top_k, local_experts, devices, capacity)
    counts = jnp.bincount(expert_ids.reshape(-1) // local_experts, length=devices)
    return jnp.sum(jnp.maximum(counts - places, 0)).astype(jnp.int32)
