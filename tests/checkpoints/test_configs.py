"""Reading and writing `config.json` in both published styles, and refusing what would change the computation."""

import json

import pytest
from helpers import DATA, TINY, tiny

from kimi_zoo.checkpoints.configs import SPELLINGS, parse_config, read_config, write_config
from kimi_zoo.checkpoints.files import CheckpointError
from kimi_zoo.models.kimi_linear import KIMI_LINEAR_48B_A3B

FIXTURES = DATA / "field_cases"


def fixture(name):
    return json.loads((FIXTURES / name / "config.json").read_text())


def published(name):
    return json.loads((DATA / "goldens" / name / "config.json").read_text())


def test_layer_numbers_are_one_based_and_other_spellings_read():
    config = parse_config(fixture("kimi_layer_lists"))
    assert config.layer_kinds == ("kda", "kda", "kda", "mla", "kda", "kda", "mla")
    assert (config.num_experts, config.num_experts_per_token, config.moe_renormalize) == (8, 2, True)
    assert config.model_max_length == 256


def test_a_layer_in_neither_list_has_full_attention():
    data = fixture("kimi_layer_lists")
    data["linear_attn_config"]["full_attn_layers"] = []
    assert parse_config(data).layer_kinds == ("kda", "kda", "kda", "mla", "kda", "kda", "mla")


def test_both_styles():
    config = parse_config(published("kimi_linear_tiny"), complete=True)
    assert config.layer_kinds == ("kda",) * 4 + ("mla",) + ("kda",) * 3 + ("mla",)
    assert config.mlp_kinds == ("dense",) + ("moe",) * 8
    assert (config.linear_num_heads, config.linear_head_dim, config.topk_group) == (3, 16, 2)
    config = parse_config(published("kimi_linear_published"), complete=True)
    assert config.layer_kinds == ("kda", "kda", "kda", "mla") * 2
    assert (config.eos_token_id, config.routed_scaling_factor) == (251, 2.446)


def test_the_preset_is_the_published_model():
    """Sizes as in the config.json of Kimi-Linear-48B-A3B."""
    data = {
        "model_type": "kimi_linear",
        "vocab_size": 163840,
        "hidden_size": 2304,
        "num_hidden_layers": 27,
        "intermediate_size": 9216,
        "num_attention_heads": 32,
        "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
            "kda_layers": [i for i in range(1, 28) if i not in (4, 8, 12, 16, 20, 24, 27)],
            "head_dim": 128,
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "mla_use_nope": True,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "num_shared_experts": 1,
        "moe_intermediate_size": 1024,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.446,
        "rms_norm_eps": 1e-05,
        "model_max_length": 1048576,
        "bos_token_id": 163584,
        "eos_token_id": 163586,
        "pad_token_id": 163839,
    }
    assert parse_config(data, complete=True) == KIMI_LINEAR_48B_A3B


@pytest.mark.parametrize("name", ["kimi_linear_tiny", "kimi_linear_published"])
def test_written_back_unchanged(name):
    data = published(name)
    assert write_config(parse_config(data), data, data["dtype"]) == data


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mlp_kinds": ("dense", "moe", "dense", "moe")},
        {"mlp_kinds": ("dense",) * 4, "num_experts": 0},
        {"kda_decay_gate": "direct", "kda_output_gate": "direct", "kda_safe_gate": True, "kda_lower_bound": -4.0},
        {"q_lora_rank": 5, "mla_output_gate": "head_wise", "eos_token_id": (2, 3), "tie_word_embeddings": True},
        {"expert_swiglu_limit_list": (None, 4.0, 4.0, 7.0)},
        {"pad_token_id": None, "linear_conv_kernel_dim": 0},
    ],
)
def test_written_from_scratch_and_read_back(changes):
    config = tiny(**changes)
    data = write_config(config, None, "float32")
    assert json.loads(json.dumps(data)) == data
    assert parse_config(data, complete=True) == config
    data["use_cache"] = False
    other = write_config(tiny(**changes, rms_norm_eps=1e-3), data, "bfloat16")  # changed since: inert fields stay
    assert other["use_cache"] is False and other["torch_dtype"] == "bfloat16"
    assert parse_config(other, complete=True) == tiny(**changes, rms_norm_eps=1e-3)


@pytest.mark.parametrize(
    "field", ["num_experts_per_token", "moe_renormalize", "num_expert_group", "num_experts", "model_max_length"]
)
def test_two_names_of_one_setting(field):
    data = write_config(TINY, None, "float32")
    usual, other = SPELLINGS[field][:2]
    renamed = {other if name == usual else name: value for name, value in data.items()}
    assert parse_config(renamed, complete=True) == TINY
    assert parse_config(data | {other: data[usual]}) == TINY
    with pytest.raises(ValueError, match=f"one setting with different values: {usual} .*, {other} 77"):
        parse_config(data | {other: 77})


def test_unknown_and_unimplemented_fields_are_named():
    with pytest.raises(ValueError, match="hidden_act 'situ_v9' is not implemented, only 'silu'"):
        parse_config(fixture("unsupported_field"))
    data = write_config(TINY, None, "float32")
    for change, message in (
        ({"attention_gate": True}, "attention_gate True is not a field of this family that is known"),
        ({"mla_use_nope": False}, "mla_use_nope False is not implemented"),
        ({"routed_scaling_factor": float("nan")}, "routed_scaling_factor must be finite"),
        ({"num_key_value_heads": 1}, "num_key_value_heads 1 must equal num_attention_heads 3"),
        ({"qk_head_dim": 12}, "qk_head_dim 12 is not"),
        ({"layer_types": ["linear_attention"] * 4}, "name different layers"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types names 3 layers, num_hidden_layers says 4"),
        ({"num_hidden_layers": 3}, r"numbers layers from 1 to 3; got \[4\]"),
        ({"linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [2, 3, 4]}}, r"names layers twice: \[2\]"),
        ({"linear_attn_config": {"kda_layers": [1], "gate": "x"}}, "linear_attn_config.gate 'x' is not known"),
        ({"num_experts": None, "mlp_layer_types": ["sparse"] * 4}, "different kinds of layers are named"),
        ({"kda_safe_gate": True, "kda_lower_bound": -9.0}, r"needs a `lower_bound` in \[-5, 0\); got -9.0"),
        ({"kda_safe_gate": True}, "needs a `lower_bound`"),
        ({"gated_attention_proj_granularity_type": "odd"}, "gated_attention_proj_granularity_type 'odd'"),
        ({"hidden_size": 0}, "`hidden_size` must be a whole number of at least 1; got 0"),
        ({"num_experts_per_token": 9}, "`num_experts_per_token` 9 exceeds the 5 experts"),
        ({"expert_swiglu_limit_list": [1.0]}, "must hold one limit per layer, 4; got 1"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_config(data | change)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tie_word_embeddings", "false", "must be True or False; got 'false'"),
        ("kda_safe_gate", 1, "must be True or False; got 1"),
        ("moe_renormalize", "true", "must be True or False"),
        ("rms_norm_eps", "1e-5", "must be a finite number; got '1e-5'"),
        ("rms_norm_eps", -1e-5, "must be more than 0"),
        ("rms_norm_eps", 0, "must be more than 0"),
        ("routed_scaling_factor", "2", "must be a finite number; got '2'"),
        ("routed_scaling_factor", None, "must be a finite number; got None"),
        ("initializer_range", -1, "must be at least 0"),
        ("expert_swiglu_limit_list", ["a"] * 4, r"must be a sequence \(each: a finite number or None\) or None"),
        ("expert_swiglu_limit_list", 3, "must be a sequence"),
        ("share_expert_swiglu_limit_list", [-1.0] * 4, "must hold limits of at least 0"),
        ("eos_token_id", "x", "must be a whole number or a sequence"),
        ("eos_token_id", [1.5], "must be a whole number or a sequence"),
        ("pad_token_id", True, "must be a whole number or None"),
        ("q_lora_rank", 0, "must be a whole number of at least 1; got 0"),
        ("q_lora_rank", -3, "must be a whole number of at least 1; got -3"),
        ("kda_lower_bound", "-5", "must be a finite number or None; got '-5'"),
        ("moe_router_activation_func", ["sigmoid"], r"must be 'sigmoid' or 'softmax'; got \['sigmoid'\]"),
    ],
)
def test_fields_have_their_type(unchecked, field, value, message):
    with pytest.raises(ValueError, match=f"`{field}` {message}"):
        parse_config(write_config(TINY, None, "float32") | {field: value})


def test_nan_is_no_number():
    with pytest.raises(ValueError, match="`rms_norm_eps` must be a finite number; got nan"):
        tiny(rms_norm_eps=float("nan"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"linear_attn_config": {"kda_layers": 5}}, "linear_attn_config must be lists; got 5"),
        ({"linear_attn_config": {"kda_layers": [True, 2, 3]}}, r"numbers layers from 1 to 4; got \[True\]"),
        ({"linear_attn_config": {"kda_layers": [[1]]}}, r"numbers layers from 1 to 4; got \[\[1\]\]"),
        ({"layer_types": 3}, "layer_types must be a list with a kind per layer; got 3"),
        ({"mlp_layer_types": 3}, "mlp_layer_types must name 4 layers dense or sparse; got 3"),
        ({"mlp_layer_types": [[]] * 4}, "mlp_layer_types must name 4 layers dense or sparse"),
        ({"gated_attention_proj_granularity_type": ["x"]}, r"granularity_type \['x'\] is not implemented"),
        ({"num_hidden_layers": 10_000_000}, "num_hidden_layers must be a whole number from 1 to 10000; got 10000000"),
        ({"no_kda_lora": "false"}, "no_kda_lora must be true or false; got 'false'"),
        ({"num_nextn_predict_layers": "1"}, "num_nextn_predict_layers must be a whole number of at least 0; got '1'"),
    ],
)
def test_malformed_fields_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        parse_config(write_config(TINY, None, "float32") | change)


@pytest.mark.parametrize("value", ["absent", None])
def test_the_epsilon_of_norms_must_be_given(value):
    """The published class and transformers assume different ones."""
    data = write_config(TINY, None, "float32") | {"rms_norm_eps": value}
    if value == "absent":
        del data["rms_norm_eps"]
    with pytest.raises(ValueError, match="missing: rms_norm_eps"):
        parse_config(data, complete=True)


def test_every_problem_at_once():
    data = write_config(TINY, None, "float32") | {"foo": 1, "bar": 2}
    del data["hidden_size"]
    with pytest.raises(ValueError, match=r"(?s)foo.*bar.*missing: hidden_size"):
        parse_config(data, complete=True)


def test_a_bound_without_the_safe_gate_warns():
    with pytest.warns(UserWarning, match="lower_bound=-5.0 has no effect while the safe gate is off"):
        tiny(kda_lower_bound=-5.0)


def test_reading_a_folder(tmp_path):
    with pytest.raises(CheckpointError, match="holds no config"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match="model_type 'llama' is not a family this package has"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "kimi_linear",\n}')
    with pytest.raises(CheckpointError, match=r"config.json.*line 2"):
        read_config(tmp_path)
