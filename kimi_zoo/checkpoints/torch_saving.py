"""Writes what `torch.save` would, without torch: archives that `torch.load` reads, with tensors streamed into them."""

import math
import zipfile
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, cast, no_type_check

import numpy as np

from kimi_zoo.checkpoints.blocks import Blocks
from kimi_zoo.checkpoints.pickle_writing import Made, Outside, write_pickle
from kimi_zoo.checkpoints.pickles import Name
from kimi_zoo.checkpoints.torch_storage import DTYPES, STORAGES

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_TYPED = {DTYPES[name]: kind for kind, name in STORAGES.items() if kind != "UntypedStorage"}
ALIGNMENT = 64
LARGE = 1 << 31

Stream = Callable[[str, Blocks], Iterator[np.ndarray]]


def torch_dtype(dtype: np.dtype) -> Name:
    """torch's dtype."""
    return Name("torch", DTYPE_NAMES[dtype])


def size(shape: tuple[int, ...]) -> Made:
    """A `torch.Size`."""
    return Made(Name("torch", "Size"), (tuple(shape),))


def write_archive(
    file: BinaryIO, value: Any, *, stream: Stream, names: dict[int, str] | None = None, root: str = "archive"
) -> int:
    """Writes an archive of `torch.save` at the end of a seekable file. **Returns:** its length in bytes.

    **Arguments:**

    - `value`: what is saved: plain containers with `Blocks` as tensors.
    - `stream`: gives the bytes of a tensor in order; its first argument is the tensor's name, from `names` (by `id`).
    - `root`: the name that torch gives to the folder within the archive.
    """
    tensors: list[Blocks] = []

    @no_type_check
    def replace(item: Any) -> Any:
        if not isinstance(item, Blocks):
            return item
        tensors.append(item)
        return _tensor(item, str(len(tensors) - 1))

    pickled = write_pickle(value, replace)
    window = _Window(file)
    with zipfile.ZipFile(cast(BinaryIO, window), "w", zipfile.ZIP_STORED) as archive:
        _record(archive, window, f"{root}/data.pkl", len(pickled), [pickled])
        _record(archive, window, f"{root}/byteorder", 6, [b"little"])
        for number, tensor in enumerate(tensors):
            parts = stream((names or {}).get(id(tensor), ""), tensor)
            _record(archive, window, f"{root}/data/{number}", tensor.nbytes, parts)
        _record(archive, window, f"{root}/version", 2, [b"3\n"])
    return window.end


def _tensor(tensor: Blocks, key: str) -> Made:
    elements = math.prod(tensor.shape)
    strides = tuple(math.prod(tensor.shape[axis + 1 :]) for axis in range(len(tensor.shape)))
    hooks = Made(Name("collections", "OrderedDict"))
    kind = _TYPED.get(tensor.dtype)
    if kind is not None:
        storage = Outside(("storage", Name("torch", kind), key, "cpu", elements))
        return Made(Name("torch._utils", "_rebuild_tensor_v2"), (storage, 0, tensor.shape, strides, False, hooks))
    storage = Outside(("storage", Name("torch.storage", "UntypedStorage"), key, "cpu", tensor.nbytes))
    rest = (False, hooks, torch_dtype(tensor.dtype))
    return Made(Name("torch._utils", "_rebuild_tensor_v3"), (storage, 0, tensor.shape, strides, *rest))


def _record(archive: zipfile.ZipFile, window: "_Window", name: str, nbytes: int, parts: Any) -> None:
    info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
    large = nbytes >= LARGE
    begin = window.tell() + 30 + len(name.encode()) + 4 + (20 if large else 0)
    padding = -begin % ALIGNMENT
    info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding  # so that the bytes can be mapped
    with archive.open(info, "w", force_zip64=large) as record:
        for part in parts:
            record.write(part)


@no_type_check
class _Window:
    """The end of a file as a file of its own."""

    def __init__(self, file: BinaryIO):
        self._file, self._start, self.end = file, file.tell(), 0

    def write(self, data: Any) -> int:
        written = self._file.write(data)
        self.end = max(self.end, self.tell())
        return written

    def tell(self) -> int:
        return self._file.tell() - self._start

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence == 0:
            self._file.seek(self._start + offset)
        else:
            self._file.seek(offset, whence)
        return self.tell()

    def seekable(self) -> bool:
        return True

    def flush(self) -> None:
        self._file.flush()
