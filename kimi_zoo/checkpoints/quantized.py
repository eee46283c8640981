"""Checkpoints stored in 8 or 4 bits, presented as plain tensors: `dequantize` gives each weight under its plain name.

| format | weight `X.weight` is stored as | its scale | value |
|---|---|---|---|
| fp8 | `X.weight`, float8 | `X.weight_scale_inv` or `X.weight_scale`, per block, row or tensor | `weight * scale` |
| mxfp4 | `X.weight_packed`, two E2M1 a byte | `X.weight_scale`, a byte per 32 columns | `weight * 2**(scale - 127)` |
| int4 | `X.weight_packed`, eight an int32; `X.weight_shape` | `X.weight_scale` per group | `(weight - 8) * scale` |

In both packed formats the low half of a byte is the even column. Dequantisation comes before anything that splits,
transposes or reorders a weight, because scales belong to positions in the stored matrix.

**Source:** `quantization_config` of the published DeepSeek-V3 (fp8), Kimi-K3 (mxfp4) and Kimi-K2-Thinking (int4)
checkpoints; the compressed-tensors formats `float-quantized`, `mxfp4-pack-quantized` and `pack-quantized`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, override

import ml_dtypes
import numpy as np

from kimi_zoo.checkpoints.files import CheckpointError, aligned_empty, join_problems
from kimi_zoo.checkpoints.safetensors import AbstractCheckpoint, check_copy

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
FP8 = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2))
CHUNK = 2**21  # values dequantised at a time, which bounds the float32 intermediates

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_BYTES = np.arange(256, dtype=np.uint8)
_NIBBLES = np.stack([_BYTES & 15, _BYTES >> 4], axis=1)  # low half first
# The two float32 values of each byte, as one item of 8 bytes: a look-up of those is seven times as fast.
FP4_PAIRS = np.concatenate([_E2M1, -_E2M1])[_NIBBLES].view(np.uint64)[:, 0]
INT4_PAIRS = (_NIBBLES.astype(np.float32) - 8).view(np.uint64)[:, 0]


def dequantize_fp8(
    weight: np.ndarray, scale: np.ndarray, block: tuple[int, int] | None, dtype: np.dtype = BFLOAT16
) -> np.ndarray:
    """Returns `weight * scale`, computed in float32 and rounded once to `dtype`.

    **Arguments:**

    - `weight`: float8, `[..., rows, columns]`.
    - `scale`: with a `block`, one value per block of that many rows and columns, the last ones cut off by the matrix's
        edge: `[..., ceil(rows / block[0]), ceil(columns / block[1])]`. Without, one value in all or one per row.

    **Raises:** `CheckpointError` if `scale` has another shape or holds a value that is not finite.
    """
    values = _BYTES.view(weight.dtype).astype(np.float32)
    return _dequantize(weight.view(np.uint8), values, weight.shape, scale, block, dtype)


def dequantize_mxfp4(packed: np.ndarray, scale: np.ndarray, dtype: np.dtype = BFLOAT16) -> np.ndarray:
    """Returns the `[..., rows, columns]` matrix of `packed` (uint8, `[..., rows, columns / 2]`) in `dtype`.

    `scale`: uint8 or float8_e8m0fnu, `[..., rows, ceil(columns / 32)]`: the byte `b` stands for `2**(b - 127)`.

    **Raises:** `CheckpointError` if `scale` has another shape or holds 255, which stands for NaN.
    """
    shape = (*packed.shape[:-1], 2 * packed.shape[-1])
    exponents = scale.view(E8M0) if scale.dtype == np.uint8 else scale
    return _dequantize(packed, FP4_PAIRS, shape, exponents, (1, 32), dtype)


def dequantize_int4(
    packed: np.ndarray, scale: np.ndarray, columns: int, group: int | None, dtype: np.dtype = BFLOAT16
) -> np.ndarray:
    """Returns the `[..., rows, columns]` matrix of `packed` (int32, `[..., rows, ceil(columns / 8)]`) in `dtype`.

    Column `8 * i + j` is bits `4 * j` to `4 * j + 3` of word `i`, minus 8. `scale` has one value per `group` columns,
    `[..., rows, ceil(columns / group)]`, or without `group` one per row or one in all.

    **Raises:** `CheckpointError` if `scale` has another shape or holds a value that is not finite.
    """
    shape = (*packed.shape[:-1], columns)
    block = None if group is None else (1, group)
    return _dequantize(packed.view(np.uint8), INT4_PAIRS, shape, scale, block, dtype)


def _dequantize(
    stored: np.ndarray,
    values_of_byte: np.ndarray,
    shape: tuple[int, ...],
    scale: np.ndarray,
    block: tuple[int, int] | None,
    dtype: np.dtype,
) -> np.ndarray:
    scale, (block_rows, block_columns) = _match_scale(shape, scale, block)
    rows, columns = shape[-2:]
    out = aligned_empty(shape, dtype)
    step = max(1, CHUNK // max(columns, 1))
    for matrix in np.ndindex(shape[:-2]):
        for start in range(0, rows, step):
            part = slice(start, min(start + step, rows))
            values = values_of_byte[stored[matrix][part]].view(np.float32)[
                :, :columns
            ]  # the last int32 may be partly unused
            row_scales = scale[matrix][np.arange(part.start, part.stop) // block_rows]
            out[matrix][part] = values * np.repeat(row_scales, block_columns, axis=1)[:, :columns]
    return out


def _match_scale(
    shape: tuple[int, ...], scale: np.ndarray, block: tuple[int, int] | None
) -> tuple[np.ndarray, tuple[int, int]]:
    """Returns the scale in float32, one value per block of each matrix, and the block's size."""
    *leading, rows, columns = shape
    if block is not None:
        expected = (*leading, -(-rows // block[0]), -(-columns // block[1]))
        accepted = scale.shape == expected
    elif scale.size == 1:
        expected, block, accepted = (*leading, 1, 1), (max(rows, 1), max(columns, 1)), True
        scale = np.broadcast_to(scale.reshape(()), expected)
    else:
        expected, block = (*leading, rows, 1), (1, max(columns, 1))
        accepted = scale.shape in (expected, expected[:-1])
    if not accepted:
        raise CheckpointError(
            f"A weight of shape {shape} in blocks of {block} needs a scale of shape {expected}; got {scale.shape}."
        )
    scale = scale.reshape(expected).astype(np.float32)
    if not np.isfinite(scale).all():
        raise CheckpointError(f"A scale holds {scale[~np.isfinite(scale)][0]}; every scale must be finite.")
    return scale, block


@dataclass(frozen=True)
class _Scheme:
    """What `quantization_config` says: the format; the rows and columns that share a scale, None if a row or all do."""

    format: str
    block: tuple[int, int] | None


@dataclass(frozen=True)
class _Recipe:
    """How one weight comes about: `decode(*arrays of those names, dtype=...)`."""

    sources: tuple[str, ...]
    shape: tuple[int, ...]
    decode: Callable[..., np.ndarray]


class DequantizedCheckpoint(AbstractCheckpoint):
    """A checkpoint whose quantised weights appear dequantised under their plain names; made by `dequantize`.

    In `tensors`, a dequantised weight has the dtype, shape and byte count that `read` gives, and the file and offset of
    what is stored. It is computed anew at each `read`; any other tensor is a read-only view of its file.
    """

    def __init__(
        self, checkpoint: AbstractCheckpoint, recipes: Mapping[str, _Recipe], hidden: set[str], dtype: np.dtype
    ):
        self._checkpoint = checkpoint
        self._recipes = recipes
        self._dtype = dtype
        self.files = checkpoint.files
        self.metadata = checkpoint.metadata
        self.tensors = {}
        plain_names = {recipe.sources[0]: name for name, recipe in recipes.items()}
        for stored, info in checkpoint.tensors.items():
            if stored in plain_names:
                name = plain_names[stored]
                shape = recipes[name].shape
                nbytes = math.prod(shape) * dtype.itemsize
                self.tensors[name] = replace(info, name=name, dtype=dtype, shape=shape, nbytes=nbytes)
            elif stored not in hidden:
                self.tensors[stored] = info

    @override
    def read(self, name: str) -> np.ndarray:
        if name in self._recipes:
            return self._decode(name, self._dtype)
        return self._checkpoint.read(self.tensors[name].name)

    def read_into(self, name: str, out: np.ndarray) -> None:
        """Copies a tensor into `out`; a quantised weight is rounded once, to the dtype of `out`.

        **Raises:** `ValueError` if `out` has another shape, or if dtypes differ and are not both floating-point.
        """
        check_copy(self.tensors[name], out)
        if name in self._recipes:
            out[...] = self._decode(name, out.dtype)
        else:
            self._checkpoint.read_into(name, out)

    @override
    def release(self, name: str) -> None:
        for source in self._recipes[name].sources if name in self._recipes else (name,):
            self._checkpoint.release(source)

    @override
    def close(self) -> None:
        self._checkpoint.close()

    def _decode(self, name: str, dtype: np.dtype) -> np.ndarray:
        recipe = self._recipes[name]
        try:
            value = recipe.decode(*(self._checkpoint.read(source) for source in recipe.sources), dtype=dtype)
        except CheckpointError as error:
            raise CheckpointError(f"{recipe.sources[0]!r} and {recipe.sources[1]!r}: {error}") from None
        self.release(name)
        return value


def dequantize(
    checkpoint: AbstractCheckpoint, config: Mapping[str, Any], *, dtype: np.dtype = BFLOAT16
) -> AbstractCheckpoint:
    """Returns a view of `checkpoint` with plain weights; the checkpoint itself if it is not quantised.

    **Arguments:**

    - `config`: the content of `config.json`, whose `quantization_config` (also within `text_config`) says how.
    - `dtype`: what `read` gives for the weights that are stored quantised.

    **Raises:** `CheckpointError` naming the method or format if it is not one of this module's table; naming the
    tensors if a quantised one has no scale or a scale has no quantised tensor; if tensors are quantised and `config`
    does not say so.
    """
    scheme = _read_scheme(config)
    recipes, hidden, problems = {}, set(), []
    for name, info in checkpoint.tensors.items():
        if not (name.endswith(".weight_packed") or info.dtype in FP8):
            continue
        if scheme is None:
            problems.append(f"{name!r} is quantised, but the config has no quantization_config that says how.")
            continue
        try:
            plain, recipe = _plan(checkpoint, name, scheme)
        except CheckpointError as error:
            problems.append(str(error))
        else:
            recipes[plain] = recipe
            stem = plain.removesuffix("weight")  # activation scales have no meaning in a model that does not quantise
            hidden |= {*recipe.sources, plain + "_shape", stem + "input_scale", stem + "input_global_scale"}
    for name in checkpoint.tensors:
        if name.endswith(("weight_scale", "_scale_inv")) and name not in hidden and not problems:
            problems.append(f"{name!r} is a scale, but there is no quantised tensor that it belongs to.")
    if problems:
        raise CheckpointError(join_problems(problems))
    return DequantizedCheckpoint(checkpoint, recipes, hidden, np.dtype(dtype)) if recipes else checkpoint


def _plan(checkpoint: AbstractCheckpoint, stored: str, scheme: _Scheme) -> tuple[str, _Recipe]:
    plain = stored.removesuffix("_packed")
    scales = [name for name in (plain + "_scale_inv", plain + "_scale") if name in checkpoint.tensors]
    if len(scales) != 1:
        found = f"has both {scales[0]!r} and {scales[1]!r}" if scales else f"has no scale {plain + '_scale'!r}"
        raise CheckpointError(f"{stored!r} is quantised and {found}; exactly one is needed. Is a file missing?")
    info, sources = checkpoint.tensors[stored], (stored, scales[0])
    if len(info.shape) < 2:
        raise CheckpointError(f"{stored!r} has shape {info.shape}; quantised weights are matrices.")
    if info.dtype in FP8 and scheme.format == "fp8":
        return plain, _Recipe(sources, info.shape, partial(dequantize_fp8, block=scheme.block))
    if info.dtype == np.uint8 and scheme.format == "mxfp4":
        return plain, _Recipe(sources, (*info.shape[:-1], 2 * info.shape[-1]), dequantize_mxfp4)
    if info.dtype == np.int32 and scheme.format == "int4":
        columns = _columns(checkpoint, stored, plain)
        group = None if scheme.block is None else scheme.block[1]
        decode = partial(dequantize_int4, columns=columns, group=group)
        return plain, _Recipe(sources, (*info.shape[:-1], columns), decode)
    raise CheckpointError(f"{stored!r} is {info.dtype}, which does not fit the config's format, {scheme.format}.")


def _columns(checkpoint: AbstractCheckpoint, stored: str, plain: str) -> int:
    for unsupported in (plain + "_zero_point", plain + "_g_idx"):
        if unsupported in checkpoint.tensors:
            raise CheckpointError(
                f"{stored!r} comes with {unsupported!r}; only symmetric, ordered groups are supported."
            )
    packed = checkpoint.tensors[stored].shape
    if plain + "_shape" not in checkpoint.tensors:
        raise CheckpointError(f"{stored!r} is packed and has no {plain + '_shape'!r} that gives its number of columns.")
    shape = tuple(int(size) for size in checkpoint.read(plain + "_shape").reshape(-1))
    if shape[:-1] != packed[:-1] or not shape or -(-shape[-1] // 8) != packed[-1]:
        raise CheckpointError(f"{plain + '_shape'!r} says {shape}, which does not fit {stored!r} of shape {packed}.")
    return shape[-1]


def _read_scheme(config: Mapping[str, Any]) -> _Scheme | None:
    text_config = config.get("text_config") or {}
    quantization = config.get("quantization_config") or text_config.get("quantization_config")
    if not quantization:
        return None
    if not isinstance(quantization, dict):
        raise CheckpointError(f"quantization_config must be an object; got {quantization!r}.")
    method = quantization.get("quant_method")
    if method == "fp8" and quantization.get("fmt", "e4m3") == "e4m3":
        return _Scheme("fp8", _pair(quantization.get("weight_block_size"), "weight_block_size"))
    if method != "compressed-tensors":
        raise CheckpointError(
            f"quantization_config: quant_method {method!r} with fmt {quantization.get('fmt')!r} is not supported; "
            "supported are 'fp8' (fmt 'e4m3') and 'compressed-tensors'. Use a checkpoint in bfloat16 or one of these."
        )
    groups = list((quantization.get("config_groups") or {}).values())
    schemes = {_read_group(group, group.get("format") or quantization.get("format")) for group in groups}
    if len(schemes) != 1:
        raise CheckpointError(
            f"quantization_config: one way of quantising weights is supported; config_groups has {len(schemes)}."
        )
    return schemes.pop()


def _read_group(group: Mapping[str, Any], format: str | None) -> _Scheme:
    weights = group.get("weights") or {}
    kind, bits, size = weights.get("type"), weights.get("num_bits"), weights.get("group_size")
    symmetric = weights.get("symmetric", True)
    if format == "mxfp4-pack-quantized" and (kind, bits, size) == ("float", 4, 32):
        return _Scheme("mxfp4", (1, 32))
    if format == "pack-quantized" and (kind, bits, symmetric) == ("int", 4, True):
        return _Scheme("int4", (1, size) if size and size > 0 else None)
    if format in ("float-quantized", "naive-quantized") and (kind, bits) == ("float", 8) and not size:
        return _Scheme("fp8", _pair(weights.get("block_structure"), "block_structure"))
    raise CheckpointError(
        f"quantization_config: format {format!r} with {bits}-bit {kind} weights, group_size {size}, symmetric "
        f"{symmetric} is not supported; supported are float-quantized (8-bit float by block, row or tensor), "
        "mxfp4-pack-quantized (groups of 32) and pack-quantized (4-bit int, symmetric)."
    )


def _pair(value: Any, field: str) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(size) is int and size > 0 for size in value):
        raise CheckpointError(f"quantization_config: {field} must be two sizes, rows and columns; got {value!r}.")
    return value[0], value[1]
