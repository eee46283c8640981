"""Experts over devices: both exchanges give what one device gives, with gradients; drops are those that are counted."""

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers import assert_close
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from kimi_zoo.ops import moe_dispatch
from kimi_zoo.ops.moe import expert_mlps
from kimi_zoo.ops.moe_dispatch import dispatched_expert_mlps, dropped_pairs

TOKENS, HIDDEN, INNER, TOP_K = 24, 6, 5, 3
SPECS = (P("e"), P("e"), P("e"), P("e"), P("e"), P("e"))


def ragged_exchange(operand, output, starts, sent, starts_there, _received, *, axis_name):
    """What `jax.lax.ragged_all_to_all`, which CPUs lack, is documented to do, by gathering everything."""
    here = jax.lax.axis_index(axis_name)
    gather = functools.partial(jax.lax.all_gather, axis_name=axis_name)
    operands, starts, sent, starts_there = map(gather, (operand, starts, sent, starts_there))
    place = jnp.arange(output.shape[0])
    for device in range(operands.shape[0]):
        offset = place - starts_there[device, here]
        there = (offset >= 0) & (offset < sent[device, here])
        row = jnp.clip(starts[device, here] + offset, 0, operand.shape[0] - 1)
        output = jnp.where(there[:, None], operands[device][row], output)
    return output


def inputs(devices, skew):
    keys = jr.split(jr.key(devices), 6)
    experts = 2 * devices
    scores = jr.normal(keys[1], (TOKENS, experts)) - skew * jnp.arange(experts, dtype=jnp.float32)
    ids = jax.lax.top_k(scores, TOP_K)[1]
    weight = lambda key, *shape: jr.normal(key, shape) * shape[-1] ** -0.5
    return (
        jr.normal(keys[0], (TOKENS, HIDDEN)),
        ids,
        jr.uniform(keys[2], (TOKENS, TOP_K)),
        weight(keys[3], experts, INNER, HIDDEN),
        weight(keys[4], experts, INNER, HIDDEN),
        weight(keys[5], experts, HIDDEN, INNER),
    )


def on_mesh(devices, capacity=None):
    mesh = jax.make_mesh((devices,), ("e",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    local = lambda *arguments: dispatched_expert_mlps(*arguments, expert_axis="e", capacity=capacity)
    return jax.shard_map(local, mesh=mesh, in_specs=SPECS, out_specs=P("e")), mesh


def output_and_gradients(function, arguments):
    x, ids, *rest = arguments

    def total(x, *rest):
        output = function(x, ids, *rest)
        return jnp.sum(output * jnp.cos(jnp.arange(output.size, dtype=jnp.float32).reshape(output.shape))), output

    (_, output), gradients = jax.jit(jax.value_and_grad(total, (0, 1, 2, 3, 4), has_aux=True))(x, *rest)
    return output, gradients


@pytest.fixture(params=["padded", "ragged"])
def form(request, monkeypatch):
    if request.param == "ragged":
        monkeypatch.setattr(moe_dispatch, "_padded", moe_dispatch._ragged)
        monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_exchange)
    return request.param


@pytest.mark.parametrize("skew", [0.0, 2.0])  # even, and nearly all to the first device
@pytest.mark.parametrize("devices", [2, 4])
def test_equal_to_one_device(form, devices, skew):
    arguments = inputs(devices, skew)
    expected = output_and_gradients(expert_mlps, arguments)
    assert_close(output_and_gradients(on_mesh(devices)[0], arguments), expected, rtol=1e-5)


def test_pairs_without_room_give_nothing_and_are_counted(form):
    """With one place for each device, what remains is the first pair that each device has for each other."""
    devices, capacity = 4, 4 / (TOKENS // 4 * TOP_K)
    arguments = inputs(devices, 0.5)
    ids = np.asarray(arguments[1]).reshape(devices, -1)
    kept = np.zeros(ids.shape, bool)
    for row, own in enumerate(ids):
        for device in range(devices):
            mine = [place for place in np.argsort(own, kind="stable") if own[place] // 2 == device]
            kept[row, mine[:1]] = True
    weights = arguments[2] * kept.reshape(TOKENS, TOP_K).astype(np.float32)
    expected = expert_mlps(*arguments[:2], weights, *arguments[3:])
    run, mesh = on_mesh(devices, capacity)
    assert_close(jax.jit(run)(*arguments), expected, rtol=1e-5)
    count = lambda ids: dropped_pairs(ids, 2, devices, capacity)[None]
    dropped = jax.shard_map(count, mesh=mesh, in_specs=P("e"), out_specs=P("e"))(arguments[1])
    assert dropped.tolist() == (~kept).sum(1).tolist()


def test_programs_for_tpus_exchange_only_what_there_is():
    run, _ = on_mesh(4)
    gradient = jax.grad(lambda x, *rest: jnp.sum(run(x, *rest)))
    text = jax.jit(gradient).trace(*inputs(4, 0.0)).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("ragged_all_to_all") >= 3 and "stablehlo.all_to_all" not in text
