"""Kimi Linear: blocks of Kimi Delta Attention or latent attention, each followed by a dense or a mixture-of-experts
block.

**Source:** Kimi Linear: An Expressive, Efficient Attention Architecture (arXiv:2510.26692).
"""

import dataclasses
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Int32, Integer, PRNGKeyArray

from kimi_zoo.layers.kda import KDACache, KimiDeltaAttention
from kimi_zoo.layers.linear import Embedding, Linear
from kimi_zoo.layers.mla import MLACache, MultiHeadLatentAttention
from kimi_zoo.layers.mlp import MLP
from kimi_zoo.layers.moe import Experts, MoE, Router
from kimi_zoo.layers.norm import RMSNorm
from kimi_zoo.layers.stack import LayerStack, stack_layers
from kimi_zoo.models.inputs import AnyArray, check_beside_tokens, check_lengths, check_tokens
from kimi_zoo.models.kimi_linear_config import KIMI_LINEAR_48B_A3B as KIMI_LINEAR_48B_A3B
from kimi_zoo.models.kimi_linear_config import KimiLinearConfig as KimiLinearConfig
from kimi_zoo.models.kimi_linear_partition import logit_spec, over_mesh
from kimi_zoo.ops.packing import segment_positions
from kimi_zoo.parallel.axes import ONE_DEVICE, Axes, Parallelism, as_parallelism
from kimi_zoo.parallel.split import keep_all_but_gathered, whole


class KimiBlock(eqx.Module):
    """`x + mixer(norm(x))`, then `x + mlp(norm(x))`."""

    input_norm: RMSNorm
    mixer: KimiDeltaAttention | MultiHeadLatentAttention
    post_norm: RMSNorm
    mlp: MLP | MoE

    def __init__(self, config: KimiLinearConfig, layer: int, *, key: PRNGKeyArray):
        """The block at place `layer` (0-based) of a model."""
        mixer_key, mlp_key = jr.split(key)
        self.input_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mixer = _mixer(config, layer, key=mixer_key)
        self.post_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = _mlp(config, layer, key=mlp_key)

    def __call__(
        self,
        x: Float[Array, "batch seq hidden_size"],
        *,
        positions: Int[Array, "batch seq"],
        segment_ids: Int[Array, "batch seq"] | None = None,
        axes: Axes = ONE_DEVICE,
    ) -> Float[Array, "batch seq hidden_size"]:
        """The residual stream after this block; see `KimiLinear.hidden_states` for the arguments."""
        x = self.mix(x, positions=positions, segment_ids=segment_ids, axes=axes)
        return x + self.feed(self.post_norm(x), segment_ids=segment_ids, axes=axes)

    def mix(
        self,
        x: Float[Array, "batch seq hidden_size"],
        *,
        positions: Int[Array, "batch seq"],
        segment_ids: Int[Array, "batch seq"] | None = None,
        axes: Axes = ONE_DEVICE,
    ) -> Float[Array, "batch seq hidden_size"]:
        """The first half of the block: what its MLP reads, before the norm."""
        mixed = self.input_norm(x)
        if isinstance(self.mixer, MultiHeadLatentAttention):
            options = {"context_axis": axes.sequence} if axes.sequence else {}
            mixed = self.mixer(mixed, positions=positions, segment_ids=segment_ids, **options)
        else:  # a mixer that someone put in the place of KDA need not know of axes
            options = {"context_axis": axes.context, "head_axis": axes.heads} if axes.sequence else {}
            mixed = self.mixer(mixed, segment_ids=segment_ids, **options)
        return x + _sum_parts(mixed, axes.tensor)

    def feed(
        self,
        normed: Float[Array, "batch seq hidden_size"],
        *,
        segment_ids: Int[Array, "batch seq"] | None = None,
        axes: Axes = ONE_DEVICE,
    ) -> Float[Array, "batch seq hidden_size"]:
        """The second half of the block, behind the norm: what is added to the residual stream."""
        if isinstance(self.mlp, MoE):
            real = None if segment_ids is None else segment_ids > 0
            y = self.mlp(normed, expert_axis=axes.expert, expert_capacity=axes.expert_capacity, real=real)
        else:
            y = self.mlp(normed)
        return _sum_parts(y, axes.tensor)

    def init_cache(self, batch: int, capacity: int, dtype: DTypeLike) -> KDACache | MLACache:
        """What this block remembers, before the first token."""
        if isinstance(self.mixer, MultiHeadLatentAttention):
            return self.mixer.init_cache(batch, capacity, dtype)
        return self.mixer.init_cache(batch, dtype)

    def extend(
        self,
        x: Float[Array, "batch seq hidden_size"],
        cache: KDACache | MLACache,
        *,
        lengths: Int[Array, " batch"],
        positions: Int[Array, "batch seq"],
        real: Bool[Array, "batch seq"] | None = None,
    ) -> tuple[Float[Array, "batch seq hidden_size"], KDACache | MLACache]:
        """Continues behind `cache`. **Returns:** the residual stream, and the new `KDACache`, or the new tokens'
        latents."""
        mixed = self.input_norm(x)
        if isinstance(self.mixer, MultiHeadLatentAttention):
            latents = cast(MLACache, cache)
            mixed, update = self.mixer.attend(mixed, latents, lengths=lengths, positions=positions, real=real)
        else:
            mixed, update = self.mixer.extend(mixed, cast(KDACache, cache), real=real)
        x = x + mixed
        return x + self.mlp(self.post_norm(x)), update


def _sum_parts(x: Array, axis: str | None) -> Array:
    """The sum over devices that each hold some of the heads, or of the inner channels."""
    return x if axis is None else jax.lax.psum(x, axis)


def _mixer(config: KimiLinearConfig, layer: int, *, key: PRNGKeyArray) -> KimiDeltaAttention | MultiHeadLatentAttention:
    if config.layer_kinds[layer] == "mla":
        return MultiHeadLatentAttention(
            config.hidden_size,
            config.num_attention_heads,
            kv_lora_rank=config.kv_lora_rank,
            qk_nope_head_dim=config.qk_nope_head_dim,
            qk_rope_head_dim=config.qk_rope_head_dim,
            v_head_dim=config.v_head_dim,
            q_lora_rank=config.q_lora_rank,
            output_gate=config.mla_output_gate,
            std=config.initializer_range,
            key=key,
        )
    return KimiDeltaAttention(
        config.hidden_size,
        config.linear_num_heads,
        config.linear_head_dim,
        conv_size=config.linear_conv_kernel_dim,
        decay_gate=config.kda_decay_gate,
        output_gate=config.kda_output_gate,
        safe_gate=config.kda_safe_gate,
        lower_bound=config.kda_lower_bound if config.kda_safe_gate else None,
        norm_eps=config.rms_norm_eps,
        std=config.initializer_range,
        key=key,
    )


def _mlp(config: KimiLinearConfig, layer: int, *, key: PRNGKeyArray) -> MLP | MoE:
    std = config.initializer_range
    if config.mlp_kinds[layer] == "dense":
        return MLP(config.hidden_size, config.intermediate_size, std=std, key=key)
    limit = lambda limits: None if limits is None else limits[layer]
    router_key, experts_key, shared_key = jr.split(key, 3)
    router = Router(
        config.hidden_size,
        config.num_experts,
        top_k=config.num_experts_per_token,
        activation=config.moe_router_activation_func,
        num_groups=config.num_expert_group,
        top_groups=config.topk_group,
        renormalize=config.moe_renormalize,
        scale=config.routed_scaling_factor,
        std=std,
        key=router_key,
    )
    experts = Experts(config.hidden_size, config.moe_intermediate_size, config.num_experts, std=std, key=experts_key)
    shared = None
    if config.num_shared_experts:
        inner = config.moe_intermediate_size * config.num_shared_experts
        shared_limit = limit(config.share_expert_swiglu_limit_list)
        shared = MLP(config.hidden_size, inner, limit=shared_limit, std=std, key=shared_key)
    return MoE(router, experts, shared, limit=limit(config.expert_swiglu_limit_list))


@dataclasses.dataclass(frozen=True)
class Published:
    """How the checkpoint that a model came from writes what can be written in several ways, so that it is saved alike.

    `spellings` holds, per tensor (by its usual name), which of its names and shapes was found (0, the usual one, is
    left out). `source` is the folder, from which tokenizer files are carried over; `config` the text of its
    `config.json`. Records that differ in these two are equal, so that models from different folders share compiled
    programs and mix in `jax.tree.map`. The price: a model that a jitted function *returns* may carry the record of
    another one, with which the function was traced first; `with_published(returned, model.published)` sets it right.
    """

    root: str = ""
    spellings: tuple[tuple[str, tuple[int, int]], ...] = ()
    tied_head_stored: bool = False
    source: str | None = dataclasses.field(default=None, compare=False)
    config: str | None = dataclasses.field(default=None, compare=False)


class KimiLinearCache(eqx.Module):
    """What a model remembers of every row: one `KDACache` or `MLACache` per layer, and how many tokens each row has
    seen.

    An ordinary pytree: save it with `equinox.tree_serialise_leaves`, restore it into `model.init_cache(batch,
    max_length)`.
    """

    layers: LayerStack
    lengths: Int32[Array, " batch"]
    max_length: int = eqx.field(static=True)

    def rewind(self, lengths: Integer[AnyArray, " batch"]) -> "KimiLinearCache":
        """The cache as it was when each row had seen `lengths` tokens: possible only where every layer keeps all
        tokens.

        **Raises:** `ValueError` if a layer holds a recurrent state, which cannot go back: keep the cache of the earlier
        moment (caches are immutable values), or prefill again. `TypeError` or `ValueError` for `lengths` that are not a
        number per row from 0 to `self.lengths` (an error at run time when they are traced).
        """
        if any(isinstance(layer, KDACache) for unit in self.layers.sections for layer in unit):
            raise ValueError(
                "This cache holds recurrent states, which cannot be taken back to an earlier token. Keep the cache "
                "from before the tokens you want to drop, or prefill the shorter prompt again."
            )
        lengths = check_lengths(lengths, self.lengths, self.lengths.shape[0], traced=True)
        return eqx.tree_at(lambda cache: cache.lengths, self, lengths)


class KimiLinear(eqx.Module):
    """A Kimi Linear language model: tokens to next-token logits."""

    embedding: Embedding
    layers: LayerStack
    norm: RMSNorm
    head: Linear | None
    config: KimiLinearConfig = eqx.field(static=True)
    published: Published = eqx.field(static=True)

    def __init__(self, config: KimiLinearConfig, *, key: PRNGKeyArray):
        """Builds a model from scratch, in float32.

        Projections, experts, embedding and head are drawn from a normal of standard deviation
        `config.initializer_range`; norms start at 1; convolutions, `a_log` and `dt_bias` as `KimiDeltaAttention` says;
        the router's balancing bias at 0.
        """
        embedding_key, head_key, layers_key = jr.split(key, 3)
        std = config.initializer_range
        self.embedding = Embedding(config.vocab_size, config.hidden_size, std=std, key=embedding_key)
        keys = jr.split(layers_key, config.num_hidden_layers)
        self.layers = stack_layers([KimiBlock(config, layer, key=key) for layer, key in enumerate(keys)])
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        tied = config.tie_word_embeddings
        self.head = None if tied else Linear(config.hidden_size, config.vocab_size, std=std, key=head_key)
        self.config = config
        self.published = Published(tied_head_stored=tied)  # not every reader ties it

    def __call__(
        self,
        tokens: Integer[AnyArray, "batch seq"],
        *,
        segment_ids: Integer[AnyArray, "batch seq"] | None = None,
        positions: Integer[AnyArray, "batch seq"] | None = None,
        mesh: Parallelism | Mesh | str | None = None,
    ) -> Float[Array, "batch seq vocab_size"]:
        """Next-token logits at every position.

        **Arguments:**

        - `segment_ids`: 1, 2, ... for the documents packed in a row, 0 for padding; `None` means one document per row.
            No document sees another, in attention, convolution or recurrent state.
        - `positions`: of the tokens in their documents; by default they restart with each.
        - `mesh`: the devices to compute on, such as `"fsdp=4,context=2"`; best those that `from_pretrained` was given.
            Rows and tokens are split over them, and so is the result: see `kimi_zoo.parallel`.

        **Raises:** `TypeError` for anything but arrays of integers; `ValueError` for wrong shapes and, where values are
        known (not under `jax.jit`), for ids outside the vocabulary and negative numbers; for what the mesh cannot split
        evenly.
        """
        parallelism = as_parallelism(mesh)
        if parallelism is None:
            return self.logits(self.hidden_states(tokens, segment_ids=segment_ids, positions=positions))
        arrays = self._check_tokens(tokens, segment_ids, positions)
        run = lambda model, tokens, segment_ids, positions, axes: model.logits(
            model.hidden_states(tokens, segment_ids=segment_ids, positions=positions, axes=axes)
        )
        return over_mesh(run, self, arrays, parallelism, logit_spec(self.config, parallelism))

    def hidden_states(
        self,
        tokens: Integer[AnyArray, "batch seq"],
        *,
        segment_ids: Integer[AnyArray, "batch seq"] | None = None,
        positions: Integer[AnyArray, "batch seq"] | None = None,
        axes: Axes = ONE_DEVICE,
    ) -> Float[Array, "batch seq hidden_size"]:
        """As calling the model, but stops before the output head: what `logits` takes.

        **Arguments:** `axes`: inside `jax.shard_map`, the mesh axes that parameters and tokens are split over; then
        `positions` must be given, and parameters split over `fsdp` be marked (`kimi_zoo.parallel`).
        """
        tokens, segment_ids, positions = self._check_tokens(tokens, segment_ids, positions)

        def apply(x: Array, layer: Any) -> tuple[Array, None]:
            return apply_layer(whole(layer), x, positions=positions, segment_ids=segment_ids, axes=axes), None

        x, _ = self.layers.scan(apply, self.embed(tokens, axes), remat=keep_all_but_gathered if axes.fsdp else False)
        return self.norm(x)

    def embed(self, tokens: Int[Array, "batch seq"], axes: Axes = ONE_DEVICE) -> Float[Array, "batch seq hidden_size"]:
        """The token vectors that the first layer reads."""
        embedding = whole(self.embedding)
        return embedding(tokens, tensor_axis=self.vocabulary_axis(embedding.weight, axes))

    def logits(self, hidden: Float[Array, "*batch hidden_size"]) -> Float[Array, "*batch vocab_size"]:
        """The output head on normalised hidden states.

        Inside `jax.shard_map`, of this device's part of the vocabulary: see `vocabulary_axis`.
        """
        return whole(self.embedding).attend(hidden) if self.head is None else whole(self.head)(hidden)

    def vocabulary_axis(self, table: Float[Array, "rows hidden_size"], axes: Axes) -> str | None:
        """The mesh axis that the vocabulary is split over, if `table` holds a part of it."""
        return axes.tensor if table.shape[0] != self.config.vocab_size else None

    def _check_tokens(self, tokens: Any, segment_ids: Any, positions: Any) -> tuple[Array, Array | None, Array]:
        """Tokens, segment ids and positions, in which each document starts anew if they are not given."""
        tokens = check_tokens(tokens, self.config.vocab_size)
        segment_ids = check_beside_tokens("segment_ids", segment_ids, tokens)
        positions = check_beside_tokens("positions", positions, tokens)
        if positions is None:
            positions = segment_positions(jnp.ones(tokens.shape, jnp.int32) if segment_ids is None else segment_ids)
        return tokens, segment_ids, positions

    def init_cache(self, batch: int, max_length: int) -> KimiLinearCache:
        """An empty cache for `batch` rows of at most `max_length` tokens.

        Latents and convolution windows are kept in the dtype of the embedding, recurrent states in float32.
        """
        dtype = self.embedding.weight.dtype
        layers = self.layers.map(lambda layer: _layer_cache(layer, batch, max_length, dtype))
        return KimiLinearCache(layers, jnp.zeros(batch, jnp.int32), max_length)

    def decode(
        self,
        tokens: Integer[AnyArray, "batch seq"],
        cache: KimiLinearCache,
        *,
        lengths: Integer[AnyArray, " batch"] | None = None,
    ) -> tuple[Float[Array, "batch seq vocab_size"], KimiLinearCache]:
        """Logits of tokens that continue the rows of `cache`, and the cache behind them.

        For a prompt at once, a prompt in pieces of any length, or one token at a time.

        **Arguments:** `lengths`: how many of the tokens of each row are real, from the left; 0 leaves a row as it is.
        What follows them is padding, which changes nothing; its logits mean nothing.

        **Raises:** an error if a row outgrows `cache.max_length`, or `lengths` are not from 0 to the number of tokens
        (at run time when lengths are traced); `ValueError` for a cache of another model or batch; as calling the model.
        """
        tokens = check_tokens(tokens, self.config.vocab_size)
        if lengths is not None:
            lengths = check_lengths(lengths, tokens.shape[1], tokens.shape[0], traced=True)
        hidden, cache = self.decode_hidden_states(tokens, cache, lengths=lengths)
        over = jnp.any(cache.lengths > cache.max_length)
        message = (
            f"A row has outgrown its cache, made for {cache.max_length} tokens: make one with a larger `max_length`."
        )
        return self.logits(eqx.error_if(hidden, over, message)), cache

    def decode_hidden_states(
        self,
        tokens: Integer[AnyArray, "batch seq"],
        cache: KimiLinearCache,
        *,
        lengths: Integer[AnyArray, " batch"] | None = None,
    ) -> tuple[Float[Array, "batch seq hidden_size"], KimiLinearCache]:
        """As `decode`, but stops before the output head, and does not check at run time: tokens past `max_length` are
        forgotten."""
        tokens = check_tokens(tokens, self.config.vocab_size)
        if lengths is not None:
            lengths = check_lengths(lengths, tokens.shape[1], tokens.shape[0], traced=False)
        self._check_cache(cache, tokens.shape[0])
        places = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        real = None if lengths is None else places < lengths[:, None]
        positions = cache.lengths[:, None] + places
        extend = lambda x, layer, layer_cache: layer.extend(
            x, layer_cache, lengths=cache.lengths, positions=positions, real=real
        )
        x, updates = self.layers.scan(extend, self.embedding(tokens), cache.layers)
        layers = jax.tree.map(
            lambda old, new: old.append(new, cache.lengths, real) if isinstance(old, MLACache) else new,
            cache.layers,
            updates,
            is_leaf=lambda node: isinstance(node, MLACache | KDACache),
        )
        seen = jnp.int32(tokens.shape[1]) if lengths is None else lengths
        return self.norm(x), KimiLinearCache(layers, cache.lengths + seen, cache.max_length)

    def _check_cache(self, cache: KimiLinearCache, batch: int) -> None:
        """Checks that a cache has the layers of this model, and a row per row of the batch."""
        if not isinstance(cache, KimiLinearCache):
            raise TypeError(f"`cache` must come from `model.init_cache` or `model.decode`; got {type(cache).__name__}.")
        if batch != cache.lengths.shape[0]:
            raise ValueError(f"`tokens` has {batch} rows, the cache was made for {cache.lengths.shape[0]}.")
        expected = eqx.filter_eval_shape(self.init_cache, batch, cache.max_length)
        shapes = lambda tree: (jax.tree.structure(tree), [leaf.shape for leaf in jax.tree.leaves(tree)])
        if shapes(cache) != shapes(expected):
            raise ValueError(
                "`cache` was made for another model: its layers differ. Use `model.init_cache` of this one."
            )


def apply_layer(layer: Any, x: Array, *, positions: Array, segment_ids: Array | None, axes: Axes) -> Array:
    """A block, or whatever `replace_layer` put in its place, on the residual stream.

    **Raises:** `TypeError` for another layer than a block where rows or heads are split over devices.
    """
    if isinstance(layer, KimiBlock):
        return layer(x, positions=positions, segment_ids=segment_ids, axes=axes)
    if axes.sequence or axes.tensor:
        raise TypeError(
            f"A layer of this model, a {type(layer).__name__}, is no `KimiBlock`, and cannot run where the mesh splits "
            "rows or heads (context, heads, tensor): use data, fsdp and expert."
        )
    return layer(x, positions=positions, segment_ids=segment_ids)


def _layer_cache(layer: Any, batch: int, capacity: int, dtype: DTypeLike) -> KDACache | MLACache:
    if not (hasattr(layer, "init_cache") and hasattr(layer, "extend")):
        raise TypeError(
            f"A layer of this model, a {type(layer).__name__}, cannot decode: it has no `init_cache` and `extend`, "
            "which `KimiBlock` has. Calling the model works without."
        )
    return layer.init_cache(batch, capacity, dtype)


def with_published(model: KimiLinear, published: Published) -> KimiLinear:
    """The same parameters, with another record of how they are published."""
    new = object.__new__(KimiLinear)  # static fields are no leaves, which `equinox.tree_at` could replace
    for field in dataclasses.fields(model):
        object.__setattr__(new, field.name, getattr(model, field.name))
    object.__setattr__(new, "published", published)
    return new


def replace_layer(model: KimiLinear, index: int, layer: object) -> KimiLinear:
    """A model with another layer at place `index`; the model given is left as it is.

    **Arguments:** `layer`: a block, or any module that is called like one, or a function from the present block to a
    new one. A block of the same structure is written into its stack; another one splits the stack.

    **Raises:** `IndexError` for a layer that does not exist; `TypeError` for something that is no layer.
    """
    if not isinstance(layer, eqx.Module) and callable(layer):
        layer = layer(model.layers[index])
    if not isinstance(layer, eqx.Module):
        raise TypeError(
            f"`layer` must be an equinox module, or a function that returns one; got {type(layer).__name__}."
        )
    return eqx.tree_at(lambda tree: tree.layers, model, model.layers.replace(index, layer), is_leaf=lambda x: x is None)
