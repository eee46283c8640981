"""Fused projections at TP > 1: each rank holds its share of every section, in checkpoints made here by slicing."""

import dataclasses

import numpy as np
import pytest
from helpers import tiny
from megatron_cases import random_model, tensors_of

import kimi_zoo as kz
from kimi_zoo.checkpoints.blocks import Computed, whole
from kimi_zoo.checkpoints.convert import Options, prepare
from kimi_zoo.checkpoints.files import CheckpointError
from kimi_zoo.checkpoints.megatron_dist_saving import Piece
from kimi_zoo.checkpoints.megatron_legacy_saving import namespace
from kimi_zoo.checkpoints.safetensors import open_checkpoint
from kimi_zoo.checkpoints.torch_files import open_torch_file
from kimi_zoo.checkpoints.torch_saving import write_archive
from kimi_zoo.checkpoints.watch import Watch

PARTS = {
    "packed": ("q_proj", "k_proj", "v_proj", "f_a_proj", "g_a_proj", "b_proj"),
    "three": ("q_proj", "k_proj", "v_proj"),
}
OWN = {"f_a_proj": "f_a_proj.weight", "g_a_proj": "g_a_proj.weight", "b_proj": "beta_proj.weight"}
CONVOLUTIONS = ("q_conv1d", "k_conv1d", "v_conv1d")


def model(folder, **changes):
    """Every size differs from the others; the heads and their width divide by 2, the width not by 4."""
    config = tiny(
        hidden_size=20, layer_kinds=("kda", "mla"), mlp_kinds=("dense", "dense"), linear_num_heads=4,
        linear_head_dim=6, num_attention_heads=4, intermediate_size=16, kda_decay_gate="low_rank",
        kda_output_gate="low_rank", bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return random_model(folder, dataclasses.replace(config, **changes), np.float32)


def fused(source, parts, rank, ranks, layer=0):
    """What Megatron's rank holds: `[q_r | k_r | v_r | ...]`."""
    with open_checkpoint(source) as stored:
        found = [np.array(stored.read(f"model.layers.{layer}.self_attn.{part}.weight")) for part in parts]
    assert all(len(part) % ranks == 0 for part in found)
    return np.concatenate([np.split(part, ranks)[rank] for part in found])


def computed(array):
    return whole(Computed(array.shape, array.dtype, lambda: array))


def legacy_with(source, folder, form, ranks):
    """A legacy checkpoint of that form: the standard one with the projections replaced."""
    kz.convert(source, folder, layout=kz.MegatronLayout(format="legacy", tp=ranks))
    for rank in range(ranks):
        path = folder / "release" / f"mp_rank_{rank:02}" / "model_optim_rng.pt"
        file = open_torch_file(path)
        held = {k: computed(np.array(v.array())) for k, v in file.value["model"].items() if hasattr(v, "strides")}
        at = "decoder.layers.0.self_attention."
        held[f"{at}in_proj.weight"] = computed(fused(source, PARTS[form], rank, ranks))
        for part in PARTS[form][3:]:
            del held[at + OWN[part]]
        args = {name: value for name, value in file.value["args"].fields.items() if not hasattr(value, "kind")}
        value = {"args": namespace(args), "iteration": 0, "checkpoint_version": 3.0, "model": held}
        with open(path.with_suffix(".new"), "wb") as out:
            write_archive(out, value, stream=lambda _, tensor: tensor.stream())
        path.with_suffix(".new").rename(path)
    return folder


def distributed_with(source, folder, form, ranks):
    """A distributed checkpoint of a module that does not know its sections: what a rank holds is a chunk as it is."""
    options = Options(layout=kz.MegatronLayout(tp=ranks))
    with prepare(source, folder, options=options) as prepared:
        writer = prepared.output.writer
        at = "decoder.layers.0.self_attention."
        gone = tuple(f"{at}{x}" for x in ("in_proj.weight.", "conv1d.weight.", *(OWN[p] for p in PARTS[form][3:])))
        for rank, (file, pieces) in enumerate(writer.pieces.items()):
            kept = [piece for piece in pieces if not piece.name.startswith(gone)]
            for name, parts in ((f"{at}in_proj.weight", PARTS[form]), (f"{at}conv1d.weight", CONVOLUTIONS)):
                held = fused(source, parts, rank, ranks)
                kept.append(Piece(name, (rank * len(held), *[0] * (held.ndim - 1)), computed(held), rank))
                writer.shapes[name], writer.dtypes[name] = (ranks * len(held), *held.shape[1:]), held.dtype
            writer.pieces[file] = kept
        (folder / "release").mkdir(parents=True)
        watch = Watch(lambda count: None)
        facts = {file: prepared.output.write(folder, file, watch) for file in prepared.output.files()}
        prepared.output.finish(folder, facts)
    return folder


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("form", ["packed", "three"])
def test_legacy_there_and_back(tmp_path, form, ranks):
    source = model(tmp_path / "hf")
    made = legacy_with(source, tmp_path / "megatron", form, ranks)
    kz.convert(made, tmp_path / "out")
    assert tensors_of(tmp_path / "out") == tensors_of(source)
    kz.convert(tmp_path / "out", tmp_path / "back")  # in the form that it had
    for rank in range(ranks):
        file = open_torch_file(tmp_path / "back" / "release" / f"mp_rank_{rank:02}" / "model_optim_rng.pt")
        held = np.array(file.value["model"]["decoder.layers.0.self_attention.in_proj.weight"].array())
        np.testing.assert_array_equal(held, fused(source, PARTS[form], rank, ranks))
    kz.convert(tmp_path / "back", tmp_path / "again")
    assert tensors_of(tmp_path / "again") == tensors_of(source)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("form", ["packed", "three"])
def test_distributed_there_and_back(tmp_path, form, ranks):
    source = model(tmp_path / "hf")
    made = distributed_with(source, tmp_path / "megatron", form, ranks)
    kz.convert(made, tmp_path / "out")
    assert tensors_of(tmp_path / "out") == tensors_of(source)
    kz.convert(tmp_path / "out", tmp_path / "back")  # with sections by themselves, as modules of today have them
    kz.convert(tmp_path / "back", tmp_path / "again")
    assert tensors_of(tmp_path / "again") == tensors_of(source)


def test_sections_that_do_not_divide(tmp_path):
    """Heads can be split over 4 ranks, the bottleneck of the gates, 6 wide, cannot."""
    source = model(tmp_path / "hf")
    kz.convert(legacy_with(source, tmp_path / "megatron", "packed", 2), tmp_path / "out")
    before = sorted(tmp_path.iterdir())
    message = r"in_proj\.weight has 6 of what each rank holds a share of, which is not divisible by the 4 ranks"
    with pytest.raises(CheckpointError, match=message):
        kz.convert(tmp_path / "out", tmp_path / "back", layout=kz.MegatronLayout(tp=4))
    assert sorted(tmp_path.iterdir()) == before
