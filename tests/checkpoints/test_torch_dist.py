"""Distributed checkpoints: coverage, places, and damage."""

import contextlib
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_cases import unpacked

from kimi_zoo.checkpoints.blocks import Block, Computed, whole
from kimi_zoo.checkpoints.files import CheckpointError
from kimi_zoo.checkpoints.megatron_dist_saving import CLASSES, _properties
from kimi_zoo.checkpoints.pickle_writing import Pairs, instance, write_pickle
from kimi_zoo.checkpoints.pickles import Name, StandIn, UnsafePickle
from kimi_zoo.checkpoints.torch_dist import check_cover, open_dist_checkpoint
from kimi_zoo.checkpoints.torch_saving import size, write_archive

ARRAY = np.arange(24, dtype=np.float32).reshape(6, 4)
CHUNKS = [((0, 0), (4, 4)), ((4, 0), (2, 1)), ((4, 1), (2, 3))]


def write(folder, *, chunks=CHUNKS, shape=(6, 4), dtype=np.float32, stored=None, places=None, array=ARRAY, extra=()):
    """A checkpoint with one tensor `w` in these chunks; `places` changes where chunks are said to lie."""
    entries, pairs = {}, Pairs()
    with open(folder / "__0_0.distcp", "wb") as file:
        for number, (offset, extent) in enumerate(chunks):
            index = tuple(slice(at, at + n) for at, n in zip(offset, extent, strict=True))
            values = array[index] if stored is None else stored
            begin = file.tell()
            source = Computed(values.shape, values.dtype, lambda values=values: np.ascontiguousarray(values))
            length = write_archive(file, whole(source), stream=lambda _, tensor: tensor.stream())
            place = {"relative_path": "__0_0.distcp", "offset": begin, "length": length}
            place |= (places or {}).get(number, {})
            if place.pop("absent", False):
                continue
            at = instance(CLASSES, "MetadataIndex", fqn="w", offset=size(offset), index=None)
            pairs.items.append((at, instance("torch.distributed.checkpoint.filesystem", "_StorageInfo", **place)))
    described = [instance(CLASSES, "ChunkStorageMetadata", offsets=size(o), sizes=size(s)) for o, s in chunks]
    properties = _properties(np.dtype(dtype))
    entries["w"] = instance(CLASSES, "TensorStorageMetadata", properties=properties, size=size(shape), chunks=described)
    pairs.items.extend(extra)
    metadata = instance(CLASSES, "Metadata", state_dict_metadata=entries, storage_data=pairs, planner_data=None)
    (folder / ".metadata").write_bytes(write_pickle(metadata))
    return folder


def test_chunks_of_any_shape_make_a_tensor(tmp_path):
    found = open_dist_checkpoint(write(tmp_path)).tensors["w"]
    assert found.shape == (6, 4) and found.dtype == np.float32
    np.testing.assert_array_equal(found.read(), ARRAY)
    assert b"".join(map(bytes, found.stream())) == ARRAY.tobytes()
    found.release()
    np.testing.assert_array_equal(found.read(), ARRAY)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunks": CHUNKS[:2]}, r"w \[6, 4\]: its 2 chunks do not cover it; 6 of 24 elements are missing"),
        ({"chunks": [*CHUNKS, ((3, 2), (1, 1))]}, r"chunks .* overlap"),
        ({"chunks": [*CHUNKS[:2], ((4, 1), (2, 4))], "array": np.zeros((6, 5), np.float32)}, "reaches beyond it"),
        ({"chunks": [*CHUNKS, CHUNKS[0]]}, r"stored twice at offset \(0, 0\)"),
        ({"shape": (6, 4, 1)}, "without usable offsets"),
        ({"places": {1: {"absent": True}}}, r"w at offset \[4, 0\] is announced, but"),
        ({"places": {0: {"relative_path": "../x.distcp"}}}, "leaves the checkpoint's folder"),
        ({"places": {0: {"relative_path": "/etc/passwd"}}}, "leaves the checkpoint's folder"),
        ({"places": {0: {"relative_path": "a/../../x"}}}, "leaves the checkpoint's folder"),
        ({"places": {0: {"relative_path": "__7_0.distcp"}}}, r"__7_0\.distcp is missing \(it holds w"),
        ({"places": {2: {"length": 10**9}}}, r"__0_0\.distcp is cut off: w ends at byte"),
        ({"places": {2: {"offset": -1}}}, "lies at byte -1"),
        ({"places": {2: {"transform_descriptors": ["zstd"]}}}, "stored compressed"),
    ],
)
def test_metadata_that_cannot_be_true(tmp_path, change, message):
    with pytest.raises(CheckpointError, match=message):
        open_dist_checkpoint(write(tmp_path, **change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": np.int16}, r"\.metadata says int16 \[4, 4\], the file holds float32 \[4, 4\]"),
        ({"stored": np.zeros((4, 3), np.float32)}, r"says float32 \[4, 4\], the file holds float32 \[4, 3\]"),
        ({"places": {0: {"offset": 3}}}, "was not written by torch.save"),
    ],
)
def test_files_that_hold_something_else(tmp_path, change, message):
    tensor = open_dist_checkpoint(write(tmp_path, **change)).tensors["w"]
    with pytest.raises(CheckpointError, match=message):
        tensor.read()


def test_all_problems_are_listed_at_once(tmp_path):
    places = {0: {"relative_path": "gone.distcp"}, 1: {"relative_path": "../up.distcp"}, 2: {"absent": True}}
    with pytest.raises(CheckpointError) as error:
        open_dist_checkpoint(write(tmp_path, places=places))
    for text in ("gone.distcp is missing", "leaves the checkpoint's folder", "is announced, but"):
        assert text in str(error.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "holds a dict; expected the metadata"),
        (instance(CLASSES, "Metadata"), "lacks state_dict_metadata"),
        (instance(CLASSES, "Metadata", state_dict_metadata={"a": 5}, storage_data={}), "a is described by a int"),
        (instance("os", "Metadata"), "names 'os.Metadata'"),
    ],
)
def test_other_metadata(tmp_path, value, message):
    (tmp_path / ".metadata").write_bytes(write_pickle(value))
    with pytest.raises(CheckpointError, match=message):
        open_dist_checkpoint(tmp_path)


def test_without_metadata(tmp_path):
    (tmp_path / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"holds \*\.distcp files but no \.metadata"):
        open_dist_checkpoint(tmp_path)


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_cover_is_checked_exactly(data):
    """Random cuts cover; leaving one out, growing or moving one does not."""
    blocks = [((0, 0, 0), (5, 4, 3))]
    for _ in range(data.draw(st.integers(0, 6))):
        offset, shape = blocks.pop(data.draw(st.integers(0, len(blocks) - 1)))
        axis = data.draw(st.integers(0, 2))
        at = data.draw(st.integers(1, max(1, shape[axis] - 1)))
        for start, length in ((0, at), (at, shape[axis] - at)):
            if length > 0:
                moved, cut = list(offset), list(shape)
                moved[axis], cut[axis] = offset[axis] + start, length
                blocks.append((tuple(moved), tuple(cut)))
    check = lambda pairs: check_cover("w", (5, 4, 3), _blocks(pairs))
    check(blocks)
    if len(blocks) > 1:
        number = data.draw(st.integers(0, len(blocks) - 1))
        with pytest.raises(CheckpointError, match="do not cover"):
            check(blocks[:number] + blocks[number + 1 :])
        with pytest.raises(CheckpointError, match="overlap"):
            check([*blocks, blocks[number]])


def _blocks(pairs):
    return [Block(offset, shape, Computed(shape, np.dtype(np.int8), lambda: np.zeros(1))) for offset, shape in pairs]


def test_objects_have_stand_ins():
    found = open_dist_checkpoint(unpacked() / "fsdp_dtensor_gpt" / "megatron" / "iter_0000010")
    args = found.read_object("args")
    assert isinstance(args, StandIn) and args.kind == Name("argparse", "Namespace") and args.fields["num_layers"] == 2


def test_random_damage_of_metadata(tmp_path):
    """Our error, or the right values: what is wrong must show."""
    write(tmp_path)
    data, draw = (tmp_path / ".metadata").read_bytes(), random.Random(3)
    for turn in range(300):
        bad = bytearray(data)
        if turn % 4 == 0:
            del bad[draw.randrange(len(bad)) :]
        for _ in range(draw.randrange(1, 3)):
            if bad:
                bad[draw.randrange(len(bad))] = draw.randrange(256)
        (tmp_path / ".metadata").write_bytes(bad)
        with contextlib.suppress(CheckpointError):
            for tensor in open_dist_checkpoint(tmp_path).tensors.values():
                if tensor.nbytes < 1000:
                    tensor.read()


def test_no_code_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (folder,) = (unpacked() / "malformed" / "metadata_code_pickle" / "megatron").glob("iter_*")
    with pytest.raises(UnsafePickle, match=r"names 'io\.open'"):
        open_dist_checkpoint(folder)
    assert list(tmp_path.iterdir()) == []
