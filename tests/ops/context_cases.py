"""Packed rows, meshes and comparisons that the tests of split rows share."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

AXIS = "expert"  # the name of the axis is free
SEQ = 24  # parts of 12, 8, 6 and 3 tokens on 2, 3, 4 and 8 ranks

# (segment id, tokens), each row SEQ tokens
ROWS = [
    [(1, 24)],  # over all ranks
    [(1, 12), (2, 12)],  # a boundary exactly at the split
    [(1, 11), (2, 13)],
    [(1, 13), (2, 11)],
    [(1, 4), (2, 17), (3, 3)],  # one document on three ranks and more
    [(0, 7), (1, 17)],
    [(1, 8), (0, 9), (1, 7)],  # a part without tokens inside a document
    [(1, 5), (0, 10), (2, 9)],
    [(3, 7), (0, 17)],
    [(0, 24)],
    [(2, 6), (0, 1), (3, 1), (1, 16)],
    [(0, 23), (1, 1)],
    [(1, 6), (2, 6), (1, 9), (0, 1), (2, 2)],  # ids that come back
]


def rows_of_ids(rows, seq=SEQ):
    rows = [np.repeat([i for i, _ in row], [n for _, n in row])[:seq] for row in rows]
    return jnp.asarray([np.pad(row, (0, seq - len(row))) for row in rows], jnp.int32)


any_rows = st.lists(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=8), min_size=len(ROWS), max_size=len(ROWS)
)


def mesh_of(**axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def over_ranks(function, ranks, in_specs, out_specs, **options):
    """`function(*args, context_axis=AXIS)` on rows split over ranks, checked for how arrays vary."""
    split = functools.partial(function, context_axis=AXIS)
    return jax.shard_map(split, mesh=mesh_of(**{AXIS: ranks}), in_specs=in_specs, out_specs=out_specs, **options)


def with_gradients(function):
    """Jitted: outputs, and gradients of the first argument, a tree, for the cotangents given last."""

    @jax.jit
    def both(inputs, *rest):
        *rest, cotangents = rest
        outputs, pullback = jax.vjp(lambda inputs: function(inputs, *rest), inputs)
        return outputs, pullback(cotangents)[0]

    return both


def random_like(tree, seed=7):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), tree)


def hide_padding(tree, ids):
    """NaN wherever padding stands."""
    hide = lambda x: jnp.where((ids > 0).reshape(ids.shape + (1,) * (x.ndim - 2)), x, jnp.nan)
    return jax.tree.map(hide, tree)


TOKENS = P(None, AXIS)
KINDS = "collective-permute|all-gather|all-reduce|reduce-scatter|all-to-all"
BYTES = {"f32": 4, "s32": 4, "bf16": 2, "pred": 1, "u32": 4}


def collectives(compiled):
    """Kind and bytes of the result of every collective in a compiled program, in order."""
    found = []
    for shapes, kind in re.findall(rf"= (.+?) ({KINDS})(?:-start)?\(", compiled.as_text()):
        sizes = re.findall(r"(\w+)\[([\d,]*)\]", shapes)
        found.append((kind, sum(BYTES[t] * int(np.prod([int(n) for n in d.split(",") if n])) for t, d in sizes)))
    return found
