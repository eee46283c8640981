"""Files of torch.save: every kind of tensor, damage, and archives written here."""

import contextlib
import io
import random
import shutil
import zipfile
import zlib

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from megatron_cases import unpacked

from kimi_zoo.checkpoints.blocks import Blocks, Computed, join, stack, whole
from kimi_zoo.checkpoints.checksums import crc32_combine
from kimi_zoo.checkpoints.files import CheckpointError
from kimi_zoo.checkpoints.pickle_writing import write_pickle
from kimi_zoo.checkpoints.pickles import UnsafePickle
from kimi_zoo.checkpoints.safetensors import open_checkpoint
from kimi_zoo.checkpoints.torch_files import open_torch_file, plain
from kimi_zoo.checkpoints.torch_saving import write_archive
from kimi_zoo.checkpoints.torch_storage import DTYPES, StoredTensor


@pytest.mark.parametrize("file", ["zip.pt", "legacy.pt", "protocol4.pt", "nested.pt"])
def test_every_kind_of_tensor(file):
    """Dtypes, views of any strides, storages that several share, scalars, empty and repeated ones, parameters."""
    value = open_torch_file(unpacked() / "torch" / file).value
    value = value.get("model", value)
    expected = open_checkpoint(unpacked() / "torch" / "expected.safetensors")
    assert set(value) == {name for name in expected if file != "legacy.pt" or name in value}
    assert len(value) == (23 if file == "legacy.pt" else 31)
    for name, tensor in value.items():
        wanted = expected.read(name)
        assert (tensor.shape, tensor.dtype) == (wanted.shape, wanted.dtype), name
        assert tensor.array().tobytes() == wanted.tobytes(), name
        assert not tensor.array().flags.writeable


def rewritten(source, target, change):
    """A copy of a zip archive with other records: `change` takes name and content, gives content or None."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for info in old.infolist():
            content = change(info.filename, old.read(info))
            if content is not None:
                new.writestr(info.filename, content)
    return target


@pytest.fixture
def good():
    return unpacked() / "torch" / "zip.pt"


def read_all(path):
    for tensor in open_torch_file(path).tensors:
        tensor.array().tobytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda name, data: None if name.endswith("data/3") else data, r"the record data/3 is missing"),
        (lambda name, data: data[:-1] if name.endswith("data/2") else data, r"data/2\) has \d+ bytes; expected 12 el"),
        (lambda name, data: b"big" if name.endswith("byteorder") else data, "big-endian"),
        (lambda name, data: None if name.endswith("data.pkl") else data, "not one of torch.save"),
        (lambda name, data: data[:40] if name.endswith("data.pkl") else data, "not a complete pickle"),
        (lambda name, data: data.replace(b"BFloat16Storage", b"BFloat99Storage"), "BFloat99Storage, which is not read"),
        (lambda name, data: data.replace(b"torch._utils", b"torch._evils"), "names 'torch._evils._rebuild"),
    ],
)
def test_wrong_archives(good, tmp_path, change, message):
    with pytest.raises(CheckpointError, match=message):
        read_all(rewritten(good, tmp_path / "bad.pt", change))


def test_sizes_are_checked_against_the_storage(tmp_path):
    """A view that reaches beyond its storage would show other memory."""
    for shape, strides, offset, message in (
        ((4, 4), (4, 1), 0, "reaches element 15, but its storage has 12"),
        ((3, 4), (4, 1), 1, "reaches element 12"),
        ((2,), (2**40,), 0, "reaches element 1099511627776"),
        ((2**30, 2), (0, 1), 0, "repeats the 12 stored elements"),
        ((2,), (-1,), 1, "has shape"),
        ((2**60,), (0,), 0, "has shape"),
        ((2, 2), (1,), 0, "has shape"),
    ):
        path = tmp_path / "tensor.pt"
        with open(path, "wb") as file:
            write_archive(file, whole_of(np.zeros((3, 4), np.float32)), stream=lambda _, tensor: tensor.stream())
        said = _pickled(0) + _pickled((3, 4)) + _pickled((4, 1))
        lie = _pickled(offset) + _pickled(shape) + _pickled(strides)
        bad = rewritten(path, tmp_path / "bad.pt", lambda _, data, lie=lie, said=said: data.replace(said, lie))
        with pytest.raises(CheckpointError, match=message):
            read_all(bad)


def _pickled(value):
    return write_pickle(value)[2:-1]


def test_checksums_are_verified(good, tmp_path):
    data = bytearray(good.read_bytes())
    value = open_torch_file(good).value["float64"]
    data[value.storage.start + 5] ^= 1
    (tmp_path / "bad.pt").write_bytes(data)
    bad = open_torch_file(tmp_path / "bad.pt").value
    bad["int8"].array()
    with pytest.raises(CheckpointError, match=r"record zip/data/0\) is damaged: its checksum is"):
        bad["float64"].array()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"hello", "was not written by torch.save"),
        (b"PK\x03\x04" + b"\0" * 60, "zip directory cannot be read"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"x" * 257 + b"ustar" + b"\0" * 300, "before 2017"),
        (b"\x80\x02K\x05.", "not one of torch.save"),
    ],
)
def test_other_files(tmp_path, content, message):
    (tmp_path / "file.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        open_torch_file(tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_torch_file(tmp_path / "absent.pt")


def test_compressed_records_are_refused(good, tmp_path):
    with zipfile.ZipFile(good) as old, zipfile.ZipFile(tmp_path / "z.pt", "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    with pytest.raises(CheckpointError, match="is compressed"):
        open_torch_file(tmp_path / "z.pt")


@pytest.mark.parametrize("file", ["zip.pt", "legacy.pt"])
def test_random_damage(file, tmp_path):
    """Truncations, flipped bits and bytes: values that are still right (a byte that nothing depends on), or our error.

    A zip archive never gives wrong values, thanks to its checksums.
    """
    data = (unpacked() / "torch" / file).read_bytes()
    expected = {name: tensor.array().tobytes() for name, tensor in _tensors(unpacked() / "torch" / file)}
    draw, path = random.Random(5), tmp_path / "bad.pt"
    for turn in range(400):
        bad = bytearray(data)
        if turn % 3 == 0:
            del bad[draw.randrange(len(bad)) :]
        else:
            for _ in range(draw.randrange(1, 4)):
                bad[draw.randrange(len(bad))] ^= 1 << draw.randrange(8)
        path.write_bytes(bad)
        with contextlib.suppress(CheckpointError):
            for name, tensor in _tensors(path):
                values = tensor.array().tobytes()
                assert file == "legacy.pt" or values == expected.get(name, values)


def _tensors(path):
    value = open_torch_file(path).value
    found = value.items() if isinstance(value, dict) else ()
    return [(name, tensor) for name, tensor in found if isinstance(tensor, StoredTensor)]


def test_nothing_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for case in ("legacy_code_pickle", "common_code_pickle"):
        (path,) = (unpacked() / "malformed" / case).rglob("mp_rank_00/*.pt" if "legacy" in case else "common.pt")
        with pytest.raises(UnsafePickle, match=r"names 'io\.open'"):
            open_torch_file(path)
    assert list(tmp_path.iterdir()) == []


def whole_of(array):
    return whole(Computed(array.shape, array.dtype, lambda: array))


DTYPE = st.sampled_from([d for d in DTYPES.values() if d.kind in "iufb" or d == ml_dtypes.bfloat16])


@given(shapes=st.lists(arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5), min_size=1, max_size=4),
       dtype=DTYPE, seed=st.integers(0, 99))  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_archives_written_here_are_read(tmp_path_factory, shapes, dtype, seed):
    draw = np.random.default_rng(seed)
    values = [draw.integers(0, 2, shape).astype(dtype) for shape in shapes]
    path = tmp_path_factory.mktemp("archive") / "a.pt"
    tensors = {f"t{i}": whole_of(value) for i, value in enumerate(values)}
    with open(path, "wb") as file:
        file.write(b"before")
        length = write_archive(file, {"tensors": tensors, "n": 3}, stream=lambda _, tensor: tensor.stream())
        assert file.tell() == 6 + length
    path.write_bytes(path.read_bytes()[6:])
    found = open_torch_file(path)
    assert found.value["n"] == 3
    for i, value in enumerate(values):
        stored = found.value["tensors"][f"t{i}"]
        assert (stored.shape, stored.dtype) == (value.shape, value.dtype)
        assert stored.array().tobytes() == value.tobytes()
        assert stored.storage.start % 64 == 0


def test_large_records_take_the_zip64_form(tmp_path):
    """More than 4 GiB, of which only holes are stored."""
    size = (1 << 32) + 5
    path = tmp_path / "large.pt"

    class Holes(io.FileIO):
        def write(self, data):
            if len(data) > 1 << 20:
                self.seek(len(data), 1)
                return len(data)
            return super().write(data)

    part = np.zeros(1 << 26, np.uint8)

    def stream(_, tensor):
        left = tensor.nbytes
        while left:
            yield part[: min(left, part.size)]
            left -= min(left, part.size)

    tensor = whole_of(np.broadcast_to(np.zeros((), np.uint8), (size,)))
    with Holes(path, "w") as file:
        write_archive(file, tensor, stream=stream)
    stored = open_torch_file(path).value
    assert stored.shape == (size,) and stored.storage.size == size
    shutil.rmtree(tmp_path)


# blocks


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_blocks_are_what_numpy_does(data):
    """Joining, cutting, stacking, transposing and reshaping, against numpy; and the stream of bytes."""
    array = np.arange(data.draw(st.integers(1, 4)) * 6 * 4, dtype=np.int32).reshape(-1, 6, 4)
    blocks = whole_of(array)
    for _ in range(data.draw(st.integers(1, 6))):
        step = data.draw(st.sampled_from(["part", "join", "item", "stack", "transpose", "unit"]))
        axis = data.draw(st.integers(0, array.ndim - 1))
        if step == "part":
            start = data.draw(st.integers(0, array.shape[axis] - 1))
            stop = data.draw(st.integers(start + 1, array.shape[axis]))
            index = (slice(None),) * axis + (slice(start, stop),)
            array, blocks = array[index], blocks.part(axis, start, stop)
        elif step == "join":
            array, blocks = (
                np.concatenate([array, array + 1], axis),
                join([blocks, blocks.mapped(lambda a: a + 1)], axis),
            )
        elif step == "item" and array.ndim > 2:
            place = data.draw(st.integers(0, array.shape[axis] - 1))
            array, blocks = np.take(array, place, axis), blocks.item(axis, place)
        elif step == "stack" and array.ndim < 4:
            array, blocks = np.stack([array, array * 2]), stack([blocks, blocks.mapped(lambda a: a * 2)])
        elif step == "transpose" and array.ndim == 2:
            array, blocks = array.T, blocks.transposed()
        elif step == "unit" and array.ndim < 4:
            array, blocks = np.expand_dims(array, axis), blocks.reshaped((*array.shape[:axis], 1, *array.shape[axis:]))
    assert blocks.shape == array.shape
    np.testing.assert_array_equal(blocks.read(), array)
    assert b"".join(part.tobytes() for part in blocks.stream()) == array.tobytes()
    for got, want in zip(blocks.items(), array, strict=True):
        np.testing.assert_array_equal(got.read(), want)


def test_long_tensors_are_streamed_in_steps(monkeypatch):
    monkeypatch.setattr("kimi_zoo.checkpoints.blocks.STEP", 64)
    array = np.arange(7 * 30, dtype=np.int16).reshape(7, 30)
    pieces = {
        "rows": join([whole_of(array[:3]), whole_of(array[3:])], 0),
        "columns": join([whole_of(array[:, :11]), whole_of(array[:, 11:])], 1),
        "turned": whole_of(np.ascontiguousarray(array.T)).transposed(),
    }
    for name, blocks in pieces.items():
        parts = [part.copy() for part in blocks.stream()]
        assert b"".join(map(bytes, parts)) == array.tobytes(), name
        assert len(parts) >= 6 and max(part.nbytes for part in parts) <= 64


def test_pieces_that_do_not_fit():
    one, other = whole_of(np.zeros((2, 3), np.int8)), whole_of(np.zeros((2, 4), np.int8))
    with pytest.raises(ValueError, match="do not fit together"):
        join([one, other], 0)
    with pytest.raises(ValueError, match="in pieces cannot be taken as"):
        join([one, one], 0).reshaped((12,))
    assert isinstance(join([one], 0), Blocks)


def test_stand_ins_as_json():
    args = plain(open_torch_file(next((unpacked() / "legacy_gpt_ep2").rglob("*.pt"))).value["args"])
    assert args["params_dtype"] == "torch.bfloat16" and args["num_layers"] == 2
    assert args["attention_backend"].startswith("megatron.core.transformer.enums.AttnBackend(")


@given(first=st.binary(max_size=200), second=st.binary(max_size=200), zeros=st.integers(0, 1 << 20))
@settings(max_examples=60, deadline=None)
def test_checksums_of_parts_are_combined(first, second, zeros):
    second = second + b"\0" * zeros
    both = crc32_combine(zlib.crc32(first), zlib.crc32(second), len(second))
    assert both == zlib.crc32(first + second)
