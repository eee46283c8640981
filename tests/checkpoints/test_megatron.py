"""Megatron checkpoints: every stored case, every kind of damage, layouts that no case has, configurations."""

import dataclasses
import json
import re

import numpy as np
import pytest
from helpers import DATA, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_cases import case_names, copy_of, facts, malformed_names, random_model, tensors_of, unpacked

import kimi_zoo as kz
from kimi_zoo.checkpoints.blocks import Computed, join, whole
from kimi_zoo.checkpoints.configs import parse_config
from kimi_zoo.checkpoints.files import CheckpointError
from kimi_zoo.checkpoints.megatron import open_megatron
from kimi_zoo.checkpoints.megatron_args import fields_of_args, kinds_of_pattern
from kimi_zoo.checkpoints.megatron_legacy_saving import namespace
from kimi_zoo.checkpoints.megatron_names import Key, Place, parse_name
from kimi_zoo.checkpoints.megatron_output import published_shapes
from kimi_zoo.checkpoints.megatron_run import unstacked
from kimi_zoo.checkpoints.megatron_sections import Misfit, cut_rank, join_ranks
from kimi_zoo.checkpoints.tables import kimi_linear
from kimi_zoo.checkpoints.tables import megatron as table
from kimi_zoo.checkpoints.torch_dist import open_dist_checkpoint
from kimi_zoo.checkpoints.torch_files import open_torch_file
from kimi_zoo.checkpoints.torch_saving import write_archive


def assert_same(found, folder):
    """Published names, shapes, dtypes and bytes of an opened checkpoint are those of a folder."""
    wanted = tensors_of(folder)
    assert set(found) == set(wanted)
    for name, tensor in found.items():
        streamed = b"".join(bytes(part) for part in tensor.stream())
        assert (str(tensor.dtype), tensor.shape, streamed) == wanted[name], name


@pytest.mark.parametrize("name", case_names())
def test_case_equals_the_published_folder(name):
    case = unpacked() / name
    found = open_megatron(case / "megatron")
    assert_same(found.tensors, case / "hf")
    stated = parse_config(json.loads((case / "hf" / "config.json").read_text()))
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}  # which Megatron does not know
    assert dataclasses.replace(stated, **tokens) == found.config
    meta = facts(case)
    assert found.run.parallel["TP"] == meta["tp"] and found.stack.hybrid == (meta["stack"] == "hybrid")
    assert found.run.iteration == meta["iteration"]


@pytest.mark.parametrize("name", malformed_names())
def test_malformed_case(name, tmp_path, monkeypatch):
    """The error names what `case.json` says is wrong; nothing is written, and nothing of a pickle is run."""
    monkeypatch.chdir(tmp_path)
    case = unpacked() / "malformed" / name
    expected = {
        "truncated_distcp": r"__1_0\.distcp is cut off",
        "missing_distcp": r"__0_1\.distcp is missing",
        "corrupt_distcp_bytes": r"embedding\.word_embeddings\.weight\) .*its checksum is",
        "no_metadata": r"no \.metadata",
        "metadata_code_pickle": r"names 'io\.open'",
        "common_code_pickle": r"names 'io\.open'",
        "metadata_size_gap": r"in_proj\.weight\.query \[16, 32\]: its 1 chunks do not cover it",
        "path_escape": r"'\.\./\.\./\.\./outside\.distcp', which leaves",
        "missing_tp_rank": "mp_rank_01 missing",
        "missing_pp_rank": "mp_rank_01_001 missing",
        "wrong_shape": r"out_proj\.weight of mp_rank_00 has shape \[32, 9\]; expected \[32, 8\]",
        "legacy_code_pickle": r"names 'io\.open'",
        "duplicate_key": r"layers\.0\.input_layernorm\.weight twice",
        "unknown_key": r"mystery_proj\.weight is not a parameter that is known",
        "missing_key": r"dt_bias is only on some ranks: mp_rank_01, not on tensor parallel ranks \[0\]",
        "replica_mismatch": r"layers\.0\.input_layernorm\.weight differs between mp_rank_00 and mp_rank_01",
        "truncated_pt": r"mp_rank_01/model_optim_rng\.pt is damaged or cut off",
        "bad_tracker": r"iteration\.txt names iter_0000099, which is not there; present: iter_0000010",
    }.get(name)
    if expected is None:
        assert name == "nan_weights"
        done = kz.convert(case / "megatron", tmp_path / "out")
        text = "\n".join(done.warnings)
        assert "model.layers.1.block_sparse_moe.gate.weight has values that are not finite" in text
        assert "model.layers.0.self_attn.A_log has values that are not finite" in text
        assert "differs between mp_rank_00 and mp_rank_01 where one has NaN" in text
        return
    with pytest.raises(CheckpointError, match=expected):
        kz.convert(case / "megatron", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["td_hybrid_gated_low_rank_query", "legacy_gpt_tp2_pp2_vpp2_sequential"])
def test_models_load_from_megatron(name):
    case = unpacked() / name
    ours, published = (kz.from_pretrained(case / folder) for folder in ("megatron", "hf"))
    assert ours.config.layer_kinds == published.config.layer_kinds
    mine, theirs = kz.to_tensors(ours), kz.to_tensors(published)
    assert set(mine) == set(theirs)
    for tensor, array in mine.items():
        assert np.asarray(array).tobytes() == np.asarray(theirs[tensor]).tobytes(), tensor


# layouts that no stored case has: each is made from a legacy case by changing what the ranks hold


def rewrite(folder, change):
    """Applies `change(model, args, tp, pp)` to every rank's file; tensors are `Blocks`."""
    for path in sorted(folder.rglob("model_optim_rng.pt")):
        file = open_torch_file(path)
        numbers = [int(part) for part in path.parent.name.split("_")[2:]]
        args = dict(file.value["args"].fields)
        model = {key: whole(value) for key, value in file.value["model"].items() if hasattr(value, "strides")}
        change(model, args, *numbers, *[0] * (2 - len(numbers)))
        args = {name: value for name, value in args.items() if not hasattr(value, "kind")}
        value = {"iteration": 10, "checkpoint_version": 3.0, "model": model}
        if args:
            value["args"] = namespace(args)
        kept = {key: computed(tensor.read().copy()) for key, tensor in model.items()}
        with open(path.with_suffix(".new"), "wb") as out:
            write_archive(out, value | {"model": kept}, stream=lambda _, tensor: tensor.stream())
        path.with_suffix(".new").rename(path)
    return folder


def computed(array):
    return whole(Computed(array.shape, array.dtype, lambda: array))


A = "self_attention."
TP2 = "legacy_hybrid_tp2_pp2_ep2"


def names_below(model, suffix):
    return [name for name in model if name.endswith(suffix)]


def test_padded_projections_and_heads(tmp_path):
    """Rows after the true ones are dropped: of `in_proj` rounded up to a round width, and of padded heads."""

    def change(model, args, tp, pp):
        for name in names_below(model, A + "in_proj.weight"):
            tensor = model[name]
            width = -(-tensor.shape[0] // 32) * 32
            assert width > tensor.shape[0]
            extra = np.full((width - tensor.shape[0], tensor.shape[1]), 9, tensor.dtype)
            model[name] = join([tensor, computed(extra)], 0)
        for name in [*names_below(model, A + "A_log"), *names_below(model, A + "dt_bias")] if tp == 1 else ():
            tensor = model[name]
            model[name] = join([tensor, computed(np.full_like(tensor.read(), 7))], 0)

    source = copy_of("legacy_hybrid_tp1", tmp_path)
    rewrite(source, lambda model, args, tp, pp: change(model, args, 1, pp))
    found = open_megatron(source)
    assert_same(found.tensors, unpacked() / "legacy_hybrid_tp1" / "hf")
    assert any("A_log: padding dropped, 4 of 8 kept" in note for note in found.notes)


def test_other_widths_are_errors(tmp_path):
    source = copy_of("legacy_gpt_ep2", tmp_path)

    def change(model, args, tp, pp):
        for name in names_below(model, A + "in_proj.weight"):
            extra = computed(np.zeros((1, model[name].shape[1]), model[name].dtype))
            model[name] = join([model[name], extra], 0)

    with pytest.raises(CheckpointError, match=r"in_proj\.weight of mp_rank_00_000 has shape \[73, 16\]; expected \[72"):
        open_megatron(rewrite(source, change))


def test_stored_width_of_ten_rounded_to_sixteen():
    """The width that the configuration demands decides; padding may hold anything."""
    row = table.row("in", sections=(table.Section("a", (7, 2)), table.Section("b", (3, 2))), axis=0)
    stored = np.arange(32, dtype=np.float32).reshape(16, 2)
    sizes = {"kda_heads": 1, "kda_dim": 1}
    (a, b), whole_there = cut_rank(computed(stored), row, sizes, 1)
    np.testing.assert_array_equal(a.read(), stored[:7])
    np.testing.assert_array_equal(b.read(), stored[7:10])
    assert not whole_there
    for rows in (9, 11, 15, 17):
        with pytest.raises(Misfit, match=rf"has shape \[{rows}, 2\]; expected \[10, 2\]"):
            cut_rank(computed(np.zeros((rows, 2), np.float32)), row, sizes, 1)


def test_fused_linear_is_cut_before_it_is_joined():
    """Each rank holds its gate rows, then its up rows."""
    gate, up = np.arange(8).reshape(4, 2) + 10.0, np.arange(8).reshape(4, 2) + 20.0
    row = next(row for row in table.DENSE if len(row.sections) == 2)
    sizes = {"ffn": 4, "hidden": 2, "kda_heads": 1, "kda_dim": 1}
    ranks = [computed(np.concatenate([gate[2 * r : 2 * r + 2], up[2 * r : 2 * r + 2]])) for r in range(2)]
    joined = join_ranks([cut_rank(rank, row, sizes, 2)[0] for rank in ranks], row.axis)
    np.testing.assert_array_equal(joined[0].read(), gate)
    np.testing.assert_array_equal(joined[1].read(), up)


def test_unfused_names(tmp_path):
    """A fork keeps every projection by itself, under its published name."""
    source = copy_of("legacy_hybrid_tp1", tmp_path)

    def change(model, args, tp, pp):
        for fused, parts in (("in_proj.weight", "{}_proj.weight"), ("conv1d.weight", "{}_conv1d.weight")):
            for name in names_below(model, A + fused):
                tensor = model.pop(name)
                for x, part in zip("qkv", tensor.cut(0, [tensor.shape[0] // 3] * 3), strict=True):
                    model[name.replace(fused, parts.format(x))] = part
        for old, new in (("out_norm", "o_norm"), ("out_proj", "o_proj"), ("beta_proj", "b_proj")):
            for name in names_below(model, f"{A}{old}.weight"):
                model[name.replace(old, new)] = model.pop(name)

    assert_same(open_megatron(rewrite(source, change)).tensors, unpacked() / "legacy_hybrid_tp1" / "hf")


def test_packed_projection(tmp_path):
    """`in_proj` holds the bottlenecks of the gates and beta too, and is padded; `A_log` has four axes."""
    source = copy_of("legacy_hybrid_tp1", tmp_path)

    def change(model, args, tp, pp):
        for name in names_below(model, A + "in_proj.weight"):
            prefix = name.removesuffix("in_proj.weight")
            parts = [model[name]] + [model.pop(f"{prefix}{x}.weight") for x in ("f_a_proj", "g_a_proj", "beta_proj")]
            joined = join(parts, 0)
            pad = np.full((-joined.shape[0] % 16, joined.shape[1]), 3, joined.dtype)
            model[name] = join([joined, computed(pad)], 0)

    assert_same(open_megatron(rewrite(source, change)).tensors, unpacked() / "legacy_hybrid_tp1" / "hf")


def test_joint_down_projection_with_its_norm(tmp_path):
    source = copy_of("legacy_gpt_tp2_grouped_release", tmp_path)

    def change(model, args, tp, pp):
        for name in names_below(model, A + "linear_q_down_proj.weight"):
            prefix = name.removesuffix("linear_q_down_proj.weight")
            parts = [model.pop(name), model.pop(f"{prefix}linear_kv_down_proj.weight")]
            model[f"{prefix}linear_qkv_down_proj.weight"] = join(parts, 0)
            norm = prefix.replace(A, "input_layernorm.weight")
            model[f"{prefix}linear_qkv_down_proj.layer_norm_weight"] = model.pop(norm)

    assert_same(open_megatron(rewrite(source, change)).tensors, unpacked() / "legacy_gpt_tp2_grouped_release" / "hf")


def test_uneven_pipeline_stages(tmp_path):
    """Stages of one and three layers: layers are counted over the stages before."""
    case = "legacy_gpt_tp2_pp2_vpp2_sequential"
    kz.convert(unpacked() / case / "hf", tmp_path / "m", layout=kz.MegatronLayout(format="legacy", pp=2, iteration=10))
    (one, two) = sorted((tmp_path / "m" / "iter_0000010").iterdir())
    models = [open_torch_file(folder / "model_optim_rng.pt") for folder in (one, two)]
    first, second = ({n: whole(t) for n, t in m.value["model"].items()} for m in models)
    moved = {name: first.pop(name) for name in list(first) if name.startswith("decoder.layers.1.")}
    later = {}
    for name, tensor in second.items():
        later[re.sub(r"layers\.(\d)", lambda m: f"layers.{int(m[1]) + 1}", name)] = tensor
    later |= {name.replace("layers.1.", "layers.0."): tensor for name, tensor in moved.items()}
    for folder, model in ((one, first), (two, later)):
        rewrite(folder, lambda old, args, tp, pp, model=model: (old.clear(), old.update(model)))
    assert_same(open_megatron(tmp_path / "m").tensors, unpacked() / case / "hf")


def test_stacked_layers_and_experts(tmp_path):
    """A uniform stack may be stored with one axis for all layers, and one for all experts."""
    array = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    key = parse_name("decoder.layers.mlp.experts.experts.linear_fc2.weight")
    assert key is not None
    found = unstacked({key: computed(array)}, tmp_path)
    assert len(found) == 6
    for layer in range(2):
        for expert in range(3):
            part = found[Key(Place("layer", layer), "mlp.experts.linear_fc2.weight", expert)]
            np.testing.assert_array_equal(part.read(), array[layer, expert])


def test_norms_stored_minus_one(tmp_path):
    source = copy_of("legacy_gpt_ep2", tmp_path)

    def change(model, args, tp, pp):
        args["apply_layernorm_1p"] = True
        for name in [name for name in model if "norm" in name]:
            model[name] = computed((model[name].read().astype(np.float32) - 1).astype(model[name].dtype))

    found = open_megatron(rewrite(source, change))
    wanted = tensors_of(unpacked() / "legacy_gpt_ep2" / "hf")
    name = "model.layers.0.input_layernorm.weight"
    values = np.frombuffer(wanted[name][2], found.tensors[name].dtype).astype(np.float32)
    np.testing.assert_allclose(found.tensors[name].read().astype(np.float32), values, atol=2**-8)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert found.tensors[name].read().tobytes() == wanted[name][2]
    assert any("minus one" in note for note in found.notes)


def test_a_router_without_bias(tmp_path):
    source = copy_of("legacy_gpt_ep2", tmp_path)

    def change(model, args, tp, pp):
        args["moe_router_enable_expert_bias"] = False
        for name in names_below(model, "router.expert_bias"):
            del model[name]

    found = open_megatron(rewrite(source, change))
    bias = found.tensors["model.layers.1.block_sparse_moe.gate.e_score_correction_bias"].read()
    assert bias.dtype == np.float32 and not bias.any() and any("no balancing bias" in note for note in found.notes)


def test_tied_embeddings_over_pipeline_stages(tmp_path):
    """The last stage holds a copy of the embedding, which is not an output head."""
    case = unpacked() / "legacy_gpt_ep2"
    config = json.loads((case / "hf" / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    (tmp_path / "hf" / "model.safetensors").write_bytes((case / "hf" / "model.safetensors").read_bytes())
    kz.convert(tmp_path / "hf", tmp_path / "m", layout=kz.MegatronLayout(format="legacy", pp=2))
    last = open_torch_file(next((tmp_path / "m").rglob("mp_rank_00_001/*.pt"))).value["model"]
    assert "output_layer.weight" in last and "embedding.word_embeddings.weight" not in last
    found = open_megatron(tmp_path / "m")
    assert found.config.tie_word_embeddings and "lm_head.weight" not in found.tensors


def prediction_case(tmp_path, case="legacy_gpt_ep2"):
    """A case with a layer that predicts one more token: a copy of the last layer, and its own parameters."""
    source = copy_of(case, tmp_path)

    def change(model, args, tp, pp):
        args["mtp_num_layers"] = 1
        for name in [name for name in model if name.startswith("decoder.layers.1.")]:
            model[name.replace("decoder.layers.1.", "mtp.layers.0.transformer_layer.")] = model[name]
        hidden = model["decoder.final_layernorm.weight"]
        for norm in ("enorm", "hnorm", "final_layernorm"):
            model[f"mtp.layers.0.{norm}.weight"] = hidden
        both = np.arange(hidden.shape[0] * hidden.shape[0] * 2).reshape(hidden.shape[0], -1).astype(hidden.dtype)
        model["mtp.layers.0.eh_proj.weight"] = computed(both)

    return rewrite(source, change)


def test_prediction_layers_are_left_out_or_kept(tmp_path):
    source = prediction_case(tmp_path)
    done = kz.convert(source, tmp_path / "without")
    assert done.plan.left_out["tensors of layers that predict one more token"] > 20
    assert set(tensors_of(tmp_path / "without")) == set(tensors_of(unpacked() / "legacy_gpt_ep2" / "hf"))
    kz.convert(source, tmp_path / "with", keep_prediction=True)
    kept = tensors_of(tmp_path / "with")
    assert json.loads((tmp_path / "with" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    for name in ("self_attn.kv_b_proj.weight", "block_sparse_moe.experts.3.w2.weight", "input_layernorm.weight"):
        assert kept[f"model.layers.2.{name}"] == kept[f"model.layers.1.{name}"]
    assert kept["model.layers.2.eh_proj.weight"][1] == (16, 32) and "model.layers.2.shared_head.norm.weight" in kept
    kz.from_pretrained(tmp_path / "with")
    for layout in (kz.MegatronLayout(tp=2, pp=2), kz.MegatronLayout(format="torch_dist", tp=2, ep=2)):
        kz.convert(tmp_path / "with", tmp_path / "back", layout=layout, keep_prediction=True, overwrite=True)
        kz.convert(tmp_path / "back", tmp_path / "again", keep_prediction=True, overwrite=True)
        assert tensors_of(tmp_path / "again") == kept


def test_state_of_the_optimizer(tmp_path):
    for case in ("td_gpt_two_stage", "fsdp_dtensor_gpt"):
        kz.convert(unpacked() / case / "megatron", tmp_path / case, keep_optimizer=True)
        state = kz.checkpoints.safetensors.open_checkpoint(tmp_path / case / "optimizer.safetensors")
        name = "exp_avg.model.layers.0.self_attn.q_proj.weight"
        assert state.read(name).shape == (24, 16) and (state.read(name) == 0.25).all()
        assert (state.read("exp_avg_sq.model.layers.0.mlp.up_proj.weight") == 0.5).all()
        assert set(tensors_of(tmp_path / case)) == set(tensors_of(unpacked() / case / "hf"))
    with pytest.raises(CheckpointError, match="no optimizer state with the names"):
        kz.convert(unpacked() / "legacy_gpt_ep2" / "megatron", tmp_path / "x", keep_optimizer=True)


# ranks


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "mp_rank_00_001").rename(f / "mp_rank_00_003"), "mp_rank_00_001 missing"),
        (lambda f: (f / "mp_rank_07").mkdir(), "holds mp_rank_07, which do not belong to it"),
        (lambda f: (f / "mp_rank_00_001" / "model_optim_rng.pt").unlink(), r"holds no model_optim_rng\.pt"),
    ],
)
def test_wrong_ranks_are_named(tmp_path, change, message):
    source = copy_of("legacy_gpt_ep2", tmp_path)
    change(source / "iter_0000010")
    with pytest.raises(CheckpointError, match=message):
        open_megatron(source)


def test_ranks_of_two_runs(tmp_path):
    source = copy_of("legacy_gpt_ep2", tmp_path)

    def change(model, args, tp, second):
        args["hidden_size"] += second

    with pytest.raises(CheckpointError, match="hidden_size is 16 in mp_rank_00_000, 17 in mp_rank_00_001"):
        open_megatron(rewrite(source, change))


def test_a_rank_with_too_few_layers_or_experts(tmp_path):
    def drop(prefix):
        def change(model, args, tp, second):
            for name in [name for name in model if prefix in name] if second else ():
                del model[name]

        return change

    source = copy_of("legacy_gpt_ep2", tmp_path)
    with pytest.raises(CheckpointError, match="holds 1 layers of pipeline stage 0; other ranks of that stage hold 2"):
        open_megatron(rewrite(source, drop("layers.1.")))
    source = copy_of("legacy_gpt_ep2", tmp_path / "again")
    with pytest.raises(CheckpointError, match=r"holds experts \[0\]; expected 0 to 1, as 4 experts are on 2 ranks"):
        open_megatron(rewrite(source, drop("weight1")))


def test_without_arguments_the_second_number_may_be_either_kind(tmp_path):
    """Told by whether every rank holds the embedding."""
    config = json.loads((unpacked() / "legacy_gpt_ep2" / "hf" / "config.json").read_text())
    source = copy_of("legacy_gpt_ep2", tmp_path)
    rewrite(source, lambda model, args, tp, pp: args.clear())
    assert_same(open_megatron(source, config=config).tensors, unpacked() / "legacy_gpt_ep2" / "hf")
    kz.convert(unpacked() / "legacy_gpt_ep2" / "hf", tmp_path / "pp", layout=kz.MegatronLayout(format="legacy", pp=2))
    rewrite(tmp_path / "pp", lambda model, args, tp, pp: args.clear())
    found = open_megatron(tmp_path / "pp", config=config)
    assert found.run.parallel["PP"] == 2
    assert_same(found.tensors, unpacked() / "legacy_gpt_ep2" / "hf")


# configuration


def test_weights_alone_ask_for_what_is_needed(tmp_path):
    source = copy_of("legacy_gpt_ep2", tmp_path)
    rewrite(source, lambda model, args, tp, pp: args.clear())
    with pytest.raises(CheckpointError) as error:
        open_megatron(source)
    for text in ("--config", "heads", "head dim", "layer kinds", "num_experts", "vocab_size"):
        assert text in str(error.value)


def test_a_partial_configuration_is_completed_from_shapes(tmp_path):
    source = copy_of("legacy_gpt_ep2", tmp_path)
    rewrite(source, lambda model, args, tp, pp: args.clear())
    given = {
        "vocab_size": 26,
        "num_attention_heads": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 4,
        "num_experts_per_token": 2,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 2.446,
    }
    found = open_megatron(source, config=given)
    assert_same(found.tensors, unpacked() / "legacy_gpt_ep2" / "hf")
    assert (found.config.kv_lora_rank, found.config.qk_rope_head_dim, found.config.num_experts) == (8, 2, 4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_attention_heads": 8}, "num_attention_heads is 8 by the configuration given, 4 by its arguments"),
        ({"vocab_size": 27}, "vocab_size is 27 by the configuration given, 26 by its arguments"),
        (
            {"linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": []}, "num_hidden_layers": 2},
            r'layer_kinds is \["kda", "kda"\] by the configuration given, \["kda", "mla"\]',
        ),
        ({"no_kda_lora": True}, 'kda_decay_gate is "direct" by the configuration given, "low_rank" by its arguments'),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not implemented"),
    ],
)
def test_contradictions_name_both_values(given, message):
    with pytest.raises(CheckpointError, match=message):
        open_megatron(unpacked() / "legacy_gpt_ep2" / "megatron", config=given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"linear_attention_freq": [0, 0]},
            r'layer_kinds is \["mla", "mla"\] by its arguments, \["kda", "mla"\] by its t',
        ),
        ({"kda_two_stage_gates": False}, 'kda_decay_gate is "direct" by its arguments, "low_rank" by its tensors'),
        ({"normalization": "LayerNorm"}, "normalization is 'LayerNorm'; only 'RMSNorm' can be converted"),
        ({"linear_num_value_heads": 8}, "linear_num_key_heads 4 and linear_num_value_heads 8 differ"),
        ({"moe_shared_expert_intermediate_size": 9}, "9 is no multiple of an expert's 8"),
        ({"num_layers": 3, "moe_layer_freq": [0, 1, 1], "linear_attention_freq": [1, 0, 0]}, "num_layers 3, its ranks"),
        ({"position_embedding_type": "rope"}, "position_embedding_type is 'rope'"),
        ({"vocab_size": 99}, r"embed_tokens\.weight\) has shape \[32, 16\]; expected \[99, 16\]"),
        ({"hidden_size": 17}, r"expected \[\d+, 17\]"),
        ({"tensor_model_parallel_size": 0}, "tensor_model_parallel_size 0"),
        ({"kda_lower_bound": -9.0, "kda_safe_gate": True}, r"needs a `lower_bound` in \[-5, 0\); got -9"),
    ],
)
def test_arguments_that_cannot_be_true(tmp_path, changes, message):
    source = rewrite(copy_of("legacy_gpt_ep2", tmp_path), lambda model, args, tp, pp: args.update(changes))
    with pytest.raises(CheckpointError, match=message):
        open_megatron(source)


def test_unknown_vocabulary_is_kept_whole_and_said(tmp_path):
    source = copy_of("legacy_gpt_ep2", tmp_path)
    rewrite(source, lambda model, args, tp, pp: args.pop("vocab_size"))
    found = open_megatron(source)
    assert found.config.vocab_size == 32 and any("all 32 rows are kept" in note for note in found.notes)


def test_frequencies_and_patterns():
    args = {"num_layers": 8, "num_experts": 4, "moe_ffn_hidden_size": 8}
    kinds = lambda **more: fields_of_args({**args, **more})
    assert kinds(linear_attention_freq=4)["layer_kinds"] == ("kda", "kda", "kda", "mla") * 2
    assert kinds(moe_layer_freq=2)["mlp_kinds"] == ("moe", "dense") * 4
    assert kinds(moe_layer_freq="([0]*1+[1]*7)")["mlp_kinds"] == ("dense",) + ("moe",) * 7
    pattern = {"hybrid_layer_pattern": "K-KE|+EKE/+E", "num_layers": 8}
    assert kinds(**pattern)["layer_kinds"] == ("kda", "kda", "mla", "kda")
    assert kinds_of_pattern("K-+E") == (("kda", "mla"), ("dense", "moe"))
    with pytest.raises(CheckpointError, match=r"hybrid_layer_pattern 'KK-E' has no publ.*found \['-', 'K'\]"):
        kinds_of_pattern("KK-E")
    with pytest.raises(CheckpointError, match="num_layers is 8, hybrid_layer_pattern 'K-' has 2 layers"):
        kinds(hybrid_layer_pattern="K-")


@pytest.mark.parametrize(
    ("setup", "message"),
    [
        (lambda f: (f / "latest_checkpointed_iteration.txt").write_text("soon"), "number of an iteration.*'soon'"),
        (lambda f: (f / "latest_checkpointed_iteration.txt").unlink() or (f / "iter_0000011").mkdir(), "Give one"),
        (
            lambda f: [p.rename(f / "x") for p in f.glob("iter_*")],
            "names iter_0000010, which is not there; present: no",
        ),
    ],
)
def test_finding_the_iteration(tmp_path, setup, message):
    source = copy_of("legacy_gpt_ep2", tmp_path)
    setup(source)
    with pytest.raises(CheckpointError, match=message):
        open_megatron(source)


def test_iterations_may_be_given_themselves(tmp_path):
    source = copy_of("legacy_gpt_ep2", tmp_path)
    assert open_megatron(source / "iter_0000010").run.iteration == 10
    (source / "latest_checkpointed_iteration.txt").unlink()
    assert open_megatron(source).run.iteration == 10
    (source / "iter_0000010").rename(source / "iter_0000012")
    assert any("iter_0000012, but iteration 10" in note for note in open_megatron(source).run.notes)


# names and the table


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("module.module.decoder.layers.12.mlp.router.weight", Key(Place("layer", 12), "mlp.router.weight")),
        ("decoder.layers.3.mlp.experts.linear_fc1.weight7", (3, "mlp.experts.linear_fc1.weight", 7)),
        ("decoder.layers.3.mlp.experts.linear_fc1.weight7_w", (3, "mlp.experts.linear_fc1.weight_w", 7)),
        ("decoder.layers.3.mlp.experts.local_experts.7.linear_fc2.weight", (3, "mlp.experts.linear_fc2.weight", 7)),
        ("decoder.layers.3.mlp.experts.experts.7.linear_fc1.weight_v", (3, "mlp.experts.linear_fc1.weight_v", 7)),
        ("decoder.layers.3.mlp.experts.experts.linear_fc1.weight", (3, "mlp.experts.linear_fc1.weight", -1)),
        ("decoder.layers.mlp.experts.experts.linear_fc1.weight", (-1, "mlp.experts.linear_fc1.weight", -1)),
        ("decoder.layers.3.mlp.experts.weight2", (3, "mlp.experts.weight2", -1)),
        ("model.module.embedding.word_embeddings.weight", Key(Place("outer"), "embedding.word_embeddings.weight")),
        ("mtp.layers.0.mtp_model_layer.layers.1.mlp.router.weight", Key(Place("mtp", 0, 1), "mlp.router.weight")),
        ("mtp.layers.2.enorm.weight", Key(Place("mtp", 2), "enorm.weight")),
        ("model.layers.0.self_attn.q_proj.weight", None),
        ("optimizer.state.exp_avg.decoder.layers.0.x", None),
    ],
)
def test_names(name, key):
    if isinstance(key, tuple) and not isinstance(key, Key):
        key = Key(Place("layer", key[0]), key[1], key[2])
    assert parse_name(name) == key


@given(
    gate=st.sampled_from(["direct", "low_rank"]),
    rank=st.sampled_from([None, 10]),
    mla=st.sampled_from([None, "head_wise", "element_wise"]),
    shared=st.integers(0, 2),
    tied=st.booleans(),
    first=st.sampled_from(["dense", "moe"]),
)
@settings(max_examples=40, deadline=None)
def test_both_tables_know_the_same_tensors(gate, rank, mla, shared, tied, first):
    """Megatron's rows end in exactly the names and shapes that the published table has."""
    config = tiny(
        kda_decay_gate=gate, kda_output_gate=gate, q_lora_rank=rank, mla_output_gate=mla, num_shared_experts=shared,
        tie_word_embeddings=tied, mlp_kinds=(first, "moe", "moe", "moe"),
    )  # fmt: skip
    wanted = {}
    for entry in kimi_linear.entries(config):
        for expert in range(config.num_experts) if entry.per_expert else (None,):
            wanted[entry.name(0, expert)] = entry.row.shapes[:1]
    shapes = published_shapes(config)
    assert set(shapes) == set(wanted)
    for name, usual in wanted.items():
        assert not usual or usual[0] == shapes[name], name


SHARDED = json.loads((DATA / "kda_module" / "sharded.json").read_text())


@pytest.mark.parametrize("gate", ["direct", "two"])
def test_split_as_megatrons_own_module_splits(tmp_path, gate):
    """Local shapes, keys, global shapes and offsets at TP 2, against those that the module's `sharded_state_dict` and
    `state_dict` give on each rank."""
    rank = "direct" if gate == "direct" else "low_rank"
    config = tiny(
        hidden_size=64, linear_num_heads=4, linear_head_dim=16, num_attention_heads=4, intermediate_size=16,
        moe_intermediate_size=8, num_experts=4, kda_decay_gate=rank, kda_output_gate=rank,
    )  # fmt: skip
    source = random_model(tmp_path / "hf", config, np.float32)
    kz.convert(source, tmp_path / "dist", layout=kz.MegatronLayout(tp=2))
    kz.convert(source, tmp_path / "legacy", layout=kz.MegatronLayout(format="legacy", tp=2))
    prefix = "decoder.layers.0.self_attention."
    found = {0: {}, 1: {}}
    for name, tensor in open_dist_checkpoint(tmp_path / "dist" / "release").tensors.items():
        for block in tensor.blocks if name.startswith(prefix) else ():
            owner = int(re.search(r"__(\d)_0\.distcp", block.source.where)[1])
            found[owner][name] = [list(block.shape), list(tensor.shape), list(block.offset)]
    for number in (0, 1):
        wanted = SHARDED[f"{gate}_{number}"]
        replicated = {name for name, (local, whole_shape, _) in wanted["sharded"].items() if local == whole_shape}
        expected = {k: v for k, v in wanted["sharded"].items() if number == 0 or k not in replicated}
        assert found[number] == expected
        file = open_torch_file(tmp_path / "legacy" / "release" / f"mp_rank_0{number}" / "model_optim_rng.pt")
        local = {k.removeprefix(prefix): list(v.shape) for k, v in file.value["model"].items() if k.startswith(prefix)}
        assert local == wanted["local"]
