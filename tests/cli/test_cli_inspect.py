import json

import ml_dtypes
import numpy as np
import pytest
from tiny_checkpoint import TINY

from kimi_zoo import bundled, cli
from kimi_zoo.checkpoints.safetensors import CheckpointError, save_tensors
from kimi_zoo.checkpoints.summary import summarize
from kimi_zoo.cli.terminal import table

BF16 = np.dtype(ml_dtypes.bfloat16)


def write_checkpoint(folder, shapes, config=None, dtypes=()):
    """Zeros of these shapes; bfloat16 unless `dtypes` says otherwise."""
    dtypes = dict(dtypes)
    save_tensors({name: np.zeros(shape, dtypes.get(name, BF16)) for name, shape in shapes.items()}, folder)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def parts(summary):
    return {part.name: part.parameters for part in summary.parts}


def test_counts_of_the_tiny_checkpoint():
    summary = summarize(TINY)
    kda = 5 * 16 * 16 + 2 * (8 * 16 + 16 * 8) - 16 * 16 + 2 * 16 + 3 * 16 * 4 + 2 + 16 + 8
    mla = 2 * 12 * 16 + (12 + 4) * 16 + 12 + 2 * (8 + 6) * 12 + 16 * 12
    expected = {
        "embedding": 258 * 16,
        "KDA": kda,
        "MLA": mla,
        "routed experts": 4 * 3 * 16 * 10,
        "shared experts": 3 * 16 * 10,
        "router": 4 * 16 + 4,
        "dense MLP": 3 * 16 * 24,
        "norms": 5 * 16,
        "output head": 258 * 16,
    }
    assert parts(summary) == expected
    assert summary.parameters == sum(expected.values())
    assert summary.active == summary.parameters - expected["routed experts"] // 2  # 2 of 4 experts
    assert summary.routing == (2, 4)
    assert [(layer.mixer, layer.mlp, layer.experts) for layer in summary.layers] == [
        ("kda", "dense", 0),
        ("mla", "moe", 4),
    ]
    assert summary.memory.kda_states == 2 * 8 * 8 * 4  # heads, key, value channels, float32
    assert summary.memory.kda_windows == 3 * 16 * 3 * 2  # convolutions, channels, width - 1, bfloat16
    assert summary.memory.mla_per_token == (12 + 4) * 2
    assert summary.notes == ()
    assert summary.dtypes["F32"] == (3, (2 + 16 + 4) * 4)  # A_log, dt_bias, the router's bias


def test_memory_is_that_of_the_model_s_cache():
    import equinox as eqx
    import jax
    import jax.random as jr

    from kimi_zoo.checkpoints.configs import read_config
    from kimi_zoo.models.kimi_linear import KimiLinear

    config, _ = read_config(TINY)
    model = eqx.filter_eval_shape(KimiLinear, config, key=jr.key(0))
    cache = eqx.filter_eval_shape(lambda m: m.init_cache(1, 100), model)
    float32_bytes = sum(leaf.size * 4 for leaf in jax.tree.leaves(cache.layers))
    memory = summarize(TINY).memory  # windows and latents in the stored dtype, bfloat16
    assert memory.kda_states + 2 * memory.kda_windows + 2 * 100 * memory.mla_per_token == float32_bytes


def test_report_for_people(capsys):
    assert cli.main(["inspect", str(TINY)]) == 0
    out = capsys.readouterr().out
    for line in (
        "  Kimi Linear (model_type kimi_linear)",
        "  2 of 4 experts per token",
        "  K m",
        "  K  KDA, then dense MLP: 1 layer",
        "  m  MLA, then mixture of experts: 1 layer",
        "  KDA  512 B of float32 states and 288 B of convolution windows, whatever its length",
        "  MLA  32 B of latents per token, 16.4 kB at 512 tokens",
        "beside them: tokenizer.json, tokenizer_config.json, generation_config.json",
    ):
        assert line in out.splitlines()
    assert "self_attn" not in out


def test_json_report(capsys):
    assert cli.main(["inspect", str(TINY), "--json", "--tensors"]) == 0
    report = json.loads(capsys.readouterr().out)
    summary = summarize(TINY)
    documented = (
        "path format run model_type loaded config quantization files companions pattern layers parameters routing "
        "parts dtypes memory_per_sequence notes tensors"
    )
    assert " ".join(report) == documented
    assert report["pattern"] == "K m"
    assert report["parameters"] == {"total": summary.parameters, "active": summary.active}
    assert report["routing"] == {"chosen": 2, "experts": 4}
    assert sum(tensor["bytes"] for tensor in report["tensors"]) == sum(part["bytes"] for part in report["parts"])
    assert report["files"] == [{"name": "model.safetensors", "bytes": (TINY / "model.safetensors").stat().st_size}]
    assert report["tensors"][0].keys() == {"name", "dtype", "shape", "bytes", "file"}


def test_other_family_with_prediction_layers_vision_and_stacked_experts(tmp_path):
    shapes = {
        "model.word_embeddings.weight": (11, 4),
        "lm_head.weight": (11, 4),
        "model.norm.weight": (4,),
        "model.layers.0.attention.A_log": (2,),
        "model.layers.0.attention.f_proj.weight": (6, 4),
        "model.layers.0.attention.dt_bias": (6,),
        "model.layers.0.attention.v_proj.weight": (10, 4),
        "model.layers.0.mlp.up_proj.weight": (5, 4),
        "model.layers.1.self_attn.q_proj.weight": (4, 4),
        "model.layers.1.mlp.experts.gate_up_proj": (8, 4, 6),
        "model.layers.1.mlp.gate.expert_bias": (8,),
        "model.layers.2.eh_proj.weight": (4, 8),
        "model.layers.2.mlp.experts.0.up_proj.weight": (3, 4),
        "model.visual.layers.0.self_attn.q_proj.weight": (9, 9),
    }
    config = {"model_type": "odd", "text_config": {"num_hidden_layers": 2, "num_experts_per_tok": 3}}
    summary = summarize(write_checkpoint(tmp_path, shapes, config))
    assert [(layer.mixer, layer.mlp, layer.experts) for layer in summary.layers] == [
        ("kda", "dense", 0),
        ("attention", "moe", 8),
    ]
    assert parts(summary) == {
        "embedding": 44,
        "KDA": 2 + 24 + 6 + 40,
        "other attention": 16,
        "routed experts": 192,
        "router": 8,
        "dense MLP": 20,
        "norms": 4,
        "output head": 44,
        "next-token prediction": 32 + 12,
        "vision": 81,
    }
    assert summary.active == summary.parameters - 44 - 81 - 192 * 5 // 8
    assert summary.memory.kda_states == 2 * 3 * 5 * 4
    assert [note for note in summary.notes] == [
        "model_type 'odd' is not a family that this version loads (it loads: kimi_linear)."
    ]
    assert not summary.loaded


def test_quantised_weights_count_as_plain_ones(tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"
    shapes = {"model.embed_tokens.weight": (7, 4), name: (6, 4), name + "_scale_inv": (1, 1)}
    config = {
        "model_type": "kimi_linear",
        "num_hidden_layers": 1,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 8]},
    }
    dtypes = {name: np.dtype(ml_dtypes.float8_e4m3fn), name + "_scale_inv": np.dtype(np.float32)}
    summary = summarize(write_checkpoint(tmp_path, shapes, config, dtypes))
    assert summary.quantization == "fp8"
    assert parts(summary) == {"embedding": 28, "dense MLP": 24}
    assert {part.name: part.nbytes for part in summary.parts} == {"embedding": 56, "dense MLP": 24 + 4}
    assert [note for note in summary.notes if "missing: vocab_size" not in note] == []


@pytest.mark.parametrize(
    "config, note",
    [
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method 'awq'"),
        ({"quantization": {"bits": 4, "group_size": 64}}, "stored as integers in a way that is not understood"),
    ],
)
def test_unknown_quantisation_is_said_and_not_counted(tmp_path, capsys, config, note):
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    write_checkpoint(tmp_path, {name: (6, 4)}, {"model_type": "kimi_linear"} | config, {name: np.dtype(np.uint32)})
    summary = summarize(tmp_path)
    assert (summary.parameters, summary.active, parts(summary)) == (None, None, {"MLA": None})
    assert summary.dtypes == {"U32": (1, 96)}
    assert any(note in sentence for sentence in summary.notes)
    assert cli.main(["inspect", str(tmp_path)]) == 0
    assert "! " in capsys.readouterr().out


def test_one_file_without_config(tmp_path, capsys):
    write_checkpoint(tmp_path, {"some.\x1b[2Jtensor": (3, 5), "scale": ()})
    assert cli.main(["inspect", str(tmp_path / "model.safetensors"), "--tensors"]) == 0
    out = capsys.readouterr().out
    assert "16 parameters" in out and "some.�[2Jtensor   BF16     3x5     30" in out and "scalar" in out
    assert "! There is no config.json beside the weights" in out


def test_missing_layers_are_said(tmp_path):
    config = {"model_type": "kimi_linear", "num_hidden_layers": 3}
    summary = summarize(write_checkpoint(tmp_path, {"model.layers.1.mlp.up_proj.weight": (2, 3)}, config))
    assert summary.notes[1:] == ("config.json says 3 layers; tensors of 1 of them are here.",)


def test_experts_without_config_leave_active_unknown(tmp_path):
    write_checkpoint(tmp_path, {"model.layers.0.mlp.experts.0.up_proj.weight": (2, 3)})
    summary = summarize(tmp_path)
    assert (summary.parameters, summary.active) == (6, None)
    assert "How many experts a token uses is not known" in summary.notes[-1]


def test_broken_checkpoint_exits_with_2(tmp_path, capsys):
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\nsize 5\n")
    assert cli.main(["inspect", str(tmp_path)]) == 2
    assert "is a Git LFS pointer" in capsys.readouterr().err


def test_bundled_weights_are_found_by_name(tmp_path, monkeypatch):
    package = tmp_path / "site" / "kimi_zoo"
    (package / "weights" / "small-one").mkdir(parents=True)
    (package / "weights" / "small-one" / "config.json").write_text("{}")
    (package.parent / "weights" / "stray").mkdir(parents=True)
    (package.parent / "weights" / "stray" / "config.json").write_text("{}")
    monkeypatch.setattr(bundled, "__file__", str(package / "bundled.py"))
    monkeypatch.chdir(tmp_path)
    assert bundled.bundled_weights() == {"small-one": package / "weights" / "small-one"}
    assert (
        bundled.find_weights("small-one") == bundled.find_weights("weights/small-one") == package / "weights/small-one"
    )
    (package.parent / "pyproject.toml").touch()  # now it is a checkout
    assert list(bundled.bundled_weights()) == ["small-one", "stray"]
    (tmp_path / "small-one").mkdir()
    assert bundled.find_weights("small-one").resolve() == tmp_path / "small-one"
    with pytest.raises(CheckpointError, match=r"'org/small-one' is no file.*: small-one, stray\. Names on a hub"):
        bundled.find_weights("org/small-one")


def test_a_config_that_is_not_loaded_is_noted(tmp_path):
    config = json.loads((TINY / "config.json").read_text()) | {"tie_word_embeddings": "false", "attention_gate": 1}
    write_checkpoint(tmp_path, {"model.embed_tokens.weight": (4, 2)}, config)
    (note,) = [note for note in summarize(tmp_path).notes if "does not load" in note]
    assert "attention_gate 1 is not a field of this family" in note


def test_names_of_several_lines_keep_the_table_straight():
    assert table(("Tensor", "bytes"), [("a\nb\tc", "12")]).splitlines() == ["Tensor  bytes", "a�b�c      12"]
