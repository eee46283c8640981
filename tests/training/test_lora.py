"""LoRA: nothing changes at first, merging changes nothing, files are PEFT's."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers import TINY, assert_close
from safetensors.numpy import load_file, save_file

import kimi_zoo as kz
from kimi_zoo.checkpoints.files import CheckpointError
from kimi_zoo.training.lora import (
    Delta,
    add_lora,
    find_targets,
    has_lora,
    load_adapter,
    lora_leaves,
    merge_lora,
    save_adapter,
)
from kimi_zoo.training.quantization import quantize_frozen, whole_layers
from kimi_zoo.training.trainable import select

EVERYTHING = ("self_attn.*_proj", "*_proj_with_mqa", "mlp.*_proj", "shared_experts.*_proj", "w1", "w2", "w3")


@pytest.fixture(scope="module")
def model():
    return kz.KimiLinear(TINY, key=jr.key(2))


@pytest.fixture(scope="module")
def tuned(model):
    """Deltas everywhere that do something."""
    lora = add_lora(model, rank=3, alpha=5.0, targets=EVERYTHING, key=jr.key(0))
    fill = lambda leaf, is_delta: jr.normal(jr.key(leaf.size), leaf.shape) * 0.1 if is_delta else leaf
    return jax.tree.map(fill, lora, lora_leaves(lora))


@pytest.fixture(scope="module")
def forward():
    tokens = jr.randint(jr.key(4), (1, 5), 0, TINY.vocab_size)
    return eqx.filter_jit(lambda model: model(tokens))


def test_deltas_start_at_zero_and_cover_what_is_asked_for(model, forward):
    lora = add_lora(model, rank=2, key=jr.key(0))
    assert has_lora(lora) and not has_lora(model)
    assert_close(forward(lora), forward(model), atol=1e-6)
    assert not any(".experts." in target.leaf for target in find_targets(model, ("self_attn.*_proj",))[0])
    with pytest.raises(ValueError, match="has LoRA deltas already"):
        add_lora(lora, rank=2, key=jr.key(0))
    with pytest.raises(ValueError, match="at least 1; got 0"):
        add_lora(model, rank=0, key=jr.key(0))


def test_targets_are_counted_and_experts_go_by_both_names(model):
    _, counts = find_targets(model, ("q_proj", "gate_proj", "w1"))
    assert counts == {"q_proj": 4, "gate_proj": 1 + 3 + 3, "w1": 3}  # dense, shared and routed; routed alone
    with pytest.raises(ValueError, match=r"'xyz' matches no linear layer. There are: .*b_proj"):
        find_targets(model, ("q_proj", "xyz"))
    with pytest.raises(ValueError, match=r"all or none of the layers \[1, 2\]"):
        find_targets(model, ("model.layers.1.self_attn.q_proj",))


def test_merged_is_what_the_adapter_computes(tuned, model, forward):
    merged = merge_lora(tuned)
    assert not has_lora(merged) and jax.tree.structure(merged) == jax.tree.structure(model)
    assert float(jnp.abs(forward(tuned) - forward(model)).max()) > 0.1
    assert_close(forward(merged), forward(tuned), atol=2e-5)
    cache, (tokens,) = merged.init_cache(1, 4), jnp.asarray([[[1, 2, 3]]])
    expected, _ = merged.decode(tokens, cache)
    assert_close(tuned.decode(tokens, cache)[0], expected, atol=2e-5)  # absorbed projections read the sum


def test_merging_sums_in_float32_and_rounds_once():
    """In bfloat16 a running sum of 512 times 2**-9 would stick at a half."""
    weight = jnp.zeros((1, 4, 8), jnp.bfloat16)
    linear = eqx.tree_at(lambda layer: layer.weight, kz.Linear(8, 4, key=jr.key(0)), weight)
    delta = Delta(jnp.ones((1, 512, 8), jnp.bfloat16), jnp.full((1, 4, 512), 2.0**-9, jnp.bfloat16), 1.0)
    from kimi_zoo.training.lora import LoRALinear

    merged = merge_lora(LoRALinear(linear, delta))
    assert merged.weight.dtype == jnp.bfloat16 and np.all(np.asarray(merged.weight, np.float32) == 1.0)


def test_adapter_files_are_pefts_and_come_back(tuned, model, forward, tmp_path):
    save_adapter(tuned, tmp_path / "adapter", base="some/model")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA" and config["r"] == 3 and config["lora_alpha"] == pytest.approx(5.0)
    assert config["base_model_name_or_path"] == "some/model" and config["task_type"] == "CAUSAL_LM"
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    root = "base_model.model.model.layers.1.block_sparse_moe.experts.4.w2"
    assert tensors[f"{root}.lora_A.weight"].shape == (3, TINY.moe_intermediate_size)
    assert tensors[f"{root}.lora_B.weight"].shape == (TINY.hidden_size, 3)
    for name in tensors:  # as PEFT finds the modules: a target is the end of a module's name
        module = name.removeprefix("base_model.model.").rsplit(".lora_", 1)[0]
        assert module in config["target_modules"]
    weight = kz.to_tensors(model)["model.layers.1.block_sparse_moe.experts.4.w2.weight"]
    fused = kz.to_tensors(merge_lora(tuned))["model.layers.1.block_sparse_moe.experts.4.w2.weight"]
    by_hand = weight + 5 / 3 * tensors[f"{root}.lora_B.weight"] @ tensors[f"{root}.lora_A.weight"]
    assert_close(fused, by_hand, atol=1e-6)
    assert_close(forward(load_adapter(model, tmp_path / "adapter")), forward(tuned), atol=1e-6)


def test_adapters_have_what_peft_looks_for_in_transformers_modules(model, forward, tmp_path):
    """There, a layer's experts are two parameters, and read together; `benchmarks/read_adapter.py` runs PEFT itself."""
    lora = add_lora(model, rank=2, alpha=6.0, targets=("w1", "f_a_proj"), key=jr.key(0))
    lora = jax.tree.map(lambda leaf, is_delta: leaf + 0.1 if is_delta else leaf, lora, lora_leaves(lora))
    save_adapter(lora, tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    experts = [f"model.layers.{layer}.mlp.experts" for layer in (1, 2, 3)]
    assert config["target_parameters"] == [f"{e}.{p}" for e in experts for p in ("down_proj", "gate_up_proj")]
    assert config["rank_pattern"] == {"experts.gate_up_proj": 4}
    assert config["alpha_pattern"] == {"experts.gate_up_proj": pytest.approx(12.0)}
    assert "model.layers.1.self_attn.forget_gate.f_a_proj" in config["target_modules"]
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    root = "base_model.model.model.layers.2.block_sparse_moe.experts.1"
    assert np.any(tensors[f"{root}.w1.lora_B.weight"]) and not np.any(tensors[f"{root}.w2.lora_B.weight"])
    assert_close(forward(load_adapter(model, tmp_path / "adapter")), forward(lora), atol=1e-6)
    theirs = {
        name.replace(".block_sparse_moe.", ".mlp.").replace(".f_a", ".forget_gate.f_a"): t
        for name, t in tensors.items()
    }
    save_file(theirs, tmp_path / "adapter" / "adapter_model.safetensors")
    assert_close(forward(load_adapter(model, tmp_path / "adapter")), forward(lora), atol=1e-6)
    config["alpha_pattern"] = {"q_proj": 3}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="`alpha_pattern` gives 'q_proj' a value of its own"):
        load_adapter(model, tmp_path / "adapter")


@pytest.mark.parametrize("kind", [None, "int8"])
def test_what_trained_beside_deltas_comes_back(model, tmp_path, kind):
    """Norms, single layers of a stack, experts, the balancing bias; layers that stay plain beside quantised ones."""
    lora = add_lora(model, rank=2, targets=("q_proj", "w1"), key=jr.key(0))
    train = ("A_log", "model.norm.weight", "model.layers.1.*q_proj", "w2", "lm_head")
    lora = quantize_frozen(lora, kind, trains=select(lora, train=train)) if kind else lora
    beside = select(lora, train=train)
    beside = whole_layers(lora, beside) if kind else beside
    bias = lambda m: m.layers.sections[1][0].mlp.router.score_bias
    beside = eqx.tree_at(bias, beside, True)
    change = lambda leaf, choice: leaf + 0.1 if np.any(choice) and not np.ndim(choice) else leaf
    lora = jax.tree.map(change, lora, beside)
    save_adapter(lora, tmp_path / "adapter", beside=beside)
    read = load_adapter(quantize_frozen(model, kind) if kind else model, tmp_path / "adapter")
    tensors, expected = (kz.to_tensors(merge_lora(m)) for m in (read, lora))
    assert all(np.array_equal(tensors[name], expected[name]) for name in expected)
    left, first = "model.layers.1.block_sparse_moe.gate.e_score_correction_bias", kz.to_tensors(model)
    assert not np.array_equal(tensors[left], first[left])


def test_adapters_that_do_not_fit(tuned, model, tmp_path):
    save_adapter(tuned, tmp_path / "adapter")
    file, config = tmp_path / "adapter" / "adapter_model.safetensors", tmp_path / "adapter" / "adapter_config.json"
    tensors = load_file(file)
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    without = {key: value for key, value in tensors.items() if key != name}
    for changed, message in (
        (without, "lacks .*layers.1.self_attn.q_proj.lora_A"),
        (tensors | {name: np.ones((2, 2), np.float32)}, r"lora_A should have shape \[3, 16\]"),
        (tensors | {"base_model.model.extra.lora_A.weight": np.ones(2, np.float32)}, "fit no layer.*extra"),
    ):
        save_file(changed, file)
        with pytest.raises(CheckpointError, match=message):
            load_adapter(model, tmp_path / "adapter")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"use_dora": True}))
    with pytest.raises(CheckpointError, match="no plain LoRA adapter"):
        load_adapter(model, tmp_path / "adapter")
    with pytest.raises(CheckpointError, match="no LoRA deltas to save"):
        save_adapter(model, tmp_path / "other")


def test_gradients_are_those_of_the_full_weights_seen_through_the_factors(model, tuned):
    """For `W + s B A`: dB = s dW A^T and dA = s B^T dW."""
    tokens = jr.randint(jr.key(5), (1, 6), 0, TINY.vocab_size)
    loss = lambda model: jnp.sum(jax.nn.log_softmax(model(tokens))[0, :, 3])
    gradient = eqx.filter_jit(eqx.filter_grad(loss))
    full, thin = gradient(merge_lora(tuned)), gradient(tuned)
    section, position, _ = model.layers.locate(1)
    block = lambda tree: tree.layers.sections[section][position]
    for read, weight in (
        (lambda b: b.mixer.query_proj.delta, lambda b: b.mixer.query_proj.weight),
        (lambda b: b.mlp.experts.down_delta, lambda b: b.mlp.experts.down_proj),
    ):
        delta, actual, whole = read(block(tuned)), read(block(thin)), weight(block(full))
        transpose = lambda x: jnp.swapaxes(x, -1, -2)
        assert_close(actual.b, delta.scale * whole @ transpose(delta.a), rtol=1e-4)
        assert_close(actual.a, delta.scale * transpose(delta.b) @ whole, rtol=1e-4)
