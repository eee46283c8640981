"""Rows of a checkpoint table: which parameter of a module a published tensor fills, and in what shape."""

import dataclasses
from collections.abc import Sequence

EXPERT = "{expert}"


@dataclasses.dataclass(frozen=True)
class Row:
    """One parameter of a block (or of the model), and the tensor published for it.

    - `leaf`: path of the parameter below the block, with dots.
    - `names`: the tensor's name below the layer's prefix; published files use one of several spellings, the usual one
        first. `{expert}` in it stands for the number of an expert: as many tensors as the parameter has rows.
    - `shapes`: the shapes that published files give it, the usual one first; none: the parameter's own.
    """

    leaf: str
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...] = ()

    def __init__(self, leaf: str, *names: str, shapes: Sequence[tuple[int, ...]] = ()):
        object.__setattr__(self, "leaf", leaf)
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "shapes", tuple(shapes))


@dataclasses.dataclass(frozen=True)
class Entry:
    """A row at its place in a model: `prefix` is that of its layer (`layer` is `None` for rows of the model itself)."""

    row: Row
    layer: int | None
    prefix: str

    def name(self, spelling: int, expert: int | None = None) -> str:
        """The full tensor name in one of the row's spellings."""
        name = self.prefix + self.row.names[spelling]
        return name if expert is None else name.replace(EXPERT, str(expert))

    @property
    def per_expert(self) -> bool:
        """Whether there is one tensor per expert."""
        return EXPERT in self.row.names[0]


def get_leaf(tree: object, path: str) -> object:
    """The parameter at a dotted path; `None` where the path ends early."""
    for part in path.split("."):
        tree = getattr(tree, part, None)
    return tree


def shape_text(shapes: Sequence[tuple[int, ...]]) -> str:
    """Shapes as a reader wants them: `[4, 1, 8] or [4, 8]`."""
    return " or ".join(str(list(shape)) for shape in shapes)
