"""LoRA: frozen layers plus a trained product of two thin matrices, `W + alpha / rank * B A`.

**Source:** LoRA (arXiv:2106.09685); files in the layout of the PEFT library.
"""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from kimi_zoo.checkpoints.files import CheckpointError, atomic_folder, list_some, read_json, write_json
from kimi_zoo.checkpoints.rows import EXPERT, Entry, get_leaf
from kimi_zoo.checkpoints.safetensors import open_checkpoint, save_tensors
from kimi_zoo.checkpoints.tables import kimi_linear as table
from kimi_zoo.layers.linear import Linear
from kimi_zoo.layers.moe import Experts
from kimi_zoo.models.kimi_linear import KimiLinear
from kimi_zoo.ops.moe_dispatch import run_experts
from kimi_zoo.training.beside_deltas import beside_tensors, modules, with_beside
from kimi_zoo.training.quantization import QuantizedExperts, QuantizedLinear, dequantized
from kimi_zoo.training.trainable import matches, place_of, published_names

ROOT = "base_model.model."
ROLES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}  # what the matrices of an expert are called elsewhere
ALL_LINEAR = ("self_attn.*_proj", "*_proj_with_mqa", "mlp.*_proj", "shared_experts.*_proj")


class Delta(eqx.Module):
    """`scale * B A`: what is added to one frozen matrix, or to each of a stack of them."""

    a: Float[Array, "*stack rank in_features"]
    b: Float[Array, "*stack out_features rank"]
    scale: float = eqx.field(static=True)

    def matrix(self) -> Float[Array, "*stack out_features in_features"]:
        """The product itself, in the dtype of its factors."""
        return self.scale * jnp.einsum("...or,...ri->...oi", self.b, self.a, precision=jax.lax.Precision.HIGHEST)

    def __call__(self, x: Float[Array, "*batch in_features"]) -> Float[Array, "*batch out_features"]:
        """The product applied, without forming it."""
        inner = jnp.einsum("...i,ri->...r", x, self.a.astype(x.dtype))
        return self.scale * jnp.einsum("...r,or->...o", inner, self.b.astype(x.dtype))


class LoRALinear(eqx.Module):
    """A frozen `Linear` with a delta; takes its place in a model."""

    base: Linear | QuantizedLinear
    delta: Delta

    @property
    def weight(self) -> Float[Array, "*stack out_features in_features"]:
        """The matrix that it amounts to."""
        return _added(self.base.weight, self.delta)

    @property
    def bias(self) -> Float[Array, " out_features"] | None:
        """That of the frozen layer."""
        return self.base.bias

    def __call__(self, x: Float[Array, "*batch in_features"]) -> Float[Array, "*batch out_features"]:
        """Computed in the dtype of `x`."""
        return self.base(x) + self.delta(x)


class LoRAExperts(eqx.Module):
    """Frozen `Experts` with deltas on some of their matrices, added when a layer runs."""

    base: Experts | QuantizedExperts
    gate_delta: Delta | None
    up_delta: Delta | None
    down_delta: Delta | None

    @property
    def gate_proj(self) -> Float[Array, "*stack experts inner hidden_size"]:
        """What the frozen matrices and their deltas amount to."""
        return _added(self.base.gate_proj, self.gate_delta)

    @property
    def up_proj(self) -> Float[Array, "*stack experts inner hidden_size"]:
        """As `gate_proj`."""
        return _added(self.base.up_proj, self.up_delta)

    @property
    def down_proj(self) -> Float[Array, "*stack experts hidden_size inner"]:
        """As `gate_proj`."""
        return _added(self.base.down_proj, self.down_delta)

    def __call__(self, *arguments: Array, **options: Any) -> Array:
        """As `Experts.__call__`; gradients compute everything anew: the sums, as large as the experts, are not kept."""

        def run(layer: LoRAExperts, *arguments: Array) -> Array:
            x, expert_ids, expert_weights = arguments
            matrices = (layer.gate_proj, layer.up_proj, layer.down_proj)
            return run_experts(x, expert_ids, expert_weights, *matrices, **options)

        return jax.checkpoint(run)(self, *arguments)


def _added(weight: Array, delta: Delta | None) -> Array:
    return weight if delta is None else weight + delta.matrix().astype(weight.dtype)


@dataclasses.dataclass(frozen=True)
class Target:
    """One frozen parameter that gets a delta: its place in the model, and the published names of its matrices."""

    section: int
    position: int
    leaf: str
    entries: tuple[Entry, ...]  # one per layer of the stack


def find_targets(model: KimiLinear, patterns: Sequence[str]) -> tuple[list[Target], dict[str, int]]:
    """The parameters that patterns of published module names select (`q_proj`, `self_attn.*_proj`, `w1`, ...), and how
    many modules each pattern matched. Experts are found as `w1`, `w3`, `w2` or as `gate_proj`, `up_proj`, `down_proj`.

    **Raises:** `ValueError` for a pattern that matches no linear layer, or some but not all layers that are stacked.
    """
    groups: dict[tuple[int, int, str], list[Entry]] = {}
    for entry in table.entries(model.config):
        linear = entry.layer is not None and (entry.row.leaf.endswith("_proj.weight") or ".experts." in entry.row.leaf)
        linear |= entry.row.leaf.endswith((".kv_down.weight", ".kv_up.weight", ".down.weight", ".up.weight"))
        if linear and entry.layer is not None:
            section, position, _ = model.layers.locate(entry.layer)
            groups.setdefault((section, position, entry.row.leaf), []).append(entry)
    every = [entry for group in groups.values() for entry in group]
    fits = lambda entry, patterns: any(matches(name, patterns) for name in module_names(entry))
    counts = {pattern: sum(fits(entry, (pattern,)) for entry in every) for pattern in patterns}
    for pattern, count in counts.items():
        if not count:
            known = sorted({module_names(entry)[0].rsplit(".", 1)[-1] for entry in every})
            raise ValueError(f"The LoRA target {pattern!r} matches no linear layer. There are: {', '.join(known)}.")
    targets = []
    for (section, position, leaf), group in groups.items():
        chosen = [fits(entry, patterns) for entry in group]
        if all(chosen):
            targets.append(Target(section, position, leaf, tuple(group)))
        elif any(chosen):
            layers = [entry.layer for entry in group]
            raise ValueError(
                f"LoRA targets must take all or none of the layers {layers}, which are stacked and share {leaf}; "
                f"{list(patterns)} takes {[layer for layer, yes in zip(layers, chosen, strict=True) if yes]}."
            )
    return targets, counts


def module_names(entry: Entry) -> list[str]:
    """The published name of the module that a tensor belongs to, and another that it goes by."""
    name = entry.name(0).removesuffix(".weight").replace(EXPERT, "*")
    parent, _, last = name.rpartition(".")
    return [name, f"{parent}.{ROLES[last]}"] if last in ROLES else [name]


def add_lora(
    model: KimiLinear, *, rank: int, alpha: float | None = None, targets: Sequence[str] = ALL_LINEAR, key: PRNGKeyArray
) -> KimiLinear:
    """The model with deltas that are zero so far: `A` is uniform as a linear layer starts, `B` is 0.

    **Arguments:** `alpha` is `2 * rank` by default; the deltas are scaled by `alpha / rank`. `targets`: see
    `find_targets`; by default all linear layers but the routed experts.

    **Raises:** `ValueError` for a rank below 1, targets that match nothing, or a model that has deltas already.
    """
    if rank < 1:
        raise ValueError(f"The rank of LoRA is at least 1; got {rank}.")
    if has_lora(model):
        raise ValueError("This model has LoRA deltas already: merge them first with `merge_lora`.")
    scale = (2 * rank if alpha is None else alpha) / rank
    patterns = [p for p in targets if targets != ALL_LINEAR or _matches_some(model, p)]
    for target in find_targets(model, patterns)[0]:
        key, a_key = jr.split(key)
        *stack, out_features, in_features = _stack_shape(model, target)
        bound = in_features**-0.5
        a = jr.uniform(a_key, (*stack, rank, in_features), minval=-bound, maxval=bound)
        delta = Delta(a, jnp.zeros((*stack, out_features, rank)), scale)
        model = _with_delta(model, target, delta)
    return model


def _matches_some(model: KimiLinear, pattern: str) -> bool:
    try:
        return bool(find_targets(model, (pattern,))[0])
    except ValueError:
        return False


def _with_delta(model: KimiLinear, target: Target, delta: Delta) -> KimiLinear:
    """The model with the delta beside the target's matrix."""
    inside = lambda m: m.layers.sections[target.section][target.position]
    if ".experts." in target.leaf:
        experts = lambda m: inside(m).mlp.experts
        old = experts(model)
        wrapped = old if isinstance(old, LoRAExperts) else LoRAExperts(old, None, None, None)
        wrapped = eqx.tree_at(lambda e: getattr(e, _delta_field(target)), wrapped, delta, is_leaf=lambda x: x is None)
        return eqx.tree_at(experts, model, wrapped)
    module = lambda m: cast(Linear, get_leaf(inside(m), target.leaf.removesuffix(".weight")))
    return eqx.tree_at(module, model, LoRALinear(module(model), delta))


def has_lora(tree: Any) -> bool:
    """Whether a model has deltas."""
    return any(isinstance(node, Delta) for node in jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, Delta)))


def lora_leaves(model: Any) -> Any:
    """A tree of booleans: the factors of the deltas."""
    mark = lambda value: lambda node: jax.tree.map(lambda _: value, node)
    is_delta = lambda node: isinstance(node, Delta)
    return jax.tree.map(lambda node: mark(is_delta(node))(node), model, is_leaf=is_delta)


def select_deltas(model: KimiLinear, *, freeze: Sequence[str] = ()) -> Any:
    """A tree like the model that says which factors of deltas train, as `trainable.select` does of parameters: those of
    matrices that none of `freeze` fits."""
    names = published_names(model)

    def chosen(path: tuple[Any, ...], is_delta: bool) -> bool | np.ndarray:
        if not is_delta:
            return False
        section, position, leaf = place_of(path)
        matrix = leaf.rpartition(".")[0]  # without the name of the factor
        linear = matrix.removesuffix(".delta") + ".weight"
        group = names[section, position, linear if matrix.endswith(".delta") else matrix.replace("_delta", "_proj")]
        kept = np.asarray([not matches(name, freeze) for name in group])
        return bool(kept[0]) if kept.all() or not kept.any() else kept

    return jax.tree_util.tree_map_with_path(chosen, lora_leaves(model))


def merge_lora[Model](model: Model) -> Model:
    """The model with every delta added to its matrix: in float32, rounded once to the dtype of the matrix. Quantised
    ones are dequantised, to float32."""

    def merge(node: Any) -> Any:
        if isinstance(node, LoRALinear):
            base = dequantized(node.base)
            return eqx.tree_at(lambda linear: linear.weight, base, _sum(base.weight, node.delta))
        if isinstance(node, LoRAExperts):
            base = dequantized(node.base)
            matrices = lambda e: (e.gate_proj, e.up_proj, e.down_proj)
            deltas = (node.gate_delta, node.up_delta, node.down_delta)
            return eqx.tree_at(matrices, base, tuple(map(_sum, matrices(base), deltas)))
        return node

    is_wrapper = lambda node: isinstance(node, LoRALinear | LoRAExperts)
    return dequantized(jax.tree.map(merge, model, is_leaf=is_wrapper))


def _sum(weight: Array, delta: Delta | None) -> Array:
    if delta is None:
        return weight
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), delta)
    return (weight.astype(jnp.float32) + wide.matrix()).astype(weight.dtype)


def adapter_tensors(model: KimiLinear) -> dict[str, Any]:
    """The factors by their names in PEFT's files."""
    tensors: dict[str, Any] = {}
    for target, delta in _deltas(model):
        for repeat, entry in enumerate(target.entries):
            for name, place in _matrices(entry, repeat, delta.a.shape):
                tensors[f"{ROOT}{name}.lora_A.weight"] = delta.a[place]
                tensors[f"{ROOT}{name}.lora_B.weight"] = delta.b[place]
    return tensors


def _matrices(entry: Entry, repeat: int, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The module names of a layer's matrices, and where they are in the stack."""
    for expert in range(shape[1]) if entry.per_expert else (None,):
        place = (repeat,) if expert is None else (repeat, expert)
        yield entry.name(0, expert).removesuffix(".weight"), place


def _deltas(model: KimiLinear) -> Iterator[tuple[Target, Delta]]:
    for target in find_targets(model, ("*",))[0]:
        block = model.layers.sections[target.section][target.position]
        if ".experts." in target.leaf:
            experts = block.mlp.experts
            delta = getattr(experts, _delta_field(target)) if isinstance(experts, LoRAExperts) else None
        else:
            delta = getattr(get_leaf(block, target.leaf.removesuffix(".weight")), "delta", None)
        if delta is not None:
            yield target, delta


def save_adapter(
    model: KimiLinear, path: str | Path, *, base: str | None = None, beside: Any = None, overwrite: bool = False
) -> None:
    """Writes the deltas as a folder that PEFT reads: `adapter_model.safetensors` and `adapter_config.json`.

    **Arguments:** `base`: the folder or name of the frozen model; that which the model was loaded from, by default.
    `beside`: a tree like the model, as of `trainable.select`: what else is written, whole, by published names.
    """
    found = list(_deltas(model))
    if not found:
        raise CheckpointError("This model has no LoRA deltas to save.")
    delta = found[0][1]
    rank, alpha = delta.a.shape[-2], delta.scale * delta.a.shape[-2]
    whole = {} if beside is None else beside_tensors(model, beside)
    model = _all_expert_matrices(model, rank, delta.scale)
    entries = [entry for target, _ in _deltas(model) for entry in target.entries]
    names = {name for entry in entries for name in _target_names(entry, model)}
    experts = {entry.name(0).split(f".{EXPERT}.")[0] for entry in entries if entry.per_expert}
    whole_modules = modules(whole) - names
    fused = {"experts.gate_up_proj"} if experts else set()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or model.published.source,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(names | set(map(transformers_name, names))),
        "modules_to_save": sorted(whole_modules | set(map(transformers_name, whole_modules))) or None,
        # transformers holds the experts of a layer as two parameters, gate and up in one of them
        "target_parameters": sorted(
            f"{transformers_name(path)}.{name}" for path in experts for name in ("gate_up_proj", "down_proj")
        )
        or None,
        "rank_pattern": dict.fromkeys(fused, 2 * rank),
        "alpha_pattern": dict.fromkeys(fused, 2 * alpha),
    }
    with atomic_folder(path, overwrite=overwrite) as folder:
        tensors = adapter_tensors(model) | {f"{ROOT}{name}": tensor for name, tensor in whole.items()}
        save_tensors(tensors, folder / "adapter_model.safetensors")
        write_json(folder / "adapter_config.json", config)


def transformers_name(name: str) -> str:
    """What transformers calls a module inside its model, where that differs from the published name."""
    return name.replace(".block_sparse_moe.", ".mlp.").replace(".self_attn.f_", ".self_attn.forget_gate.f_")


def _all_expert_matrices(model: KimiLinear, rank: int, scale: float) -> KimiLinear:
    """The model with zero deltas on the other matrices of experts that have one: PEFT reads all three or none."""
    for target in find_targets(model, ("*",))[0]:
        block = model.layers.sections[target.section][target.position]
        if ".experts." in target.leaf and isinstance(block.mlp.experts, LoRAExperts):
            *stack, out_features, in_features = _stack_shape(model, target)
            if getattr(block.mlp.experts, _delta_field(target)) is None:
                zero = Delta(jnp.zeros((*stack, rank, in_features)), jnp.zeros((*stack, out_features, rank)), scale)
                model = _with_delta(model, target, zero)
    return model


def _delta_field(target: Target) -> str:
    """The field of `LoRAExperts` that holds the delta of an expert matrix."""
    return target.leaf.rsplit(".", 1)[-1].replace("_proj", "_delta")


def _target_names(entry: Entry, model: KimiLinear) -> Iterator[str]:
    """As PEFT finds modules again: by the ends of their names."""
    for expert in range(model.config.num_experts) if entry.per_expert else (None,):
        yield entry.name(0, expert).removesuffix(".weight")


def load_adapter(model: KimiLinear, path: str | Path) -> KimiLinear:
    """The model with the deltas of a PEFT folder, whose frozen model it must be, and what trained beside them.

    Modules may have their published names or those of transformers.

    **Raises:** `CheckpointError` for a folder that holds no LoRA adapter, or one that does not fit the model.
    """
    folder = Path(path)
    config = read_json(folder / "adapter_config.json")
    if config.get("peft_type") != "LORA" or config.get("use_dora") or config.get("use_rslora"):
        raise CheckpointError(f"{folder} holds no plain LoRA adapter, which is the only kind that can be read.")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, int | float):
        raise CheckpointError(f"{folder / 'adapter_config.json'} should give numbers for `r` and `lora_alpha`.")
    own = [name for entry in table.entries(model.config) for name in module_names(entry)]
    for field in ("rank_pattern", "alpha_pattern"):
        for pattern in config.get(field) or {}:  # as PEFT applies them
            if any(re.match(rf"(.*\.)?({pattern})$", spelling) for n in own for spelling in (n, transformers_name(n))):
                raise CheckpointError(
                    f"{folder}: `{field}` gives {pattern!r} a value of its own, which cannot be read."
                )
    with open_checkpoint(folder / "adapter_model.safetensors") as checkpoint:
        model, used = with_beside(model, checkpoint, ROOT)
        left = set(checkpoint) - used
        for target in find_targets(model, ("*",))[0]:
            shape = _stack_shape(model, target)
            names = [f"{ROOT}{name}" for entry in target.entries for name, _ in _matrices(entry, 0, shape)]
            names = [n if f"{n}.lora_A.weight" in checkpoint else transformers_name(n) for n in names]
            present = [name for name in names if f"{name}.lora_A.weight" in checkpoint]
            if not present:
                continue
            missing = [f"{n}.lora_{x}.weight" for n in names for x in "AB" if f"{n}.lora_{x}.weight" not in checkpoint]
            if missing:
                raise CheckpointError(f"{folder} lacks {list_some(missing)}, though it has others of their kind.")
            *stack, out_features, in_features = shape
            factors = []
            for letter, wanted in (("A", (rank, in_features)), ("B", (out_features, rank))):
                parts = [checkpoint.read(f"{name}.lora_{letter}.weight") for name in names]
                wrong = [f"{n} {list(p.shape)}" for n, p in zip(names, parts, strict=True) if p.shape != wanted]
                if wrong:
                    expected = f"lora_{letter} should have shape {list(wanted)}"
                    raise CheckpointError(f"{folder}: {expected}; got {list_some(wrong)}.")
                factors.append(jnp.asarray(np.stack(parts).reshape(*stack, *wanted), jnp.float32))
            left -= {f"{name}.lora_{letter}.weight" for name in names for letter in "AB"}
            model = _with_delta(model, target, Delta(factors[0], factors[1], alpha / rank))
    if left:
        raise CheckpointError(f"{folder} holds tensors that fit no layer of the model: {list_some(sorted(left))}.")
    return model


def _stack_shape(model: KimiLinear, target: Target) -> tuple[int, ...]:
    block = model.layers.sections[target.section][target.position]
    return eqx.filter_eval_shape(get_leaf, block, target.leaf).shape  # pyright: ignore[reportAttributeAccessIssue]
