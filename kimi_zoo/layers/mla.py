"""Multi-head latent attention and its cache of latents."""

from collections.abc import Mapping
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from kimi_zoo.layers.checks import check_axes, check_sizes
from kimi_zoo.layers.linear import Linear
from kimi_zoo.layers.norm import RMSNorm
from kimi_zoo.ops.attention import causal_attention, latent_attention
from kimi_zoo.ops.blockwise_attention import blockwise_attention
from kimi_zoo.ops.rope import apply_rope, rope_frequencies, yarn_mscale

LATENT_NORM_EPS = 1e-6  # of the norms on latents in the published models, whatever `rms_norm_eps` says
SHORT_ROW = 2048  # tokens up to which a row's keys and scores are formed as a whole


class Rope(eqx.Module):
    """Settings of the rotary embedding of a layer: see `kimi_zoo.ops.rope`."""

    theta: float = eqx.field(static=True)
    interleaved: bool = eqx.field(static=True)
    scaling: tuple[tuple[str, object], ...] | None = eqx.field(static=True)

    def __init__(self, theta: float, *, interleaved: bool, scaling: Mapping[str, object] | None = None):
        """**Arguments:** as `rope_theta` and `rope_scaling` of a published config; the layout of channel pairs."""
        self.theta = theta
        self.interleaved = interleaved
        self.scaling = None if scaling is None else tuple(sorted(scaling.items()))

    def __call__(
        self, x: Float[Array, "batch seq heads dim"], positions: Int[Array, "batch seq"]
    ) -> Float[Array, "batch seq heads dim"]:
        """Rotates every head of `x` by its token's position."""
        scaling = None if self.scaling is None else dict(self.scaling)
        frequencies, concentration = rope_frequencies(x.shape[-1], self.theta, scaling)
        return apply_rope(x, positions, frequencies, concentration=concentration, interleaved=self.interleaved)

    @property
    def score_scale(self) -> float:
        """YaRN's factor on attention scores: the squared temperature of `mscale_all_dim`."""
        scaling = dict(self.scaling or ())
        if not scaling.get("mscale_all_dim"):
            return 1.0
        return yarn_mscale(float(scaling["factor"]), float(scaling["mscale_all_dim"])) ** 2  # type: ignore[arg-type]


class LowRankQuery(eqx.Module):
    """`up(norm(down(x)))`: the query projection of models with a `q_lora_rank`."""

    down: Linear
    norm: RMSNorm
    up: Linear

    def __init__(
        self, hidden_size: int, rank: int, out_features: int, *, norm_eps: float, std: float | None, key: PRNGKeyArray
    ):
        """**Arguments:** `std`: of the initial weights, see `Linear`."""
        down_key, up_key = jr.split(key)
        self.down = Linear(hidden_size, rank, std=std, key=down_key)
        self.norm = RMSNorm(rank, eps=norm_eps)
        self.up = Linear(rank, out_features, std=std, key=up_key)

    def __call__(self, x: Float[Array, "*batch hidden_size"]) -> Float[Array, "*batch out_features"]:
        """The queries of all heads."""
        return self.up(self.norm(self.down(x)))


class MLACache(eqx.Module):
    """The compressed keys and values of a row's tokens: `kv_lora_rank + qk_rope_head_dim` numbers each."""

    latent: Float[Array, "*stack batch capacity rank"]
    key_rope: Float[Array, "*stack batch capacity rope_dim"]

    def append(
        self, new: "MLACache", lengths: Int[Array, " batch"], real: Bool[Array, "batch seq"] | None = None
    ) -> "MLACache":
        """Writes the real tokens of `new`, a cache with a place per token, behind the `lengths` tokens of each row."""
        if real is None:
            place = lengths[:, None] + jnp.arange(new.latent.shape[-2])
        else:
            place = lengths[:, None] + jnp.cumsum(real, axis=1) - 1
            place = jnp.where(real, place, self.latent.shape[-2])  # out of range: dropped
        rows = jnp.arange(place.shape[0])[:, None]

        def write(old: Array, update: Array) -> Array:
            return old.at[..., rows, place, :].set(update.astype(old.dtype), mode="drop")

        return MLACache(write(self.latent, new.latent), write(self.key_rope, new.key_rope))


class MultiHeadLatentAttention(eqx.Module):
    """Softmax attention whose keys and values are expanded from one small latent per token.

    A head's query and key have `qk_nope_head_dim` channels of their own and `qk_rope_head_dim` whose key part all heads
    share. With `rope=None` (Kimi Linear) nothing is rotated, and the shared part is used as it is. With a cache, the
    up-projections are absorbed into query and output and only latents are stored.

    The layer has as many heads as its parameters have: with a share of the heads' rows and columns (tensor parallel) it
    returns that share of the sum over heads. A bias of `output_proj` would be added with every share; published models
    have none.

    **Source:** DeepSeek-V2 (arXiv:2405.04434), section 2.1; Kimi Linear (arXiv:2510.26692) for the form without
    positions.
    """

    query_proj: Linear | LowRankQuery
    kv_down: Linear
    kv_norm: RMSNorm
    kv_up: Linear
    gate_proj: Linear | None
    output_proj: Linear
    rope: Rope | None
    qk_nope_head_dim: int = eqx.field(static=True)
    qk_rope_head_dim: int = eqx.field(static=True)
    v_head_dim: int = eqx.field(static=True)

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        q_lora_rank: int | None = None,
        rope: Rope | None = None,
        output_gate: Literal["head_wise", "element_wise"] | None = None,
        latent_norm_eps: float = LATENT_NORM_EPS,
        std: float | None = None,
        key: PRNGKeyArray,
    ):
        """**Arguments:**

        - `q_lora_rank`: rank of the query bottleneck; `None` projects directly.
        - `output_gate`: a sigmoid gate on the attention output, one number per head or per channel.
        - `latent_norm_eps`: of the norms on the query's and the key-value latents.
        - `std`: of the initial weights, see `Linear`.

        **Raises:** `ValueError` for a size below 1 (`qk_rope_head_dim`: below 0) or an unknown gate, `TypeError` for a
        size that is no whole number.
        """
        check_sizes(hidden_size=hidden_size, num_heads=num_heads, kv_lora_rank=kv_lora_rank, v_head_dim=v_head_dim)
        check_sizes(qk_nope_head_dim=qk_nope_head_dim, **({} if q_lora_rank is None else {"q_lora_rank": q_lora_rank}))
        check_sizes(least=0, qk_rope_head_dim=qk_rope_head_dim)
        query_key, down_key, up_key, gate_key, output_key = jr.split(key, 5)
        query_dim = num_heads * (qk_nope_head_dim + qk_rope_head_dim)
        if q_lora_rank is None:
            self.query_proj = Linear(hidden_size, query_dim, std=std, key=query_key)
        else:
            self.query_proj = LowRankQuery(
                hidden_size, q_lora_rank, query_dim, norm_eps=latent_norm_eps, std=std, key=query_key
            )
        self.kv_down = Linear(hidden_size, kv_lora_rank + qk_rope_head_dim, std=std, key=down_key)
        self.kv_norm = RMSNorm(kv_lora_rank, eps=latent_norm_eps)
        self.kv_up = Linear(kv_lora_rank, num_heads * (qk_nope_head_dim + v_head_dim), std=std, key=up_key)
        gates = {None: 0, "head_wise": num_heads, "element_wise": num_heads * v_head_dim}
        if output_gate not in gates:
            raise ValueError(f'`output_gate` is None, "head_wise" or "element_wise"; got {output_gate!r}.')
        self.gate_proj = None if output_gate is None else Linear(hidden_size, gates[output_gate], std=std, key=gate_key)
        self.output_proj = Linear(num_heads * v_head_dim, hidden_size, std=std, key=output_key)
        self.rope = rope
        self.qk_nope_head_dim = qk_nope_head_dim
        self.qk_rope_head_dim = qk_rope_head_dim
        self.v_head_dim = v_head_dim

    @property
    def num_heads(self) -> int:
        """Heads of this layer, or of the share of it that is here."""
        return self.kv_up.weight.shape[-2] // (self.qk_nope_head_dim + self.v_head_dim)

    def __call__(
        self,
        x: Float[Array, "batch seq hidden_size"],
        *,
        positions: Int[Array, "batch seq"],
        segment_ids: Int[Array, "batch seq"] | None = None,
        context_axis: str | tuple[str, ...] | None = None,
    ) -> Float[Array, "batch seq hidden_size"]:
        """Causal attention over whole rows.

        **Arguments:**

        - `positions`: read by the rotary embedding only.
        - `segment_ids`: 1, 2, ... for packed documents, 0 for padding (whose output is 0).
        - `context_axis`: inside `jax.shard_map`, the mesh axes over which rows are split into consecutive parts, the
            last one innermost; positions are still those in the whole rows.
        """
        check_axes(x.shape)
        query, (latent, key_rope) = self._queries(x, positions), self._latents(x, positions)
        if context_axis is None and x.shape[1] <= SHORT_ROW:
            key, value = self._expand(latent, key_rope)
            output = causal_attention(query, key, value, scale=self.scale, segment_ids=segment_ids)
        else:
            output = blockwise_attention(
                query,
                latent,
                key_rope,
                self._kv_up(x.dtype),
                scale=self.scale,
                context_axis=context_axis,
                segment_ids=segment_ids,
            )
        return self._finish(x, output)

    def init_cache(self, batch: int, capacity: int, dtype: DTypeLike) -> MLACache:
        """An empty cache for `capacity` tokens a row."""
        rank = self.kv_norm.weight.shape[-1]
        return MLACache(
            jnp.zeros((batch, capacity, rank), dtype), jnp.zeros((batch, capacity, self.qk_rope_head_dim), dtype)
        )

    def attend(
        self,
        x: Float[Array, "batch seq hidden_size"],
        cache: MLACache,
        *,
        lengths: Int[Array, " batch"],
        positions: Int[Array, "batch seq"],
        real: Bool[Array, "batch seq"] | None = None,
    ) -> tuple[Float[Array, "batch seq hidden_size"], MLACache]:
        """Attends to the `lengths` cached tokens of each row and to the new ones, in order.

        **Returns:** the output (0 where not `real`), and the new tokens' latents, for `MLACache.append`: apart, so that
        a stack of layers writes to its caches once.
        """
        check_axes(x.shape)
        if real is not None:  # 0 * NaN is NaN: padding must not reach the products
            x = jnp.where(real[..., None], x, jnp.zeros((), x.dtype))
        query, (latent, key_rope) = self._queries(x, positions), self._latents(x, positions)
        key, value = self._expand(latent, key_rope)
        key_up, value_up = jnp.split(self._kv_up(x.dtype), [self.qk_nope_head_dim], axis=1)
        query_nope, query_rope = jnp.split(query, [self.qk_nope_head_dim], axis=-1)
        output = latent_attention(
            query,
            key,
            value,
            jnp.einsum("bqhd,hdr->bqhr", query_nope, key_up),
            query_rope,
            cache.latent,
            cache.key_rope,
            value_up,
            lengths=lengths,
            real=real,
            scale=self.scale,
        )
        return self._finish(x, output), MLACache(latent, key_rope)

    def extend(
        self,
        x: Float[Array, "batch seq hidden_size"],
        cache: MLACache,
        *,
        lengths: Int[Array, " batch"],
        positions: Int[Array, "batch seq"],
        real: Bool[Array, "batch seq"] | None = None,
    ) -> tuple[Float[Array, "batch seq hidden_size"], MLACache]:
        """`attend`, and the cache with the new tokens in it."""
        output, new = self.attend(x, cache, lengths=lengths, positions=positions, real=real)
        return output, cache.append(new, lengths, real)

    @property
    def scale(self) -> float:
        """Factor on attention scores."""
        scale = (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        return scale if self.rope is None else scale * self.rope.score_scale

    def _queries(self, x: Array, positions: Array) -> Array:
        query = self._heads(self.query_proj(x), self.qk_nope_head_dim + self.qk_rope_head_dim)
        if self.rope is None:
            return query
        query_nope, query_rope = jnp.split(query, [self.qk_nope_head_dim], axis=-1)
        return jnp.concatenate([query_nope, self.rope(query_rope, positions)], axis=-1)

    def _latents(self, x: Array, positions: Array) -> tuple[Array, Array]:
        latent, key_rope = jnp.split(self.kv_down(x), [self.kv_norm.weight.shape[-1]], axis=-1)
        if self.rope is not None:
            key_rope = self.rope(key_rope[:, :, None], positions)[:, :, 0]
        return self.kv_norm(latent), key_rope

    def _kv_up(self, dtype: jnp.dtype) -> Array:
        return self.kv_up.weight.astype(dtype).reshape(
            -1, self.qk_nope_head_dim + self.v_head_dim, self.kv_norm.weight.shape[-1]
        )

    def _expand(self, latent: Array, key_rope: Array) -> tuple[Array, Array]:
        """Keys and values of every head."""
        expanded = self._heads(self.kv_up(latent), self.qk_nope_head_dim + self.v_head_dim)
        key_nope, value = jnp.split(expanded, [self.qk_nope_head_dim], axis=-1)
        shared = jnp.broadcast_to(key_rope[:, :, None], (*key_nope.shape[:3], self.qk_rope_head_dim))
        return jnp.concatenate([key_nope, shared], axis=-1), value

    def _heads(self, x: Array, dim: int) -> Array:
        return x.reshape(*x.shape[:-1], x.shape[-1] // dim, dim)

    def _finish(self, x: Array, output: Array) -> Array:
        """Output gate and output projection."""
        if self.gate_proj is not None:
            gate = jax.nn.sigmoid(self.gate_proj(x).astype(jnp.float32)).astype(x.dtype)
            output = output * self._heads(gate, gate.shape[-1] // output.shape[2])
        return self.output_proj(jax.lax.collapse(output, 2))
