"""How a Megatron checkpoint is to be written: ranks, numbering, names."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kimi_zoo.checkpoints.blocks import Blocks
from kimi_zoo.checkpoints.files import CheckpointError, join_problems
from kimi_zoo.checkpoints.megatron_names import Key
from kimi_zoo.checkpoints.tables import megatron as table
from kimi_zoo.checkpoints.tables.megatron import Row
from kimi_zoo.models.kimi_linear_config import KimiLinearConfig

Format = Literal["torch_dist", "legacy"]


@dataclass(frozen=True)
class MegatronLayout:
    """How a Megatron checkpoint is written; `None` means as the model was before, else the first value named.

    - `format`: `"torch_dist"` or `"legacy"` (`mp_rank_*`).
    - `tp`, `pp`, `ep`, `vpp`: tensor, pipeline, expert parallel ranks, virtual pipeline stages: 1.
    - `etp`: expert tensor parallel ranks: as many as `tp`, or 1.
    - `stack`: `"gpt"` numbers whole layers, `"hybrid"` attention and MLP by themselves.
    - `experts`: names of experts in the legacy format: `"te_grouped"`, `"sequential"` or `"grouped"`. In `torch_dist`
        they are stacked, or, with `"singleton"`, stored one by one.
    - `norms`: `"fused"` norms belong to the projection behind them, `"separate"` ones are modules: as in Transformer
        Engine layers (fused, but for the experts' norm) if nothing is known.
    - `vocab_multiple`: the vocabulary is padded to a multiple of this times `tp`: 128.
    - `iteration`: number of the iteration, or 0 for a release.
    """

    format: Format | None = None
    tp: int | None = None
    pp: int | None = None
    ep: int | None = None
    etp: int | None = None
    vpp: int | None = None
    stack: Literal["gpt", "hybrid"] | None = None
    experts: Literal["te_grouped", "sequential", "grouped", "singleton"] | None = None
    norms: Literal["fused", "separate"] | None = None
    vocab_multiple: int | None = None
    iteration: int | None = None


@dataclass(frozen=True)
class Settled:
    """A layout without anything open."""

    format: Format
    tp: int
    pp: int
    ep: int
    etp: int
    vpp: int
    hybrid: bool
    experts: str
    padded_vocab: int
    iteration: int
    names: dict[str, str]

    @property
    def folded(self) -> bool:
        """Whether expert parallel ranks are taken from the tensor parallel ones."""
        return self.etp == 1 and self.tp > 1

    @property
    def folder(self) -> str:
        """The iteration's folder."""
        return f"iter_{self.iteration:07d}" if self.iteration else "release"

    def stage_of(self, layer: int, layers: int) -> tuple[int, int]:
        """The pipeline rank and virtual stage of a (logical) layer."""
        chunk = layer // (layers // (self.pp * self.vpp))
        return chunk % self.pp, chunk // self.pp


@dataclass(frozen=True)
class Parameter:
    """One parameter of Megatron, over the whole model: its row, its sections, and where it belongs.

    `layer`: the logical layer, -1 for the first stage and `layers` for the last. `number`: that of the physical layer.
    """

    key: Key
    row: Row
    sections: tuple[Blocks, ...]
    layer: int


def settle(layout: MegatronLayout, facts: Mapping[str, Any], config: KimiLinearConfig) -> Settled:
    """What is asked for, with what is known of the run for the rest.

    **Raises:** `CheckpointError` that lists everything which does not divide.
    """
    parallel = facts.get("parallel") or {}
    names = {str(k): str(v) for k, v in (facts.get("names") or {}).items()}
    problems = []

    def number(field: str, default: int) -> int:
        value = getattr(layout, field)
        value = parallel.get(field.upper(), default) if value is None else value
        if type(value) is not int or value < 1:
            problems.append(f"{field} must be a whole number of at least 1; got {value!r}")
            return 1
        return value

    tp, pp, ep, vpp = number("tp", 1), number("pp", 1), number("ep", 1), number("vpp", 1)
    etp = number("etp", tp) if layout.etp is not None or layout.tp is None else tp
    problems += _divisions(config, tp, pp, ep, etp, vpp)
    if layout.format == "legacy" and layout.experts == "singleton":
        problems.append("experts 'singleton' are a form of torch_dist")
    if problems:
        raise CheckpointError("This model cannot be split so:\n" + join_problems(problems))
    args = facts.get("args") or {}
    known = "legacy" if facts.get("format") == "legacy" else "torch_dist"
    padded = args.get("padded_vocab_size")
    multiple = (layout.vocab_multiple or args.get("make_vocab_size_divisible_by") or 128) * tp
    rounded = -(-config.vocab_size // multiple) * multiple
    same = layout.vocab_multiple is None and layout.tp in (None, parallel.get("TP"))
    if not (same and type(padded) is int and padded >= config.vocab_size and padded % tp == 0):
        padded = rounded
    iteration = layout.iteration if layout.iteration is not None else facts.get("iteration")
    if layout.norms is not None:
        names |= _norm_names(layout.norms)
    return Settled(
        format=layout.format or known,
        tp=tp, pp=pp, ep=ep, etp=etp, vpp=vpp,
        hybrid=(layout.stack or facts.get("stack")) == "hybrid",
        experts=layout.experts or names.get("experts") or "te_grouped",
        padded_vocab=padded,
        iteration=iteration if type(iteration) is int and iteration > 0 else 0,
        names=names,
    )  # fmt: skip


def _divisions(config: KimiLinearConfig, tp: int, pp: int, ep: int, etp: int, vpp: int) -> Iterator[str]:
    """What does not divide."""
    routed = "moe" in config.mlp_kinds
    width = config.moe_intermediate_size if routed else 0
    for what, value, parts, name in (
        ("KDA heads", config.linear_num_heads, tp, "tp"),
        ("MLA heads", config.num_attention_heads, tp, "tp"),
        ("intermediate_size", config.intermediate_size, tp, "tp"),
        ("the shared experts' width", width * config.num_shared_experts, tp, "tp"),
        ("moe_intermediate_size", width, etp, "etp"),
        ("experts", config.num_experts if routed else 0, ep, "ep"),
        ("layers", config.num_hidden_layers, pp * vpp, "pp * vpp"),
    ):
        if value % parts:
            yield f"{what}: {value} is not divisible by {name} {parts}"
    if etp not in (1, tp):
        yield f"etp {etp} must be 1 or tp, {tp}"
    if etp == 1 and tp > 1 and tp % ep:
        yield f"with etp 1, experts are spread over tensor parallel ranks: tp {tp} must be divisible by ep {ep}"


def _norm_names(style: str) -> dict[str, str]:
    """Names of norms that exist in both styles."""
    rows = (table.DENSE_NORM, *table.LOW_RANK_QUERY[:1], table.MLA[0])
    return {row.name: row.names[0 if style == "fused" else 1] for row in rows}
