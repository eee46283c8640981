"""Names of tensors in Megatron checkpoints, in every layout, as one kind of key: place, parameter, expert."""

import re
from typing import Literal, NamedTuple

STACKED = -1
"""In place of the number of a layer or expert: the tensor has an axis for all of them."""


class Place(NamedTuple):
    """Where a parameter belongs: outside the layers, in physical layer `number`, or in a layer that predicts one more
    token (`inner` is then the number of a layer within it, `None` for its own parameters)."""

    kind: Literal["outer", "layer", "mtp"]
    number: int = 0
    inner: int | None = None


class Key(NamedTuple):
    """A parameter: its place, its name there, and the number of the expert if it belongs to one."""

    place: Place
    name: str
    expert: int | None = None

    def __str__(self) -> str:
        expert = "" if self.expert is None else f" of {'all experts' if self.expert < 0 else f'expert {self.expert}'}"
        return f"{self.prefix}{self.name}{expert}"

    @property
    def prefix(self) -> str:
        """What the full name begins with."""
        place = self.place
        if place.kind == "outer":
            return ""
        if place.kind == "layer":
            return "decoder.layers." + ("" if place.number == STACKED else f"{place.number}.")
        return f"mtp.layers.{place.number}." + ("" if place.inner is None else "transformer_layer.")


OUTER = Place("outer")

_ROOT = re.compile(r"(?:model\.)?(?:module\.)*((?:embedding|decoder|output_layer|mtp|rotary_pos_emb)\..+)", re.DOTALL)
_LAYER = re.compile(r"decoder\.layers\.(?:(\d{1,6})\.)?(.+)", re.DOTALL)
_MTP = re.compile(r"mtp\.layers\.(\d{1,6})\.(.+)", re.DOTALL)
_MTP_INNER = re.compile(r"(?:transformer_layer|mtp_model_layer)\.(?:layers\.(\d{1,6})\.)?(.+)", re.DOTALL)
_EXPERTS = (  # each with the number of the expert and what remains of the name
    re.compile(r"mlp\.experts\.(?:experts|local_experts)\.(?P<e>\d{1,6})\.(?P<rest>linear_fc[12]\..+)"),
    re.compile(r"mlp\.experts\.experts\.(?P<rest>linear_fc[12]\..+)"),
    re.compile(r"mlp\.experts\.(?P<rest>linear_fc[12]\.weight)(?P<e>\d{1,6})(?P<tag>_[wv])?"),
    re.compile(r"mlp\.experts\.(?P<rest>linear_fc[12]\.weight(?:_[wv])?)"),
    re.compile(r"mlp\.experts\.(?P<rest>weight[12])"),
)


def is_ignored(name: str) -> bool:
    """Whether it holds no weights: state of fp8 scaling, frequencies of rotary embeddings."""
    return "_extra_state" in name or name.endswith("inv_freq")


def parse_name(name: str) -> Key | None:
    """The key of a tensor's name; `None` if it is not that of a Megatron model's parameter."""
    match = _ROOT.fullmatch(name)
    if match is None:
        return None
    name = match[1]
    if match := _LAYER.fullmatch(name):
        number = STACKED if match[1] is None else int(match[1])
        return _with_expert(Place("layer", number), match[2])
    if match := _MTP.fullmatch(name):
        inner = _MTP_INNER.fullmatch(match[2])
        if inner is None:
            return Key(Place("mtp", int(match[1])), match[2])
        return _with_expert(Place("mtp", int(match[1]), int(inner[1] or 0)), inner[2])
    return Key(OUTER, name)


def _with_expert(place: Place, name: str) -> Key:
    for pattern in _EXPERTS:
        if match := pattern.fullmatch(name):
            found = match.groupdict()
            number = STACKED if found.get("e") is None else int(found["e"])
            return Key(place, f"mlp.experts.{found['rest']}{found.get('tag') or ''}", number)
    return Key(place, name)
