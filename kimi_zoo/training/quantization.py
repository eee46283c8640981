"""Frozen weights in 8 or 4 bits, dequantised where they are used: what LoRA trains beside, so that larger models fit.

**Source:** NF4 and blocks of 64 as in QLoRA (arXiv:2305.14314); quantised by the qwix library.
"""

from typing import Any, Literal, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Integer

from kimi_zoo.layers.linear import Linear
from kimi_zoo.layers.moe import Experts
from kimi_zoo.models.kimi_linear import KimiLinear

Kind = Literal["int8", "nf4"]
BLOCK = 64  # numbers that share a scale, along the input axis


class Quantized(eqx.Module):
    """A matrix, or a stack of them, as integers and float32 scales of blocks along the last axis."""

    values: Integer[Array, "*stack out_features in_features"]
    scales: Float32[Array, "*stack out_features blocks"]
    kind: Kind = eqx.field(static=True)

    def dequantized(self) -> Float32[Array, "*stack out_features in_features"]:
        """The numbers that these stand for."""
        from qwix import QArray, dequantize  # takes seconds to import

        with jax.numpy_dtype_promotion("standard"):
            return dequantize(QArray(self.values, self.scales, None, _qtype(self.kind)))


def _qtype(kind: Kind) -> Any:
    return jnp.int8 if kind == "int8" else kind


@eqx.filter_jit
def quantize(weight: Float[Array, "*stack out_features in_features"], kind: Kind) -> Quantized:
    """Rounds a matrix, or each of a stack. A block has 64 numbers, or as many as the largest divisor of `in_features`
    below."""
    import qwix

    size = weight.shape[-1]
    block = next(width for width in range(min(BLOCK, size), 0, -1) if size % width == 0)
    axes = tuple(range(weight.ndim - 1))
    with jax.numpy_dtype_promotion("standard"):
        array = qwix.quantize(
            weight.astype(jnp.float32), _qtype(kind), channelwise_axes=axes, tiled_axes={weight.ndim - 1: block}
        )
    return Quantized(array.qvalue, array.scale, kind)


class QuantizedLinear(eqx.Module):
    """A `Linear` whose weight is quantised; takes its place in a model."""

    base: Linear  # without its weight
    quantized: Quantized

    @property
    def weight(self) -> Float32[Array, "*stack out_features in_features"]:
        """Dequantised."""
        return self.quantized.dequantized()

    @property
    def bias(self) -> Float[Array, " out_features"] | None:
        """That of the layer."""
        return self.base.bias

    def __call__(self, x: Float[Array, "*batch in_features"]) -> Float[Array, "*batch out_features"]:
        """As a `Linear` with the dequantised weight, which gradients form anew instead of keeping it."""
        return jax.checkpoint(lambda layer, x: dequantized(layer)(x))(self, x)


class QuantizedExperts(eqx.Module):
    """`Experts` whose matrices are quantised; take their place in a model."""

    base: Experts  # without its matrices
    gate: Quantized
    up: Quantized
    down: Quantized

    @property
    def gate_proj(self) -> Float32[Array, "*stack experts inner hidden_size"]:
        """Dequantised."""
        return self.gate.dequantized()

    @property
    def up_proj(self) -> Float32[Array, "*stack experts inner hidden_size"]:
        """As `gate_proj`."""
        return self.up.dequantized()

    @property
    def down_proj(self) -> Float32[Array, "*stack experts hidden_size inner"]:
        """As `gate_proj`."""
        return self.down.dequantized()

    def __call__(self, *arguments: Array, **options: Any) -> Array:
        """As `Experts.__call__`; gradients compute everything anew."""
        return jax.checkpoint(lambda layer, *args: dequantized(layer)(*args, **options))(self, *arguments)


def _matrices(experts: Any) -> tuple[Any, Any, Any]:
    return experts.gate_proj, experts.up_proj, experts.down_proj


def dequantized(tree: Any) -> Any:
    """The same with plain layers in the place of quantised ones, their weights in float32."""

    def restore(node: Any) -> Any:
        if isinstance(node, QuantizedLinear):
            return eqx.tree_at(lambda linear: linear.weight, node.base, node.weight, is_leaf=lambda x: x is None)
        if isinstance(node, QuantizedExperts):
            return eqx.tree_at(_matrices, node.base, _matrices(node), is_leaf=lambda x: x is None)
        return node

    return jax.tree.map(restore, tree, is_leaf=lambda node: isinstance(node, QuantizedLinear | QuantizedExperts))


def whole_layers(model: KimiLinear, trains: Any) -> Any:
    """What `quantize_frozen` leaves as it is because something of it trains: `trains`, widened to whole layers and
    stacks of them."""
    is_layer = lambda node: isinstance(node, Linear | Experts)

    def widen(node: Any, chosen: Any) -> Any:
        any_trains = any(map(np.any, jax.tree.leaves(chosen)))
        return jax.tree.map(lambda _: any_trains, node) if is_layer(node) else chosen

    return jax.tree.map(widen, model, trains, is_leaf=is_layer)


def quantize_frozen(model: KimiLinear, kind: Kind, *, trains: Any = None) -> KimiLinear:
    """The model with the weights of its linear layers and experts quantised; embedding, head, router, norms,
    convolutions and whatever else is small stay as they are.

    **Arguments:** `trains`: a tree like the model, as of `trainable.select`; layers of which something trains stay.

    **Raises:** `ValueError` for an unknown kind.
    """
    if kind not in get_args(Kind):
        raise ValueError(f"Frozen weights are {' or '.join(get_args(Kind))}; got {kind!r}.")
    trains = jax.tree.map(lambda _: False, model) if trains is None else trains

    def shrink(node: Any, chosen: Any) -> Any:
        if any(map(np.any, jax.tree.leaves(chosen))):
            return node
        if isinstance(node, Linear):
            hollow = eqx.tree_at(lambda linear: linear.weight, node, None)
            return QuantizedLinear(hollow, quantize(node.weight, kind))
        if isinstance(node, Experts):
            return QuantizedExperts(
                eqx.tree_at(_matrices, node, (None, None, None)),
                *(quantize(matrix, kind) for matrix in _matrices(node)),
            )
        return node

    is_layer = lambda node: isinstance(node, Linear | Experts)
    return eqx.tree_at(
        lambda m: m.layers.sections,
        model,
        jax.tree.map(shrink, model.layers.sections, trains.layers.sections, is_leaf=is_layer),
    )
