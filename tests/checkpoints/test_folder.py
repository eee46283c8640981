"""Checkpoint folders <-> models: strict loading, exact saving, every way a tensor may be published."""

import json
import logging
import re
import shutil
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import ml_dtypes
import numpy as np
import pytest
from helpers import DATA, TINY, tiny
from safetensors.numpy import load_file, save_file

import kimi_zoo as kz
from kimi_zoo.checkpoints.files import CheckpointError
from kimi_zoo.checkpoints.safetensors import open_checkpoint
from kimi_zoo.checkpoints.summary import summarize

GOLDENS = DATA / "goldens"
MODEL = kz.KimiLinear(TINY, key=jr.key(3))


@pytest.fixture
def saved(tmp_path):
    """A random tiny model, saved, and the tensors of its file."""
    kz.save_pretrained(MODEL, tmp_path / "model")
    return MODEL, tmp_path / "model", load_file(tmp_path / "model" / "model.safetensors")


def rewrite(folder, tensors, **config):
    data = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(data))
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, folder / "model.safetensors")


def same(first, second):
    first, second = kz.to_tensors(first), kz.to_tensors(second)
    assert first.keys() == second.keys()
    return all(np.array_equal(first[name], second[name]) and first[name].dtype == second[name].dtype for name in first)


@pytest.mark.parametrize("name", ["kimi_linear_tiny", "kimi_linear_published"])
def test_load_then_save_is_identical(name, tmp_path):
    model = kz.from_pretrained(GOLDENS / name)
    (tmp_path / "source").mkdir()
    kz.save_pretrained(model, tmp_path / "copy", max_shard_size="200KB")
    with open_checkpoint(GOLDENS / name) as old, open_checkpoint(tmp_path / "copy") as new:
        assert set(old) == set(new)
        assert old.total_bytes == new.total_bytes
        for tensor in old:
            a, b = old.read(tensor), new.read(tensor)
            assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes(), tensor
        assert new.metadata == {"format": "pt"} and len(new.files) > 1
    read = lambda folder: json.loads((folder / "config.json").read_text())
    assert read(GOLDENS / name) == read(tmp_path / "copy")
    assert same(model, kz.from_pretrained(tmp_path / "copy"))


def test_from_scratch_and_back(saved):
    model, folder, tensors = saved
    assert same(model, kz.from_pretrained(folder))
    assert tensors["model.layers.0.self_attn.A_log"].shape == (1, 1, 2, 1)
    assert tensors["model.layers.0.self_attn.q_conv1d.weight"].shape == (16, 1, 4)
    assert tensors["model.layers.0.mlp.gate_proj.weight"].shape == (20, 16)
    assert tensors["model.layers.1.block_sparse_moe.experts.4.w2.weight"].shape == (16, 9)


def test_dtypes(saved, tmp_path):
    _, folder, tensors = saved
    low = {n: v if v.ndim == 1 or "A_log" in n else v.astype(ml_dtypes.bfloat16) for n, v in tensors.items()}
    rewrite(folder, low)
    stored = kz.from_pretrained(folder)
    assert stored.layers[0].mixer.query_proj.weight.dtype == jnp.bfloat16
    assert stored.norm.weight.dtype == jnp.float32
    half = kz.from_pretrained(folder, dtype="float16")
    assert half.norm.weight.dtype == half.embedding.weight.dtype == jnp.float16
    for model in (stored, half, kz.from_pretrained(folder, dtype=jnp.bfloat16)):
        mixer, router = model.layers[1].mixer, model.layers[1].mlp.router
        assert mixer.a_log.dtype == mixer.dt_bias.dtype == router.score_bias.dtype == jnp.float32
        assert np.array_equal(mixer.a_log, tensors["model.layers.1.self_attn.A_log"].reshape(-1))
    kz.save_pretrained(half, tmp_path / "out", dtype="bfloat16")
    out = load_file(tmp_path / "out" / "model.safetensors")
    assert out["model.norm.weight"].dtype == ml_dtypes.bfloat16
    assert out["model.layers.1.self_attn.dt_bias"].dtype == np.float32
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_shapes_and_names_in_all_spellings(saved):
    """Fixture kda_shapes: both variants hold the same parameters; the last tap multiplies the current token."""
    a, b = (load_file(DATA / "field_cases" / "kda_shapes" / f"variant_{letter}.safetensors") for letter in "ab")
    squeeze = lambda tensors: {name: value.reshape(-1) for name, value in tensors.items()}
    assert all(np.array_equal(squeeze(a)[name], squeeze(b)[name]) for name in a)
    model, folder, tensors = saved
    other = {}
    for name, value in tensors.items():
        if name.endswith("A_log"):
            value = value.reshape(-1)
        elif "conv1d" in name:
            value = value[:, 0]
        elif name.endswith("dt_bias"):
            value = value.reshape(2, 8)
        other[name.replace("layers.0.mlp.", "layers.0.block_sparse_moe.")] = value
    rewrite(folder, other)
    loaded = kz.from_pretrained(folder)
    for got, want in zip(jax.tree.leaves(loaded), jax.tree.leaves(model), strict=True):
        assert np.array_equal(got, want)
    assert {name: value.shape for name, value in kz.to_tensors(loaded).items()} == {
        n: v.shape for n, v in other.items()
    }


def test_layers_stored_in_different_ways_are_saved_so(saved, tmp_path):
    """Dtype, name and shape may differ from layer to layer: such layers get a section of their own."""
    _, folder, tensors = saved
    low = {name: value.astype(ml_dtypes.bfloat16) if value.ndim > 1 else value for name, value in tensors.items()}
    low |= {name: value for name, value in tensors.items() if name.endswith(("A_log", "dt_bias"))}
    name = "model.layers.2.self_attn.q_proj.weight"
    low |= {name: tensors[name], "model.layers.1.self_attn.A_log": tensors["model.layers.1.self_attn.A_log"].reshape(2)}
    rewrite(folder, low)
    model = kz.from_pretrained(folder)
    assert model.layers[2].mixer.query_proj.weight.dtype == jnp.float32
    assert model.layers[1].mixer.query_proj.weight.dtype == jnp.bfloat16
    kz.save_pretrained(model, tmp_path / "copy")
    copy = load_file(tmp_path / "copy" / "model.safetensors")
    assert copy.keys() == low.keys()
    for name, value in low.items():
        got = copy[name]
        assert (got.dtype, got.shape, got.tobytes()) == (value.dtype, value.shape, value.tobytes()), name
    assert len(kz.from_pretrained(folder, dtype="float32").layers.sections) == len(MODEL.layers.sections)


def test_what_cannot_be_held_as_stored_is_said(saved, caplog):
    _, folder, tensors = saved
    one = "model.layers.1.block_sparse_moe.experts.3.w1.weight"
    rewrite(folder, tensors | {one: tensors[one].astype(np.float16), "model.norm.weight": np.ones(16, np.float64)})
    model = kz.from_pretrained(folder)
    (record,) = caplog.records
    assert "2 parameters are stored as float64, or some of their experts in another" in record.getMessage()
    assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {np.dtype(np.float32)}


def test_some_parameters_are_stored_in_float32_always(tmp_path):
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), MODEL)
    kz.save_pretrained(low, tmp_path / "model")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    wide = {name.rsplit(".", 1)[-1] for name, value in stored.items() if value.dtype == np.float32}
    assert wide == {"A_log", "dt_bias", "e_score_correction_bias"}


def test_direct_and_mixed_gates(tmp_path):
    for decay, output in (("direct", "direct"), ("direct", "low_rank"), ("low_rank", "direct")):
        model = kz.KimiLinear(tiny(kda_decay_gate=decay, kda_output_gate=output), key=jr.key(4))
        kz.save_pretrained(model, tmp_path / f"{decay}-{output}")
        loaded = kz.from_pretrained(tmp_path / f"{decay}-{output}")
        assert same(model, loaded) and loaded.config == model.config
    names = kz.to_tensors(kz.from_pretrained(tmp_path / "direct-low_rank"))
    assert "model.layers.0.self_attn.f_proj.weight" in names and "model.layers.0.self_attn.g_a_proj.weight" in names


def test_gated_low_rank_attention(tmp_path):
    config = tiny(q_lora_rank=5, mla_output_gate="element_wise", num_shared_experts=0)
    model = kz.KimiLinear(config, key=jr.key(4))
    kz.save_pretrained(model, tmp_path / "model")
    assert same(model, kz.from_pretrained(tmp_path / "model"))


def test_multimodal_root_and_vision_tensors(saved, caplog):
    model, folder, tensors = saved
    tokens = jnp.asarray([[3, 4, 5]])
    wrapped = {f"language_model.{name}": value for name, value in tensors.items()}
    rewrite(folder, wrapped | {"vision_tower.blocks.0.weight": np.ones((2, 2), np.float32)})
    with caplog.at_level(logging.INFO, "kimi_zoo"):
        loaded = kz.from_pretrained(folder)
    assert [r.getMessage() for r in caplog.records if "vision" in r.getMessage()] == [
        "Left out 1 tensors of the vision part, such as vision_tower.blocks.0.weight."
    ]
    assert np.array_equal(loaded(tokens), model(tokens))
    assert "language_model.model.norm.weight" in kz.to_tensors(loaded)
    kz.save_pretrained(loaded, folder.parent / "text")
    kz.save_pretrained(loaded, folder.parent / "whole", keep_left_out=True, max_shard_size="20KB")
    with open_checkpoint(folder) as source, open_checkpoint(folder.parent / "whole") as whole:
        assert set(source) == set(whole)
        assert np.array_equal(whole.read("vision_tower.blocks.0.weight"), np.ones((2, 2)))
    with open_checkpoint(folder.parent / "text") as text:
        assert "vision_tower.blocks.0.weight" not in text


def test_left_out_tensors_need_the_folder_they_are_in(saved):
    model, folder, _ = saved
    with pytest.raises(CheckpointError, match="was not loaded from a folder"):
        kz.save_pretrained(model, folder.parent / "copy", keep_left_out=True)
    loaded = kz.from_pretrained(folder)
    folder.rename(folder.parent / "elsewhere")
    with pytest.raises(CheckpointError, match="model, which is gone"):
        kz.save_pretrained(loaded, folder.parent / "copy", keep_left_out=True)
    assert not (folder.parent / "copy").exists()


def test_prediction_layers_are_left_out(saved, caplog):
    model, folder, tensors = saved
    rewrite(
        folder, tensors | {"model.layers.4.eh_proj.weight": np.ones((2, 2), np.float32)}, num_nextn_predict_layers=1
    )
    with caplog.at_level(logging.INFO, "kimi_zoo"):
        assert same(model, kz.from_pretrained(folder))
    assert "layers past num_hidden_layers" in caplog.text


def test_tied_embeddings(tmp_path, caplog):
    model = kz.KimiLinear(tiny(tie_word_embeddings=True), key=jr.key(5))
    kz.save_pretrained(model, tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    assert np.array_equal(tensors["lm_head.weight"], embedding)  # for readers that do not tie
    assert same(model, kz.from_pretrained(tmp_path / "model"))
    rewrite(tmp_path / "model", {name: value for name, value in tensors.items() if name != "lm_head.weight"})
    without = kz.from_pretrained(tmp_path / "model")
    assert same_arrays(without, model) and "lm_head.weight" not in kz.to_tensors(without)
    rewrite(tmp_path / "model", tensors)
    equal = kz.from_pretrained(tmp_path / "model")
    assert equal.head is None and not caplog.records
    assert "lm_head.weight" in kz.to_tensors(equal)  # saved as it came
    rewrite(tmp_path / "model", tensors | {"lm_head.weight": embedding + 1})
    assert same_arrays(kz.from_pretrained(tmp_path / "model"), equal)
    assert "differs from model.embed_tokens.weight though the config ties them" in caplog.text


def same_arrays(first, second):
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True))


def test_tied_head_of_the_fixture():
    tensors = load_file(DATA / "field_cases" / "tied_missing_head" / "model.safetensors")
    (embedding,) = (value for name, value in tensors.items() if "embed" in name)
    table = eqx.tree_at(lambda e: e.weight, kz.Embedding(3, 2, std=1.0, key=jr.key(0)), jnp.asarray(embedding))
    assert table.attend(jnp.asarray([1.0, 1.0])).tolist() == [3, 7, 11]


def test_every_problem_is_listed(saved):
    _, folder, tensors = saved
    del tensors["model.norm.weight"]
    tensors["model.layers.0.self_attn.q_proj.weight"] = np.ones((3, 5), np.float32)
    tensors["model.layers.1.block_sparse_moe.experts.1.w1.weight"] = np.ones((9, 17), np.float32)
    tensors["model.layers.2.self_attn.A_log"] = np.ones((1, 1, 3, 1), np.float32)
    tensors["model.extra"] = np.ones(3, np.float32)
    rewrite(folder, tensors)
    with pytest.raises(CheckpointError) as error:
        kz.from_pretrained(folder)
    text = str(error.value)
    for part in (
        "model.norm.weight is missing; expected shape [16]",
        "model.layers.0.self_attn.q_proj.weight has shape [3, 5]; expected [16, 16]",
        "model.layers.1.block_sparse_moe.experts.1.w1.weight has shape [9, 17]; expected [9, 16]",
        "model.layers.2.self_attn.A_log has shape [1, 1, 3, 1]; expected [1, 1, 2, 1] or [2]",
        "model.extra [3] is not expected",
    ):
        assert part in text, text


def test_no_model_in_the_folder(tmp_path, saved):
    with pytest.raises(CheckpointError, match="is no file or folder here, nor the name of bundled weights"):
        kz.from_pretrained(tmp_path / "nowhere")
    _, folder, _ = saved
    rewrite(folder, {"transformer.wte.weight": np.ones((2, 2), np.float32)})
    with pytest.raises(CheckpointError, match="should hold one tensor model"):
        kz.from_pretrained(folder)


def test_an_existing_folder_is_not_overwritten_unasked(saved):
    model, folder, _ = saved
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        kz.save_pretrained(model, folder)
    kz.save_pretrained(model, folder, overwrite=True)
    assert same(model, kz.from_pretrained(folder))


def test_saving_over_the_folder_one_loaded_from(saved):
    _, folder, _ = saved
    model = kz.from_pretrained(folder)
    kz.save_pretrained(model, folder, overwrite=True)
    assert same(model, kz.from_pretrained(folder))


def test_files_of_the_tokenizer_are_carried(saved, tmp_path):
    _, folder, _ = saved
    shutil.copy(DATA / "field_cases" / "gen_eos_list" / "generation_config.json", folder)
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "modeling.py").write_text("raise SystemExit")
    kz.save_pretrained(kz.from_pretrained(folder), tmp_path / "copy")
    assert {path.name for path in (tmp_path / "copy").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer_config.json",
    }


def with_mixer(**changes):
    """Puts a mixer of the sizes of `TINY` with other settings into a block."""
    mixer = kz.KimiDeltaAttention(16, 2, 8, key=jr.key(0), **changes)
    return lambda block: eqx.tree_at(lambda b: b.mixer, block, mixer)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (
            lambda b: kz.Linear(16, 16, key=jr.key(0)),
            r"layers\[1\] is a Linear; the configuration makes it a KimiBlock",
        ),
        (
            with_mixer(safe_gate=True, lower_bound=-5.0),
            r"lower_bound is -5\.0;",
        ),
        (with_mixer(bias=True), r"query_proj\.bias is float32 \[16\]; .* None"),
        (with_mixer(conv_bias=True), r"query_conv\.bias is float32 \[16\]"),
        (with_mixer(use_qk_l2norm=False), "use_qk_l2norm is False;"),
        (
            lambda b: eqx.tree_at(lambda b: b.mlp.router, b, kz.Router(16, 5, top_k=3, scale=2.446, key=jr.key(0))),
            r"router\.top_k is 3; the configuration makes it 2",
        ),
        (
            lambda b: eqx.tree_at(lambda b: b.mlp.experts, b, kz.Experts(16, 11, 5, key=jr.key(0))),
            r"experts\.gate_proj is float32 \[5, 11, 16\]; .* \[5, 9, 16\]",
        ),
        (lambda b: eqx.tree_at(lambda b: b.mlp.router.score_bias, b, None), r"score_bias is None; .* float32 \[5\]"),
    ],
)
def test_a_model_unlike_its_configuration_is_not_written(tmp_path, layer, message):
    model = kz.replace_layer(MODEL, 1, layer)
    with pytest.raises(CheckpointError, match=message):
        kz.save_pretrained(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", ["int8", "bool", "float8_e4m3fn", "float64", "half a float", 3])
def test_weights_have_a_dtype_that_is_published(saved, tmp_path, dtype):
    model, folder, _ = saved
    with pytest.raises(CheckpointError, match=f"is float32, bfloat16, float16 or None .as stored.; got {dtype!r}"):
        kz.save_pretrained(model, tmp_path / "out", dtype=dtype)
    with pytest.raises(CheckpointError, match="`dtype` of weights is"):
        kz.from_pretrained(folder, dtype=dtype)
    assert not (tmp_path / "out").exists()


def test_a_config_with_too_many_layers_is_refused_at_once(saved):
    _, folder, tensors = saved
    config = json.loads((folder / "config.json").read_text())
    rewrite(folder, tensors, **config | {"num_hidden_layers": 10_000})
    with pytest.raises(CheckpointError, match=r"tensors of 4 layers are here, but in config\.json .* is 10000"):
        kz.from_pretrained(folder)


def test_layers_the_config_does_not_count_are_no_prediction_layers(saved):
    _, folder, tensors = saved
    rewrite(folder, tensors, num_hidden_layers=2, linear_attn_config={"kda_layers": [1, 2], "full_attn_layers": []})
    config = json.loads((folder / "config.json").read_text())
    config["linear_attn_config"] |= {"num_heads": 2, "head_dim": 8, "short_conv_kernel_size": 4}
    for predicted, text in ((0, r"num_hidden_layers is 2\."), (1, "is 2 and num_nextn_predict_layers 1")):
        rewrite(folder, tensors, **config | {"num_nextn_predict_layers": predicted})
        with pytest.raises(CheckpointError, match=f"tensors of 4 layers are here, .*{text}"):
            kz.from_pretrained(folder)
    notes = summarize(folder).notes
    assert "Tensors of 4 layers are here; config.json says 2 and 1 for next-token prediction." in notes


def test_tensors_of_a_gradient(saved):
    model, _, tensors = saved
    grads = eqx.filter_grad(lambda m: jnp.sum(m(jnp.asarray([[3, 4, 5]]))))(model)
    named = kz.to_tensors(grads)
    assert {name: value.shape for name, value in named.items()} == {n: v.shape for n, v in tensors.items()}
    frozen = eqx.tree_at(lambda m: m.norm.weight, grads, None)
    assert set(tensors) - set(kz.to_tensors(frozen)) == {"model.norm.weight"}


def test_balancing_bias_survives_to_the_bit(saved, tmp_path):
    model, _, _ = saved
    where = lambda m: m.layers.sections[1][0].mlp.router.score_bias
    values = jnp.asarray([0.1, 0.2, 0.3, 0.4, 1e-30])
    model = eqx.tree_at(where, model, jnp.broadcast_to(values, where(model).shape))
    kz.save_pretrained(model, tmp_path / "out", dtype="bfloat16")
    assert np.array_equal(where(kz.from_pretrained(tmp_path / "out", dtype="bfloat16")), where(model))


def test_spread_over_a_mesh(saved):
    model, folder, _ = saved
    mesh = jax.make_mesh((2,), ("fsdp",), devices=jax.devices()[:2])
    loaded = kz.from_pretrained(folder, mesh=mesh)
    assert same_arrays(loaded, model)
    experts = loaded.layers.sections[1][0].mlp.experts.gate_proj
    assert {shard.data.shape for shard in experts.addressable_shards} == {(2, 5, 9, 8)}
    tokens = jnp.asarray([[3, 4, 5]])
    assert np.allclose(eqx.filter_jit(loaded)(tokens), model(tokens), atol=1e-5)


def test_fp8_weights_are_dequantised(saved):
    """Block-quantised projections, the way such checkpoints are published."""
    _, folder, tensors = saved
    name = "model.layers.0.self_attn.q_proj.weight"
    quantised = (tensors[name] * 4).astype(ml_dtypes.float8_e4m3fn)
    scale = np.full((2, 2), 0.25, np.float32)
    settings = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [12, 12]}
    rewrite(folder, tensors | {name: quantised, f"{name}_scale_inv": scale}, quantization_config=settings)
    loaded = kz.from_pretrained(folder, dtype="float32")
    assert np.array_equal(loaded.layers[0].mixer.query_proj.weight, quantised.astype(np.float32) * 0.25)


def test_loading_takes_the_memory_of_the_weights():
    """0.2 GB of weights, by the script that measures it for the docs: 1.04 times; more for small overheads."""
    script = DATA.parents[1] / "benchmarks" / "load.py"
    done = subprocess.run([sys.executable, script, "--gigabytes", "0.2"], capture_output=True, text=True, check=True)
    assert float(re.search(r"import: ([0-9.]+) times the weights", done.stdout)[1]) < 1.15
