"""What pickles may name, and what stands for it: plain values, inert objects, or a refusal."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, no_type_check  # of checks at run time, as the tests make them: all this is called very often

from kimi_zoo.checkpoints.files import CheckpointError


class UnsafePickle(CheckpointError):
    """A pickle that names something which is not known to be harmless."""


@no_type_check
@dataclass(frozen=True)
class Name:
    """A class, function or constant that a pickle names: never imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False)
class StandIn:
    """An object of a class that is not imported: its class, the arguments it was made with, its state and items."""

    kind: Name
    args: tuple
    state: Any = None
    items: Any = field(default_factory=list)

    @property
    def fields(self) -> dict[str, Any]:
        """Attributes by name; empty if the state is something else."""
        state = self.state
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):  # with __slots__
            state = {**(state[0] or {}), **state[1]} if isinstance(state[0], dict | None) else state[1]
        return state if isinstance(state, dict) else {}


Maker = Callable[..., Any]


def _encode(text: str, encoding: str = "latin1") -> bytes:
    if encoding not in ("latin1", "latin-1", "utf-8", "ascii"):
        raise ValueError(f"encoding {encoding[:20]!r}")
    return text.encode(encoding)


@no_type_check
def check_key(value: Any, depth: int = 8) -> Any:
    """The value, if hashing it is safe: Python follows tuples within tuples until its own stack overflows.

    **Raises:** `ValueError` otherwise.
    """
    if isinstance(value, tuple) and depth:
        for item in value:
            check_key(item, depth - 1)
    elif not isinstance(value, str | bytes | int | float | complex | Name | StandIn | None):
        raise ValueError(f"a {type(value).__name__} as a key")
    return value


def _pairs(*args: Any) -> dict:
    pairs = list(args[0].items() if isinstance(args[0], dict) else args[0]) if args else []
    return {check_key(key): value for key, value in pairs}


def _bytes(*args: Any) -> bytes:
    if args and isinstance(args[0], str):
        return _encode(*args[:2])
    if args and not isinstance(args[0], bytes | bytearray | list | tuple):  # a number would ask for that much memory
        raise ValueError("bytes of something else than bytes")
    return bytes(*args)


def _collection(kind: type) -> Maker:
    def make(items: Any = ()) -> Any:
        if not isinstance(items, list | tuple | set | frozenset | dict):
            raise ValueError(f"{kind.__name__} of a {type(items).__name__}")
        return kind(map(check_key, items)) if kind in (set, frozenset) else kind(items)

    return make


PLAIN: dict[str, Maker] = {
    "collections.OrderedDict": _pairs,
    "builtins.dict": _pairs,
    "__builtin__.dict": _pairs,
    "collections.defaultdict": lambda *_factory: {},
    "_codecs.encode": _encode,
    "torch.Size": lambda items=(): tuple(items),
    **{f"{module}.bytes": _bytes for module in ("builtins", "__builtin__")},
    **{f"{module}.bytearray": _bytes for module in ("builtins", "__builtin__")},
    **{
        f"{module}.{kind.__name__}": _collection(kind)
        for module in ("builtins", "__builtin__")
        for kind in (set, frozenset, list, tuple)
    },
}
"""What becomes a plain value."""

TORCH_DTYPES = (
    "float64 double float32 float float16 half bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz "
    "float8_e8m0fnu float4_e2m1fn_x2 complex32 complex64 complex128 int64 long int32 int int16 short int8 uint64 "
    "uint32 uint16 uint8 bool"
).split()

# packages whose classes are stood in for
PACKAGES = frozenset(
    "argparse collections datetime decimal enum io _io pathlib numpy torch megatron transformer_engine apex nemo "
    "modelopt omegaconf transformers".split()
)
# classes and functions beside them
HARMLESS = frozenset(
    """
    builtins.complex builtins.slice builtins.range builtins.object __builtin__.complex __builtin__.object
    copyreg._reconstructor copy_reg._reconstructor types.SimpleNamespace fractions.Fraction uuid.UUID
    datetime.datetime datetime.date datetime.timedelta datetime.timezone functools.partial
    numpy.dtype numpy.ndarray numpy.core.multiarray._reconstruct numpy._core.multiarray._reconstruct
    numpy.core.multiarray.scalar numpy._core.multiarray.scalar numpy._core.numeric._frombuffer
    torch.device torch.serialization._get_layout
    """.split()
) | {f"torch.{name}" for name in TORCH_DTYPES}


@no_type_check
def check_name(module: str, name: str, where: str) -> Name:
    """A `Name` if it is harmless to stand in for it.

    **Raises:** `UnsafePickle` otherwise.
    """
    full = f"{module}.{name}"
    known = full in PLAIN or full in HARMLESS
    package, last = module.split(".")[0], name.split(".")[-1].lstrip("_")
    if not known and package in PACKAGES:
        rebuild = module in ("torch._utils", "torch._tensor") and name.startswith("_rebuild_")
        known = last[:1].isupper() or rebuild
    if not known:
        raise UnsafePickle(
            f"{where} is a pickle that names {full[:200]!r}, which is not a tensor, a plain container or a class known "
            "to be harmless. Nothing of it was run. Do not load this file with other programs."
        )
    return Name(module, name)
