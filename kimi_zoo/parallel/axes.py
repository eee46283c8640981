"""The axes of a device mesh by what is split over them, and a mesh from a line such as `fsdp=4,context=2`."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

ROLES = ("data", "fsdp", "expert", "context", "heads", "tensor")  # also their order in a mesh made here: far to near


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axes:
    """Names of mesh axes, inside `jax.shard_map`; `None` where nothing is split so.

    - `data`: rows of a batch; parameters are whole on each device.
    - `fsdp`: rows as well; parameters are split, and gathered a layer at a time.
    - `expert`: rows as well; a mixture of experts sends each token to where its experts are.
    - `context`, `heads`: the tokens of a row, in contiguous parts, `heads` within `context`. Kimi Delta Attention hands
        its state on along `context`, and trades tokens for heads over `heads`.
    - `tensor`: heads, inner channels and the vocabulary; the tokens are the same on each device.
    - `expert_capacity`: room for tokens sent over `expert`, see `kimi_zoo.ops.moe_dispatch`.
    """

    data: str | None = None
    fsdp: str | None = None
    expert: str | None = None
    context: str | None = None
    heads: str | None = None
    tensor: str | None = None
    expert_capacity: float | None = None

    @property
    def batch(self) -> tuple[str, ...]:
        """The axes that rows are split over."""
        return tuple(name for name in (self.data, self.fsdp, self.expert) if name)

    @property
    def sequence(self) -> tuple[str, ...]:
        """The axes that the tokens of a row are split over."""
        return tuple(name for name in (self.context, self.heads) if name)

    @property
    def tokens(self) -> tuple[str, ...]:
        """All axes over which devices hold different tokens."""
        return (*self.batch, *self.sequence)

    def token_spec(self, *rest: str | None) -> PartitionSpec:
        """How an array `[batch, seq, ...]` is split."""
        return PartitionSpec(self.batch or None, self.sequence or None, *rest)


ONE_DEVICE = Axes()


@dataclasses.dataclass(frozen=True)
class Parallelism:
    """A mesh, and which of its axes means what (see `Axes`).

    An axis that the mesh lacks is not used; one of size 1 changes nothing. Every axis of the mesh must have a meaning.
    """

    mesh: Mesh
    data: str = "data"
    fsdp: str = "fsdp"
    expert: str = "expert"
    context: str = "context"
    heads: str = "heads"
    tensor: str = "tensor"
    expert_capacity: float | None = None

    def __post_init__(self):
        """**Raises:** `ValueError` for axes of the mesh without a meaning, a name that means two things, or a capacity
        that is no number above 0 or has no use; `TypeError` for what is no mesh."""
        if not isinstance(self.mesh, Mesh):
            raise TypeError(f"`mesh` must be a jax.sharding.Mesh; got a {type(self.mesh).__name__}: see `make_mesh`.")
        names = [getattr(self, role) for role in ROLES]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"One mesh axis cannot mean two things: {', '.join(twice)}.")
        unknown = [name for name in self.mesh.axis_names if name not in names]
        if unknown:
            raise ValueError(
                f"The mesh axis {unknown[0]!r} has no meaning: name axes {', '.join(ROLES)}, or say what it is, as in "
                f"`Parallelism(mesh, context={unknown[0]!r})`."
            )
        capacity = self.expert_capacity
        if capacity is not None and not (isinstance(capacity, int | float) and 0 < capacity < math.inf):
            raise ValueError(f"`expert_capacity` is a number above 0, such as 1.25, or None; got {capacity!r}.")
        if capacity is not None and self.size("expert") == 1:
            raise ValueError("`expert_capacity` is room for tokens sent over the axis expert, which this mesh lacks.")
        # left to the compiler where nothing is said: with explicit axes, every operation would need an annotation
        kinds = (AxisType.Auto,) * len(self.mesh.axis_names)
        object.__setattr__(self, "mesh", Mesh(self.mesh.devices, self.mesh.axis_names, axis_types=kinds))

    @property
    def axes(self) -> Axes:
        """The names of the axes that split anything."""
        names = {role: getattr(self, role) for role in ROLES if self.size(role) > 1}
        return Axes(**names, expert_capacity=self.expert_capacity)

    def size(self, role: str) -> int:
        """How many parts there are of what `role` splits."""
        return self.mesh.shape.get(getattr(self, role), 1)

    def check_tokens(self, rows: int, seq: int) -> None:
        """**Raises:** `ValueError` unless so many rows of so many tokens can be split evenly."""
        self._check("rows", rows, ("data", "fsdp", "expert"))
        self._check("tokens in a row", seq, ("context", "heads"))

    def _check(self, what: str, count: int, roles: tuple[str, ...]) -> None:
        parts = math.prod(self.size(role) for role in roles)
        if count % parts:
            axes = " * ".join(f"{role}={self.size(role)}" for role in roles if self.size(role) > 1)
            raise ValueError(
                f"{count} {what} cannot be split into {parts} equal parts ({axes}): make it a multiple of {parts}, "
                f"such as {-(-count // parts) * parts}, by padding with segment id 0, or use a smaller axis."
            )


def as_parallelism(mesh: "Parallelism | Mesh | str | Mapping[str, int] | None") -> Parallelism | None:
    """What was given as `mesh` in its full form; `None` stays `None`."""
    if mesh is None or isinstance(mesh, Parallelism):
        return mesh
    if isinstance(mesh, str | Mapping):
        mesh = make_mesh(mesh)
    if not isinstance(mesh, Mesh):
        raise TypeError(f"`mesh` is a mesh, a Parallelism or text such as 'fsdp=4'; got a {type(mesh).__name__}.")
    return Parallelism(mesh)


def make_mesh(sizes: str | Mapping[str, int], devices: Any = None) -> Mesh:
    """A mesh over all devices, from sizes such as `"fsdp=4,context=2"`; one of them may be -1, for the rest.

    Axes are laid out from `data`, the farthest, to `tensor`, the nearest devices.

    **Raises:** `ValueError` for unknown axes, sizes that are no numbers, and sizes that do not fit the devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    wanted = _parse(sizes) if isinstance(sizes, str) else dict(sizes)
    if not wanted:
        raise ValueError("The mesh names no axis: write `fsdp=4`, for example.")
    for role, size in wanted.items():
        if role not in ROLES:
            raise ValueError(f"There is no mesh axis {role!r}: the axes are {', '.join(ROLES)}.")
        if not isinstance(size, int | np.integer) or (size < 1 and size != -1):
            raise ValueError(f"The mesh axis {role} needs a size of at least 1, or -1 for the rest; got {size!r}.")
    open_axes = [role for role, size in wanted.items() if size == -1]
    if len(open_axes) > 1:
        raise ValueError(f"Only one mesh axis may have the size -1; got {', '.join(open_axes)}.")
    known = math.prod(size for size in wanted.values() if size != -1)
    if open_axes and len(devices) % known == 0:
        wanted[open_axes[0]] = len(devices) // known
    elif open_axes or known != len(devices):
        text = ",".join(f"{role}={size}" for role, size in wanted.items())
        raise ValueError(
            f"The mesh {text} takes {'a multiple of ' if open_axes else ''}{known} devices; there are {len(devices)} "
            f"({jax.default_backend()}). Choose sizes whose product is {len(devices)}."
        )
    names = tuple(role for role in ROLES if role in wanted)
    shape = tuple(int(wanted[name]) for name in names)
    if devices == jax.devices():
        return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))
    return Mesh(np.asarray(devices).reshape(shape), names)


def _parse(text: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        role, _, size = (word.strip() for word in part.partition("="))
        try:
            number = int(size)
        except ValueError:
            raise ValueError(f"A mesh is written as `fsdp=4,context=2`; {part!r} in {text!r} is not.") from None
        if role in sizes:
            raise ValueError(f"The mesh {text!r} names the axis {role} twice.")
        sizes[role] = number
    return sizes
