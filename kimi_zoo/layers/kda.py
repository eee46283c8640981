"""Kimi Delta Attention: the layer, its gates and convolutions, and its decoding cache."""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int, PRNGKeyArray

from kimi_zoo.layers.checks import check_axes, check_sizes
from kimi_zoo.layers.gate_bound import check_lower_bound
from kimi_zoo.layers.linear import Linear
from kimi_zoo.layers.norm import RMSNorm
from kimi_zoo.ops import kda_step, kimi_delta_attention
from kimi_zoo.ops.context import axis_size, join_heads, split_heads
from kimi_zoo.ops.short_conv import context_windows, short_convolution

GateRank = Literal["direct", "low_rank"]


class ShortConvolution(eqx.Module):
    """Depthwise causal convolution of a few taps with SiLU. **Source:** Kimi Linear (arXiv:2510.26692)."""

    weight: Float[Array, "channels width"]
    bias: Float[Array, " channels"] | None

    def __init__(
        self, channels: int, width: int, *, bias: bool = False, init_range: float | None = None, key: PRNGKeyArray
    ):
        """**Arguments:**

        - `width`: number of taps; the last one multiplies the current token.
        - `init_range`: taps are uniform on `(-init_range, init_range)`; `width ** -0.5` by default, as a depthwise
            convolution starts in Megatron. The bias is drawn alike.
        """
        weight_key, bias_key = jr.split(key)
        bound = width**-0.5 if init_range is None else init_range
        self.weight = jr.uniform(weight_key, (channels, width), minval=-bound, maxval=bound)
        bound = width**-0.5
        self.bias = jr.uniform(bias_key, (channels,), minval=-bound, maxval=bound) if bias else None

    def __call__(
        self,
        x: Float[Array, "batch seq channels"],
        window: Float[Array, "batch tail channels"] | None = None,
        *,
        segment_ids: Int[Array, "batch seq"] | None = None,
    ) -> tuple[Float[Array, "batch seq channels"], Float[Array, "batch tail channels"]]:
        """**Returns:** the output, and the window of raw inputs to hand to the call on the tokens that follow."""
        return short_convolution(x, self.weight, self.bias, window=window, segment_ids=segment_ids)


class LowRank(eqx.Module):
    """`up(down(x))`: a projection through a bottleneck."""

    down: Linear
    up: Linear

    def __init__(self, in_features: int, rank: int, out_features: int, *, std: float | None = None, key: PRNGKeyArray):
        """**Arguments:** `std`: of the initial weights, see `Linear`."""
        down_key, up_key = jr.split(key)
        self.down = Linear(in_features, rank, std=std, key=down_key)
        self.up = Linear(rank, out_features, std=std, key=up_key)

    def __call__(self, x: Float[Array, "*batch in_features"]) -> Float[Array, "*batch out_features"]:
        """Linear in `x`."""
        return self.up(self.down(x))


class _Projected(NamedTuple):
    """What a layer computes from each token by itself, as `batch seq heads channels`."""

    query: Array
    key: Array
    value: Array
    decay: Array
    beta: Array  # one channel, before the sigmoid


class KDACache(eqx.Module):
    """What a KDA layer remembers of the tokens before: fixed in size, whatever their number.

    `state` is the recurrent state; the windows hold the last `width - 1` raw inputs of each convolution (no channel
    where the layer has no convolution).
    """

    state: Float32[Array, "*stack batch heads key_dim value_dim"]
    query_window: Float[Array, "*stack batch tail key_channels"]
    key_window: Float[Array, "*stack batch tail key_channels"]
    value_window: Float[Array, "*stack batch tail value_channels"]


class KimiDeltaAttention(eqx.Module):
    """Token mixing by the gated delta rule with a decay per channel.

    Projections to query, key and value; a short convolution with SiLU on each; L2 normalisation of query and key; the
    recurrence `S_t = (I - beta_t k_t k_t^T) diag(exp(g_t)) S_{t-1} + beta_t k_t v_t^T`, read by
    `o_t = S_t^T q_t / sqrt(key_dim)`; RMSNorm per head; a sigmoid output gate; the output projection.

    The layer has as many heads as its parameters have: with a share of the heads' rows and columns (tensor parallel) it
    returns that share of the sum over heads. A bias of `output_proj` would be added with every share; published models
    have none.

    **Source:** Kimi Linear (arXiv:2510.26692), section 3; constructor arguments as Megatron-LM's module of this name.
    """

    query_proj: Linear
    key_proj: Linear
    value_proj: Linear
    query_conv: ShortConvolution | None
    key_conv: ShortConvolution | None
    value_conv: ShortConvolution | None
    decay_proj: Linear | LowRank
    beta_proj: Linear
    gate_proj: Linear | LowRank
    a_log: Float32[Array, " heads"]
    dt_bias: Float32[Array, "heads key_dim"]
    output_norm: RMSNorm
    output_proj: Linear
    lower_bound: float | None = eqx.field(static=True)
    use_qk_l2norm: bool = eqx.field(static=True)

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        conv_size: int = 4,
        decay_gate: GateRank = "low_rank",
        output_gate: GateRank = "low_rank",
        safe_gate: bool = False,
        lower_bound: float | None = None,
        bias: bool = False,
        conv_bias: bool = False,
        conv_init: float | None = None,
        use_qk_l2norm: bool = True,
        A_init_range: tuple[float, float] = (1.0, 16.0),
        norm_eps: float = 1e-5,
        std: float | None = None,
        key: PRNGKeyArray,
    ):
        """**Arguments:**

        - `hidden_size`: width of the residual stream; `num_heads` heads of `head_dim` channels for query, key and
            value.
        - `conv_size`: taps of the short convolutions; 0 leaves them, and their SiLU, out.
        - `decay_gate`, `output_gate`: `"low_rank"` goes through a bottleneck of `head_dim`, `"direct"` does not.
        - `safe_gate`: log-decays `lower_bound * sigmoid(exp(a_log) * (f + dt_bias))`, bounded, as in Ling 3; otherwise
            `-exp(a_log) * softplus(f + dt_bias)`, as in Kimi Linear. `lower_bound` is in [-5, 0).
        - `bias`: biases on the query, key, value and output projections; `conv_bias`: on the convolutions.
        - `conv_init`: see `ShortConvolution`. `std`: of projection weights, see `Linear`.
        - `A_init_range`: `exp(a_log)` is uniform on it. `dt_bias` is the inverse softplus of a step that is log-uniform
            on [0.001, 0.1], floored at 1e-4. Both are drawn and kept in float32: bfloat16 could draw 0, whose log is
            -inf.
        - `norm_eps`: of the RMSNorm on each head's output.

        **Raises:** `ValueError` for sizes, ranges or bounds that make no layer and for options of convolutions that are
        left out, `TypeError` for a size that is no whole number. A `lower_bound` without `safe_gate` has no effect and
        warns.
        """
        check_sizes(hidden_size=hidden_size, num_heads=num_heads, head_dim=head_dim)
        check_sizes(least=0, conv_size=conv_size)
        if conv_size == 0 and (conv_bias or conv_init is not None):
            raise ValueError(
                f"`conv_size=0` leaves the convolutions out, so `conv_bias={conv_bias}` and `conv_init={conv_init}` "
                "would have no effect. Leave them out too."
            )
        low, high = A_init_range
        if not (math.isfinite(low) and math.isfinite(high) and 0 < low <= high):
            raise ValueError(f"`A_init_range` must be finite with 0 < low <= high; got {A_init_range}.")
        if conv_init is not None and not (math.isfinite(conv_init) and conv_init >= 0):
            raise ValueError(f"`conv_init` must be a finite number >= 0 or None; got {conv_init}.")
        self.lower_bound = check_lower_bound(safe_gate, lower_bound)
        channels = num_heads * head_dim
        keys = iter(jr.split(key, 12))
        linear = lambda out, bias=False: Linear(hidden_size, out, bias=bias, std=std, key=next(keys))
        self.query_proj = linear(channels, bias)
        self.key_proj = linear(channels, bias)
        self.value_proj = linear(channels, bias)
        convolution = lambda: (
            ShortConvolution(channels, conv_size, bias=conv_bias, init_range=conv_init, key=next(keys))
            if conv_size
            else None
        )
        self.query_conv = convolution()
        self.key_conv = convolution()
        self.value_conv = convolution()
        gate = lambda rank: (
            linear(channels) if rank == "direct" else LowRank(hidden_size, head_dim, channels, std=std, key=next(keys))
        )
        for name, rank in (("decay_gate", decay_gate), ("output_gate", output_gate)):
            if rank not in ("direct", "low_rank"):
                raise ValueError(f'`{name}` is "direct" or "low_rank"; got {rank!r}.')
        self.decay_proj = gate(decay_gate)
        self.beta_proj = linear(num_heads)
        self.gate_proj = gate(output_gate)
        self.a_log = jnp.log(jr.uniform(next(keys), (num_heads,), jnp.float32, minval=low, maxval=high))
        self.dt_bias = initial_dt_bias((num_heads, head_dim), key=next(keys))
        self.output_norm = RMSNorm(head_dim, eps=norm_eps)
        self.output_proj = Linear(channels, hidden_size, bias=bias, std=std, key=next(keys))
        self.use_qk_l2norm = use_qk_l2norm

    @property
    def num_heads(self) -> int:
        """Heads of this layer, or of the share of it that is here."""
        return self.dt_bias.shape[-2]

    def __call__(
        self,
        x: Float[Array, "batch seq hidden_size"],
        *,
        segment_ids: Int[Array, "batch seq"] | None = None,
        context_axis: str | None = None,
        head_axis: str | None = None,
    ) -> Float[Array, "batch seq hidden_size"]:
        """**Arguments:**

        - `segment_ids`: 1, 2, ... for packed documents, 0 for padding (whose output is 0).
        - `context_axis`, `head_axis`: inside `jax.shard_map`, the mesh axes over which rows are split into consecutive
            parts, the latter within the former. Along `context_axis` ranks pass on states; along `head_axis` they trade
            parts of the sequence for heads and back, and each computes some heads of all their tokens.

        **Raises:** `ValueError` for heads that cannot be divided over `head_axis`, and for a name that is no axis.
        """
        check_axes(x.shape)
        layer, inputs = self, self._project(x)
        if head_axis is not None:
            layer = self._with_heads_of_rank(head_axis)
            inputs = _Projected(*split_heads(inputs, head_axis))
            if segment_ids is not None:
                segment_ids = jax.lax.all_gather(segment_ids, head_axis, axis=1, tiled=True)
        windows = (None, None, None)
        if context_axis is not None and layer.query_conv is not None:
            width, flat = layer.query_conv.weight.shape[1], [jax.lax.collapse(x, 2) for x in inputs[:3]]
            windows, _ = context_windows(flat, width, segment_ids=segment_ids, context_axis=context_axis)
        (query, key, value), _ = layer._convolve(inputs, windows, segment_ids)
        output, _ = kimi_delta_attention(
            query,
            key,
            value,
            inputs.decay,
            jax.nn.sigmoid(inputs.beta[..., 0].astype(jnp.float32)),
            a_log=layer.a_log,
            dt_bias=layer.dt_bias,
            lower_bound=self.lower_bound,
            segment_ids=segment_ids,
            use_qk_l2norm=self.use_qk_l2norm,
            context_axis=context_axis,
        )
        return self._finish(x, output if head_axis is None else join_heads(output, head_axis))

    def init_cache(self, batch: int, dtype: DTypeLike) -> KDACache:
        """The cache before the first token; windows are kept in `dtype`, the state in float32."""
        heads, head_dim = self.dt_bias.shape
        convolutions = (self.query_conv, self.key_conv, self.value_conv)
        windows = [
            jnp.zeros((batch, 0, 0) if conv is None else (batch, conv.weight.shape[1] - 1, conv.weight.shape[0]), dtype)
            for conv in convolutions
        ]
        return KDACache(jnp.zeros((batch, heads, head_dim, head_dim), jnp.float32), *windows)

    def extend(
        self, x: Float[Array, "batch seq hidden_size"], cache: KDACache, *, real: Bool[Array, "batch seq"] | None = None
    ) -> tuple[Float[Array, "batch seq hidden_size"], KDACache]:
        """Continues behind `cache`. Tokens that are not `real` change nothing in the cache; their output is 0.

        Without `real` all are, which is faster to compute.
        """
        check_axes(x.shape)
        one = x.shape[1] == 1
        segment_ids = None if real is None or one else real.astype(jnp.int32)
        old_windows = (cache.query_window, cache.key_window, cache.value_window)
        inputs = self._project(x)
        (query, key, value), windows = self._convolve(inputs, old_windows, segment_ids)
        decay, beta = inputs.decay, jax.nn.sigmoid(inputs.beta[..., 0].astype(jnp.float32))
        if one:
            output, state = kda_step(
                query[:, 0],
                key[:, 0],
                value[:, 0],
                decay[:, 0],
                beta[:, 0],
                cache.state,
                real=None if real is None else real[:, 0],
                a_log=self.a_log,
                dt_bias=self.dt_bias,
                lower_bound=self.lower_bound,
                use_qk_l2norm=self.use_qk_l2norm,
            )
            output = output[:, None]
            if real is not None:
                keep = lambda new, old: jnp.where(real[:, :, None], new, old)
                windows = tuple(map(keep, windows, old_windows))
        else:
            output, state = kimi_delta_attention(
                query,
                key,
                value,
                decay,
                beta,
                a_log=self.a_log,
                dt_bias=self.dt_bias,
                lower_bound=self.lower_bound,
                initial_state=cache.state,
                output_final_state=True,
                segment_ids=segment_ids,
                use_qk_l2norm=self.use_qk_l2norm,
            )
        return self._finish(x, output), KDACache(cast(Array, state), *windows)

    def _project(self, x: Array) -> "_Projected":
        projections = (self.query_proj, self.key_proj, self.value_proj, self.decay_proj, self.beta_proj)
        return _Projected(*(self._heads(projection(x)) for projection in projections))

    def _convolve(
        self, inputs: "_Projected", windows: Sequence[Array | None], segment_ids: Array | None
    ) -> tuple[list[Array], tuple]:
        """Query, key and value behind the convolutions, and the convolutions' next windows."""
        mixed, next_windows = [], []
        convolutions = (self.query_conv, self.key_conv, self.value_conv)
        for x, convolution, window in zip(inputs[:3], convolutions, windows, strict=True):
            if convolution is not None:
                flat, window = convolution(jax.lax.collapse(x, 2), window, segment_ids=segment_ids)
                x = flat.reshape(x.shape)
            mixed.append(x)
            next_windows.append(window)
        return mixed, tuple(next_windows)

    def _with_heads_of_rank(self, axis: str) -> "KimiDeltaAttention":
        """This layer with the convolutions and decay parameters of those heads only that `split_heads` leaves here."""
        ranks, heads = axis_size(axis, "head_axis"), self.num_heads
        if heads % ranks:
            raise ValueError(
                f"The {heads} heads of a KDA layer cannot be divided over the {ranks} ranks of `head_axis={axis!r}`. "
                "Take a number of ranks that divides them, or split the rows over `context_axis`."
            )

        def of_rank(x: Array) -> Array:
            size = x.shape[0] // ranks
            return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axis) * size, size)

        small = lambda m: (m.a_log, m.dt_bias, *jax.tree.leaves((m.query_conv, m.key_conv, m.value_conv)))
        return eqx.tree_at(small, self, replace_fn=of_rank)

    def _heads(self, x: Array) -> Array:
        return x.reshape(*x.shape[:-1], self.num_heads, x.shape[-1] // self.num_heads)

    def _finish(self, x: Array, output: Array) -> Array:
        """Norm per head, output gate, output projection."""
        gate = jax.nn.sigmoid(self._heads(self.gate_proj(x)).astype(jnp.float32))
        output = self.output_norm(output.astype(jnp.float32)) * gate
        return self.output_proj(jax.lax.collapse(output, 2).astype(x.dtype))


def initial_dt_bias(
    shape: tuple[int, ...], *, key: PRNGKeyArray, low: float = 1e-3, high: float = 0.1, floor: float = 1e-4
) -> Float32[Array, "..."]:
    """The inverse softplus of a step drawn log-uniformly from `[low, high]` and floored, in float32."""
    step = jnp.exp(jr.uniform(key, shape, jnp.float32, minval=math.log(low), maxval=math.log(high)))
    step = jnp.maximum(step, floor)
    return step + jnp.log(-jnp.expm1(-step))
