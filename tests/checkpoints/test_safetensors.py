import json
import os
import struct
import subprocess
import sys
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_zoo.checkpoints.safetensors import (
    CheckpointError,
    LazyTensor,
    aligned_empty,
    open_checkpoint,
    read_json,
    save_tensors,
)
from kimi_zoo.checkpoints.safetensors_header import DTYPES

CASES = (
    Path(__file__).parent.parent / "data" / "field_cases"
)  # small inputs modelled on what users of comparable software reported


def random_tensors(seed=0):
    """One tensor per dtype the format knows, sizes different, plus a scalar and an empty one."""
    rng = np.random.default_rng(seed)
    tensors = {"scalar": np.array(3.5, np.float32), "empty": np.zeros((0, 3), np.float16)}
    for size, (name, dtype) in enumerate(DTYPES.items(), start=1):
        raw = rng.integers(0, 2 if name == "BOOL" else 256, (size, 3 * dtype.itemsize), dtype=np.uint8)
        tensors[f"layer.{size}.é {name}"] = raw.view(dtype)
    return tensors


def assert_same(checkpoint, tensors):
    assert set(checkpoint) == set(tensors)
    for name, expected in tensors.items():
        actual, expected = checkpoint.read(name), np.asarray(expected)
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), name
        assert actual.tobytes() == expected.tobytes(), name  # bytes: NaNs count as well


def write_raw(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


class TestWhatUsersHave:
    """Small folders modelled on public reports: what loads, and what the errors say."""

    def test_single_file_without_index(self):
        checkpoint = open_checkpoint(CASES / "single_no_index")
        embedding, norm = (checkpoint.read(f"model.{name}.weight") for name in ("embed_tokens", "norm"))
        np.testing.assert_array_equal(embedding, np.arange(6, dtype=np.float32).reshape(3, 2))
        np.testing.assert_array_equal(norm, np.array([1, 2], ml_dtypes.bfloat16))
        assert norm.dtype == ml_dtypes.bfloat16
        assert checkpoint.metadata == {"format": "pt"}
        assert checkpoint.total_bytes == 6 * 4 + 2 * 2
        assert checkpoint.files == (CASES / "single_no_index" / "model.safetensors",)

    def test_file_names_come_from_the_index(self):
        checkpoint = open_checkpoint(CASES / "index_odd_shard_names")
        np.testing.assert_array_equal(checkpoint.read("model.embed_tokens.weight").reshape(-1), np.arange(6))
        np.testing.assert_array_equal(checkpoint.read("model.norm.weight"), [0, 1])

    def test_files_outside_the_index_are_not_read(self):
        checkpoint = open_checkpoint(CASES / "stray_extra_file")
        np.testing.assert_array_equal(checkpoint.read("model.norm.weight"), [1, 2])
        assert [file.name for file in checkpoint.files] == ["model-00001-of-00001.safetensors"]

    @pytest.mark.parametrize(
        ("case", "message"),
        [
            ("index_missing_shard", r"1 of 2 weight files are missing: model-00002-of-00002\.safetensors.*unfinished"),
            ("st_lfs_pointer", r"model\.safetensors is a Git LFS pointer.* of 4,976,698,672 bytes, not the weights"),
            ("st_truncated", r"model\.safetensors is cut off: .* need 32 data bytes, but only 20 are present"),
            ("st_overlap", r"0\.self_attn\.k_proj\.weight' and '.*0\.self_attn\.v_proj\.weight' share 16 bytes"),
            ("index_no_weight_map", r"model\.safetensors\.index\.json has no weight_map"),
            ("kda_shapes", r"no index that says which belong together: variant_a\.safetensors, variant_b\.safetensors"),
        ],
    )
    def test_error(self, case, message):
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(CASES / case)

    @pytest.mark.parametrize("name", ["variant_a", "variant_b"])
    def test_a_file_can_be_named(self, name):
        assert len(open_checkpoint(CASES / "kda_shapes" / f"{name}.safetensors")) > 0


class TestFolders:
    def test_complete_numbered_set_needs_no_index(self, tmp_path):
        tensors = {"a": np.zeros(3, np.float32), "b": np.ones(5, np.float32)}
        save_tensors(tensors, tmp_path, max_shard_size=16)
        (tmp_path / "model.safetensors.index.json").unlink()
        assert_same(open_checkpoint(tmp_path), tensors)
        (tmp_path / "model-00001-of-00002.safetensors").unlink()
        with pytest.raises(CheckpointError, match=r"1 of 2 .* missing: model-00001-of-00002\.safetensors"):
            open_checkpoint(tmp_path)

    def test_no_weights(self, tmp_path):
        (tmp_path / "pytorch_model.bin").touch()
        with pytest.raises(CheckpointError, match=r"holds no weights.*It holds pytorch_model\.bin"):
            open_checkpoint(tmp_path)

    def test_no_such_path(self, tmp_path):
        with pytest.raises(CheckpointError, match="nowhere does not exist"):
            open_checkpoint(tmp_path / "nowhere")

    def test_several_indexes(self, tmp_path):
        for name in ("a", "b"):
            (tmp_path / f"{name}.safetensors.index.json").touch()
        with pytest.raises(CheckpointError, match=r"several indexes: a\.safetensors\.index\.json, b\."):
            open_checkpoint(tmp_path)

    @pytest.mark.parametrize("file", ["../other/model.safetensors", "/model.safetensors", "model.bin", 5, ["x"]])
    def test_index_stays_in_its_folder(self, tmp_path, file):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": file}}))
        with pytest.raises(
            CheckpointError, match=r"weight_map places 'w' in .*expected the name of a \.safetensors file"
        ):
            open_checkpoint(tmp_path)

    def test_every_problem_is_listed(self, tmp_path):
        weight_map = {}
        for number in range(30):
            name = f"part-{number:02}.safetensors"
            (tmp_path / name).write_bytes(b"nothing")
            weight_map[f"w{number}"] = name
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointError) as error:
            open_checkpoint(tmp_path)
        lines = str(error.value).splitlines()
        assert len(lines) == 21
        assert all(f"part-{number:02}.safetensors is not a safetensors file" in lines[number] for number in range(20))
        assert lines[20] == "... and 10 more"

    def test_index_and_files_disagree(self, tmp_path):
        save_tensors({"a": np.zeros(2, np.float32)}, tmp_path / "x.safetensors")
        save_tensors({"b": np.zeros(2, np.float32)}, tmp_path / "y.safetensors")
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {"a": "x.safetensors", "b": "x.safetensors", "c": "y.safetensors"}}))
        with pytest.raises(CheckpointError, match=r"'b' in x\.safetensors.*no such tensor.\n.*'c' in y\.safetensors"):
            open_checkpoint(tmp_path)

    def test_tensor_in_two_files(self, tmp_path):
        for name in ("x", "y"):
            save_tensors({"a": np.zeros(2, np.float32)}, tmp_path / f"{name}.safetensors")
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}))
        with pytest.raises(CheckpointError, match=r"'a' is stored twice, in .*x\.safetensors and in .*y\.safetensors"):
            open_checkpoint(tmp_path)


class TestHeaders:
    @pytest.mark.parametrize(
        ("header", "size", "message"),
        [
            ({"w": entry(dtype="F31")}, 8, "'w' has dtype 'F31'; known ones are U64"),
            ({"w": entry(dtype=7)}, 8, "'w' has dtype '7'"),
            ({"w": entry(shape=(3,))}, 8, r"'w' is F32 \[3\], 12 bytes, but is given 8 bytes"),
            ({"w": entry(shape=(-2,))}, 8, r"'w' has shape \[-2\]; expected a list of up to 32 sizes"),
            ({"w": entry(shape=(2.0,))}, 8, r"'w' has shape \[2\.0\]"),
            ({"w": entry(shape=(True, 2))}, 8, r"'w' has shape \[True, 2\]"),
            ({"w": entry(shape=(float("nan"),))}, 8, r"'w' has shape \[nan\]"),
            ({"w": entry(shape=(1,) * 33)}, 8, r"'w' has shape \[1, 1"),
            ({"w": entry(shape=(0, 2**62, 4), offsets=(0, 0))}, 0, r"'w' has shape \[0, 4611"),
            ({"w": entry(offsets=(float("inf"), 8))}, 8, r"'w' has data_offsets \[inf, 8\]"),
            ({"w": entry(offsets=(-8, 0))}, 8, r"'w' has data_offsets \[-8, 0\]"),
            ({"w": entry(offsets=(0, 4, 8))}, 8, r"'w' has data_offsets \[0, 4, 8\]"),
            ({"w": {"dtype": "F32", "shape": [2]}}, 8, "'w' needs dtype, shape and data_offsets"),
            ({"w": 3}, 8, "'w' needs dtype, shape and data_offsets in the header; got 3"),
            ({"w": entry(offsets=(4, 12))}, 12, "4 bytes between 'the header' and 'w' have no owner"),
            ({"w": entry(), "v": entry(offsets=(12, 20))}, 20, "4 bytes between 'w' and 'v' have no owner"),
            ({"w": entry(), "v": entry(offsets=(4, 12))}, 12, "'w' and 'v' share 4 bytes"),
            ({"w": entry()}, 9, "need 8 data bytes, but 9 are present; the surplus has no owner"),
            ({"w": entry()}, 7, "need 8 data bytes, but only 7 are present"),
            ({"__metadata__": {"step": 3}, "w": entry()}, 8, "__metadata__ must map text to text; got {'step': 3}"),
            (b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "w": {}}', 8, "the key 'w' appears twice"),
            (b'{"w": {"dtype": "F32"', 8, "The header of .*model.safetensors is not valid JSON: line 1, column 22"),
            (b'{"w": "\xff"}', 8, "its header is not UTF-8 text"),
            (b'{"w": ' + b"[" * 100_000, 8, "The header of .*model.safetensors is not usable JSON"),
            (b'{"w": ' + b"1" * 5000 + b"}", 8, "The header of .*model.safetensors is not usable JSON"),
        ],
    )
    def test_refused(self, tmp_path, header, size, message):
        write_raw(tmp_path / "model.safetensors", header, bytes(size))
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(tmp_path)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", r"it begins with b''.*it has 0 bytes"),
            (b"\x02\0\0", "it has 3 bytes"),
            (b"PK\x03\x04" + bytes(60), r"is not a safetensors file: it begins with b'PK"),
            (b"<!DOCTYPE html><html>not found", "is not a safetensors file: it begins with b'<!DOCTYPE"),
            ((2**40).to_bytes(8, "little") + b"{}", "is not a safetensors file"),
            ((10).to_bytes(8, "little") + b"{}", "is cut off within its header, which needs 10 bytes and has 2"),
        ],
    )
    def test_not_safetensors(self, tmp_path, content, message):
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(tmp_path)

    def test_accepted(self, tmp_path):
        """What the format allows although nobody writes it: odd alignment, empty tensors, null metadata, no tensors."""
        header = b'{"__metadata__": null, "e": {"dtype": "I64", "shape": [4, 0], "data_offsets": [6, 6]},'
        header += b'"w": {"dtype": "F16", "shape": [3], "data_offsets": [0, 6]}}  '
        values = np.array([1, 2, 3], np.float16)
        checkpoint = open_checkpoint(write_raw(tmp_path / "odd.safetensors", header, values.tobytes()))
        assert_same(checkpoint, {"w": values, "e": np.zeros((4, 0), np.int64)})
        assert len(open_checkpoint(write_raw(tmp_path / "none.safetensors", b"{}"))) == 0

    @settings(max_examples=300, deadline=None)
    @given(data=st.data())
    def test_damaged_file_loads_or_is_refused(self, tmp_path_factory, data):
        path = tmp_path_factory.mktemp("fuzz") / "model.safetensors"
        tensors = {"a": np.arange(3, dtype=np.float32), "b": np.arange(8, dtype=np.int16).reshape(2, 4)}
        content = bytearray(safetensors.numpy.save(tensors))
        for position in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=4)):
            content[position] = data.draw(st.integers(0, 255))
        path.write_bytes(content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content)
        try:
            checkpoint = open_checkpoint(path)
        except CheckpointError as error:
            assert str(path) in str(error)
        else:
            for name in checkpoint:
                assert checkpoint.read(name).nbytes == checkpoint.tensors[name].nbytes


class TestReading:
    def test_views_are_read_only_and_outlive_the_checkpoint(self, tmp_path):
        tensors = random_tensors()
        save_tensors(tensors, tmp_path)
        with open_checkpoint(tmp_path) as checkpoint:
            view = checkpoint.read("layer.5.é F32")
            part = checkpoint.read_slice("layer.5.é F32", (slice(1, 3), 2))
            checkpoint.release("layer.5.é F32")
        assert view.tobytes() == tensors["layer.5.é F32"].tobytes()
        assert part.tobytes() == tensors["layer.5.é F32"][1:3, 2].tobytes()
        assert not view.flags.writeable
        with pytest.raises(ValueError, match=r"The checkpoint is closed; scalar of .* can no longer be read"):
            checkpoint.read("scalar")

    def test_unknown_name(self, tmp_path):
        save_tensors({"w": np.zeros(2, np.float32)}, tmp_path)
        with pytest.raises(KeyError, match="nope"):
            open_checkpoint(tmp_path).read("nope")

    def test_read_into_every_dtype(self, tmp_path, monkeypatch):
        monkeypatch.setattr("kimi_zoo.checkpoints.safetensors.COPY_BYTES", 16)  # several steps for each tensor
        tensors = random_tensors()
        save_tensors(tensors, tmp_path)
        checkpoint = open_checkpoint(tmp_path)
        for name, expected in tensors.items():
            stack = aligned_empty((2, *expected.shape), expected.dtype)
            checkpoint.read_into(name, stack[1, ...])  # the dots keep a row of scalars an array
            assert stack[1].tobytes() == expected.tobytes()
            strided = np.empty((*expected.shape, 2), expected.dtype)[..., 0]
            checkpoint.read_into(name, strided)
            assert strided.tobytes() == expected.tobytes()

    def test_read_into_converts_between_floats_only(self, tmp_path):
        values = np.array([1.0, 1.00390625, -3.0], np.float32)  # the second lies between two bfloat16: ties go to even
        save_tensors({"w": values, "ids": np.arange(3, dtype=np.int32)}, tmp_path)
        checkpoint = open_checkpoint(tmp_path)
        out = np.empty(3, ml_dtypes.bfloat16)
        checkpoint.read_into("w", out)
        np.testing.assert_array_equal(out.astype(np.float32), [1.0, 1.0, -3.0])
        with pytest.raises(ValueError, match="ids is int32; only floating-point tensors are converted, not to float32"):
            checkpoint.read_into("ids", np.empty(3, np.float32))
        with pytest.raises(ValueError, match=r"w has shape \(3,\); it does not fit an array of shape \(4,\)"):
            checkpoint.read_into("w", np.empty(4, np.float32))

    def test_jax_adopts_aligned_arrays(self):
        """The promise of `aligned_empty`: the copy from disk is the last one."""
        array = aligned_empty((3, 5), np.dtype(np.float32))
        array[...] = 2.0
        adopted = jax.device_put(array)
        assert adopted.unsafe_buffer_pointer() == array.ctypes.data

    def test_headers_are_read_without_jax(self):
        code = "import sys, kimi_zoo.checkpoints.safetensors; sys.exit('jax' in sys.modules)"
        subprocess.run([sys.executable, "-c", code], check=True)


class TestSaving:
    def test_same_bytes_as_the_reference_implementation(self, tmp_path):
        tensors = random_tensors()
        save_tensors(tensors, tmp_path / "ours.safetensors")
        reference = safetensors.numpy.save(tensors, metadata={"format": "pt"})
        assert (tmp_path / "ours.safetensors").read_bytes() == reference

    def test_reads_what_the_reference_implementation_writes(self, tmp_path):
        tensors = random_tensors()
        safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors", metadata={"a": "1", "b": "2"})
        checkpoint = open_checkpoint(tmp_path)
        assert_same(checkpoint, tensors)
        assert checkpoint.metadata == {"a": "1", "b": "2"}

    @pytest.mark.parametrize("limit", ["5GB", "100B", 1])
    def test_round_trip(self, tmp_path, limit):
        tensors = random_tensors()
        first = save_tensors(tensors, tmp_path / "first", max_shard_size=limit)
        checkpoint = open_checkpoint(tmp_path / "first")
        assert_same(checkpoint, tensors)
        again = {
            name: LazyTensor(t.shape, t.dtype, lambda name=name: checkpoint.read(name)) for name, t in tensors.items()
        }
        second = save_tensors(again, tmp_path / "second", max_shard_size=limit)
        assert [file.name for file in first] == [file.name for file in second]
        for ours, other in zip(first, second, strict=True):
            assert ours.read_bytes() == other.read_bytes()

    def test_shards(self, tmp_path):
        tensors = {name: np.full(size, size, np.float32) for name, size in (("d", 2), ("c", 3), ("b", 9), ("a", 1))}
        files = save_tensors(tensors, tmp_path, max_shard_size="20B")
        assert [file.name for file in files] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
        index = read_json(tmp_path / "model.safetensors.index.json")
        assert index["metadata"] == {"total_size": 15 * 4}
        places = {"a": 3, "b": 2, "c": 1, "d": 1}  # in order of the mapping; b alone exceeds the limit
        assert index["weight_map"] == {name: files[place - 1].name for name, place in places.items()}
        for name, place in places.items():
            np.testing.assert_array_equal(safetensors.numpy.load_file(files[place - 1])[name], tensors[name])

    def test_jax_arrays_other_orders_and_no_tensors(self, tmp_path):
        transposed = np.arange(6, dtype=np.float32).reshape(2, 3).T
        big_endian = np.arange(4, dtype=">i4")
        bfloat16 = jnp.arange(3, dtype=jnp.bfloat16)
        save_tensors({"t": transposed, "b": big_endian, "j": bfloat16}, tmp_path / "a")
        expected = {"t": transposed.copy(), "b": big_endian.astype(np.int32), "j": np.asarray(bfloat16)}
        assert_same(open_checkpoint(tmp_path / "a"), expected)
        save_tensors({}, tmp_path / "b")
        assert len(open_checkpoint(tmp_path / "b")) == 0

    def test_values_are_taken_one_at_a_time(self, tmp_path):
        alive = []

        def load(name):
            assert not alive or alive[-1]() is None
            array = np.zeros(3, np.float32)
            alive.append(weakref.ref(array))
            return array

        save_tensors({name: LazyTensor((3,), np.dtype("f4"), lambda n=name: load(n)) for name in "abc"}, tmp_path)
        assert len(alive) == 3

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            (np.zeros(2, np.complex128), "'w' has dtype complex128, which safetensors files cannot hold"),
            (np.array(["a"]), "'w' has dtype <U1"),
            (
                LazyTensor((2,), np.dtype("f4"), lambda: np.zeros(3, "f4")),
                r"as float32 \(2,\); its values are float32 \(3,\)",
            ),
            (
                LazyTensor((2,), np.dtype("f4"), lambda: np.zeros(2, "f8")),
                r"as float32 \(2,\); its values are float64 \(2,\)",
            ),
        ],
    )
    def test_refused_values_leave_nothing_behind(self, tmp_path, value, message):
        with pytest.raises(CheckpointError, match=message):
            save_tensors({"a": np.zeros(2, np.float32), "w": value}, tmp_path)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("name", ["__metadata__", "half a \ud800 pair"])
    def test_refused_names(self, tmp_path, name):
        with pytest.raises(CheckpointError, match="cannot be the name of a tensor"):
            save_tensors({name: np.zeros(2, np.float32)}, tmp_path / "w.safetensors")

    def test_does_not_mix_with_weights_that_are_there(self, tmp_path):
        save_tensors({"w": np.zeros(2, np.float32)}, tmp_path)
        with pytest.raises(CheckpointError, match=r"already holds weights: model\.safetensors.*atomic_folder"):
            save_tensors({"w": np.ones(2, np.float32)}, tmp_path, max_shard_size=1)

    def test_saving_over_the_file_that_is_mapped(self, tmp_path):
        path = tmp_path / "model.safetensors"
        save_tensors({"w": np.arange(5, dtype=np.float32)}, path)
        before = open_checkpoint(path).read("w")
        save_tensors({"w": before[::-1]}, path)
        np.testing.assert_array_equal(before, np.arange(5))
        np.testing.assert_array_equal(open_checkpoint(path).read("w"), np.arange(5)[::-1])


MEMORY_PRELUDE = """
import re, resource, sys, ml_dtypes, numpy as np
from kimi_zoo.checkpoints.safetensors import LazyTensor, aligned_empty, open_checkpoint, save_tensors
rows, bfloat16 = 12 * 2**20, np.dtype(ml_dtypes.bfloat16)
def peak():  # bytes; on Linux from /proc, because getrusage counts the program that started this one too
    if sys.platform == "linux":
        return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = peak()
"""
SAVE_SCRIPT = """
lazy = {f"layers.{i}": LazyTensor((rows,), bfloat16, lambda i=i: np.full(rows, i, bfloat16)) for i in range(8)}
save_tensors(lazy, sys.argv[1])
print(peak() - start)
"""
LOAD_SCRIPT = """
checkpoint = open_checkpoint(sys.argv[1])
stack = aligned_empty((8, rows), bfloat16)
for i in range(8):
    checkpoint.read_into(f"layers.{i}", stack[i])
assert [int(row[-1]) for row in stack] == list(range(8)) and checkpoint.total_bytes == 192 * 2**20
print(peak() - start)
"""


def test_peak_memory(tmp_path):
    """Of 192 MiB of weights, saving holds one tensor (24 MiB) at a time; loading needs no more than 1.1 times all."""
    used = []
    for script in (SAVE_SCRIPT, LOAD_SCRIPT):
        command = [sys.executable, "-c", MEMORY_PRELUDE + script, str(tmp_path)]
        used.append(int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) / (192 * 2**20))
    assert used[0] < 0.3 and used[1] < 1.1, used  # measured: 0.12 and 1.05


def test_file_modes_follow_the_umask(tmp_path):
    previous = os.umask(0o027)
    try:
        (file,) = save_tensors({"w": np.zeros(2, np.float32)}, tmp_path)
    finally:
        os.umask(previous)
    assert file.stat().st_mode & 0o777 == 0o640


def test_tensors_far_into_a_large_file(tmp_path):
    """Offsets beyond 1 GB: a sparse file, of which two tensors are looked at."""
    size = 3_000_000_000
    header = {
        "big": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]},
        "last": {"dtype": "F32", "shape": [2], "data_offsets": [size, size + 8]},
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path = tmp_path / "model.safetensors"
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.seek(size, 1)
        file.write(np.asarray([1, 2], np.float32).tobytes())
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.read("last").tolist() == [1, 2]
        assert checkpoint.read_slice("big", slice(size - 1, size)).tolist() == [0]
