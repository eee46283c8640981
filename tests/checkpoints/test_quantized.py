import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from kimi_zoo.checkpoints import quantized
from kimi_zoo.checkpoints.quantized import dequantize, dequantize_fp8, dequantize_int4, dequantize_mxfp4
from kimi_zoo.checkpoints.safetensors import CheckpointError, open_checkpoint, read_json, save_tensors

CASES = Path(__file__).parent.parent / "data" / "field_cases"
FLOAT32 = np.dtype(np.float32)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


@pytest.fixture(autouse=True, params=[2**21, 16])
def chunk(request, monkeypatch):
    """Every case in one piece and in pieces of one or a few rows."""
    monkeypatch.setattr(quantized, "CHUNK", request.param)


def fp8_config(block):
    return {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": block}}


def compressed_config(format, **weights):
    group = {"targets": ["Linear"], "weights": weights}
    quantization = {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}
    return {"quantization_config": quantization}


MXFP4 = compressed_config("mxfp4-pack-quantized", num_bits=4, type="float", group_size=32)
INT4 = compressed_config("pack-quantized", num_bits=4, type="int", group_size=32, symmetric=True, strategy="group")


def random_fp8(rng, shape):
    return rng.normal(size=shape).astype(np.float32).astype(FP8)


def opened(folder, tensors):
    save_tensors(tensors, folder)
    return open_checkpoint(folder)


class TestFieldCases:
    @pytest.mark.parametrize(
        ("case", "name"),
        [
            ("fp8_partial_block", "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"),
            ("mxfp4_group", "model.layers.1.block_sparse_moe.experts.0.w1.weight"),
        ],
    )
    def test_expected_values(self, case, name):
        config = read_json(CASES / case / "config.json")
        checkpoint = dequantize(open_checkpoint(CASES / case), config)
        assert list(checkpoint) == [name]
        ((short, expected),) = read_json(CASES / case / "expected.json").items()
        assert name.endswith(short)
        weight = checkpoint.read(name)
        assert weight.dtype == BFLOAT16
        np.testing.assert_array_equal(weight.astype(np.float32), expected)


class TestFp8:
    @pytest.mark.parametrize(("rows", "columns"), [(6, 8), (7, 10), (1, 3), (5, 4), (3, 5)])  # around blocks of 3 by 4
    def test_blocks(self, rows, columns):
        rng = np.random.default_rng(0)
        weight = random_fp8(rng, (rows, columns))
        scale = rng.uniform(0.5, 2, (-(-rows // 3), -(-columns // 4))).astype(np.float32)
        actual = dequantize_fp8(weight, scale, (3, 4), FLOAT32)
        for row, column in np.ndindex(rows, columns):
            assert actual[row, column] == np.float32(weight[row, column]) * scale[row // 3, column // 4]

    def test_stacked_experts(self):
        rng = np.random.default_rng(1)
        weight, scale = random_fp8(rng, (2, 7, 5)), rng.uniform(0.5, 2, (2, 3, 2)).astype(np.float32)
        actual = dequantize_fp8(weight, scale, (3, 4))
        for expert in range(2):
            np.testing.assert_array_equal(actual[expert], dequantize_fp8(weight[expert], scale[expert], (3, 4)))

    @pytest.mark.parametrize("shape", [(), (1,), (1, 1), (6,), (6, 1)])
    def test_one_scale_or_one_per_row(self, shape):
        rng = np.random.default_rng(2)
        weight = random_fp8(rng, (6, 5))
        scale = rng.uniform(0.5, 2, shape).astype(ml_dtypes.bfloat16)
        by_row = scale.astype(np.float32).reshape(-1, 1)
        np.testing.assert_array_equal(dequantize_fp8(weight, scale, None, FLOAT32), weight.astype(np.float32) * by_row)

    def test_rounds_once(self):
        """The product is exact in float32 here; rounding the scale to bfloat16 first would give 1.0."""
        scale = np.array([1 + 2**-8 + 2**-12], np.float32)
        assert dequantize_fp8(np.ones((1, 1), FP8), scale, None)[0, 0] == 1 + 2**-7

    @pytest.mark.parametrize(
        ("scale", "block", "message"),
        [
            (np.ones((2, 2), "f4"), (3, 4), r"shape \(7, 5\) in blocks of \(3, 4\) needs .* \(3, 2\); got \(2, 2\)"),
            (np.ones((2, 2), "f4"), None, r"needs a scale of shape \(7, 1\); got \(2, 2\)"),
            (np.ones((1, 7), "f4"), None, r"got \(1, 7\)"),
            (np.full((3, 2), np.inf, "f4"), (3, 4), "A scale holds inf; every scale must be finite"),
        ],
    )
    def test_wrong_scale(self, scale, block, message):
        with pytest.raises(CheckpointError, match=message):
            dequantize_fp8(np.ones((7, 5), FP8), scale, block)

    @pytest.mark.parametrize(
        ("config", "suffix"),
        [
            (fp8_config([3, 4]), "_scale_inv"),
            (compressed_config("float-quantized", num_bits=8, type="float", block_structure=[3, 4]), "_scale"),
        ],
    )
    def test_checkpoint(self, tmp_path, config, suffix):
        rng = np.random.default_rng(3)
        weight, scale = random_fp8(rng, (7, 5)), rng.uniform(0.5, 2, (3, 2)).astype(np.float32)
        norm = np.arange(4).astype(BFLOAT16)
        stored = {"a.weight": weight, f"a.weight{suffix}": scale, "norm.weight": norm, "a.input_scale": np.float32(2)}
        with dequantize(opened(tmp_path, stored), config) as checkpoint:
            assert set(checkpoint) == {"a.weight", "norm.weight"} and len(checkpoint) == 2
            info = checkpoint.tensors["a.weight"]
            assert (info.dtype, info.shape, info.nbytes) == (BFLOAT16, (7, 5), 70)
            assert checkpoint.total_bytes == 70 + 8
            expected = dequantize_fp8(weight, scale, (3, 4))
            np.testing.assert_array_equal(checkpoint.read("a.weight"), expected)
            np.testing.assert_array_equal(checkpoint.read_slice("a.weight", (slice(2), 3)), expected[:2, 3])
            np.testing.assert_array_equal(checkpoint.read("norm.weight"), norm)
            out = {name: np.empty(info.shape, np.float32) for name, info in checkpoint.tensors.items()}
            for name, array in out.items():
                checkpoint.read_into(name, array)
                checkpoint.release(name)
            np.testing.assert_array_equal(out["a.weight"], dequantize_fp8(weight, scale, (3, 4), FLOAT32))
            np.testing.assert_array_equal(out["norm.weight"], np.arange(4))
            with pytest.raises(ValueError, match=r"a\.weight has shape \(7, 5\); it does not fit .* \(5, 7\)"):
                checkpoint.read_into("a.weight", np.empty((5, 7), np.float32))

    def test_dequantised_before_rows_are_reordered(self, tmp_path):
        """Query, key and value rows interleaved per head: the scale follows the stored rows, not the reordered ones."""
        rng = np.random.default_rng(4)
        heads, dim = 2, 3
        weight = random_fp8(rng, (heads * 3 * dim, 4))
        scale = rng.uniform(0.5, 2, (5, 1)).astype(np.float32)  # blocks of 4 rows straddle heads and parts
        checkpoint = dequantize(
            opened(tmp_path, {"qkv.weight": weight, "qkv.weight_scale_inv": scale}), fp8_config([4, 4]), dtype=FLOAT32
        )
        query, key, value = checkpoint.read("qkv.weight").reshape(heads, 3, dim, 4).swapaxes(0, 1)
        rows = weight.astype(np.float32) * np.repeat(scale, 4, axis=0)[: len(weight)]
        for part, array in enumerate((query, key, value)):
            expected = [rows[(3 * head + part) * dim + i] for head in range(heads) for i in range(dim)]
            np.testing.assert_array_equal(array.reshape(-1, 4), expected)


class TestMxfp4:
    def test_every_code_and_exponent(self):
        """Row `r` has scale byte `r`; its columns run through all pairs of codes, even column first (low nibble)."""
        packed = np.tile(np.arange(256, dtype=np.uint8), (253, 1))
        scale = np.repeat(np.arange(253, dtype=np.uint8)[:, None], 16, axis=1)
        actual = dequantize_mxfp4(packed, scale, np.dtype(np.float64))
        for byte in (0, 1, 0x2F, 0xA7, 255):
            for exponent in (0, 1, 126, 127, 128, 252):  # from 253 on, 6 times the scale exceeds float32
                low, high = E2M1[byte & 15] * 2.0 ** (exponent - 127), E2M1[byte >> 4] * 2.0 ** (exponent - 127)
                assert tuple(actual[exponent, 2 * byte : 2 * byte + 2]) == (low, high)

    def test_bfloat16_is_exact(self):
        packed = np.tile(np.arange(256, dtype=np.uint8), (2, 1))
        scale = np.tile(np.arange(90, 122, 2, dtype=np.uint8), (2, 1))
        exact = dequantize_mxfp4(packed, scale, FLOAT32)
        np.testing.assert_array_equal(dequantize_mxfp4(packed, scale).astype(np.float32), exact)

    def test_groups_lie_along_columns(self):
        packed = np.full((3, 40), 0x22, np.uint8)  # 80 columns of 1.0: groups of 32, 32, 16
        scale = np.array([[127, 128, 129], [126, 127, 128], [120, 121, 122]], np.uint8)
        expected = 2.0 ** (np.repeat(scale.astype(np.float32), 32, axis=1)[:, :80] - 127)
        np.testing.assert_array_equal(dequantize_mxfp4(packed, scale, FLOAT32), expected)
        e8m0 = scale.view(ml_dtypes.float8_e8m0fnu)
        np.testing.assert_array_equal(dequantize_mxfp4(packed, e8m0, FLOAT32), expected)

    def test_nan_scale(self):
        with pytest.raises(CheckpointError, match="A scale holds nan"):
            dequantize_mxfp4(np.zeros((1, 16), np.uint8), np.full((1, 1), 255, np.uint8))

    def test_checkpoint_names_and_errors_at_read(self, tmp_path):
        stored = {
            "w1.weight_packed": np.zeros((3, 32), np.uint8),
            "w1.weight_scale": np.zeros((3, 2), np.uint8),
            "w2.weight_packed": np.zeros((3, 32), np.uint8),
            "w2.weight_scale": np.zeros((3, 3), np.uint8),
        }
        checkpoint = dequantize(opened(tmp_path, stored), {"text_config": MXFP4})
        assert {name: info.shape for name, info in checkpoint.tensors.items()} == {
            "w1.weight": (3, 64),
            "w2.weight": (3, 64),
        }
        assert not checkpoint.read("w1.weight").any()
        with pytest.raises(
            CheckpointError, match=r"'w2\.weight_packed' and 'w2\.weight_scale': .* \(3, 2\); got \(3, 3\)"
        ):
            checkpoint.read("w2.weight")


class TestInt4:
    def pack(self, values):
        """Eight values of [-8, 7] per word, the first in the lowest bits, each stored plus 8; the last word padded."""
        padded = np.pad(values, ((0, 0), (0, -values.shape[1] % 8)))
        nibbles = (padded + 8).astype(np.uint32).reshape(len(values), -1, 8)
        return np.bitwise_or.reduce(nibbles << (4 * np.arange(8, dtype=np.uint32)), axis=-1).view(np.int32)

    def test_published_word(self):
        """-8 ... -1 in one word is 0x76543210."""
        assert self.pack(np.arange(-8, 0)[None]) == 0x76543210
        actual = dequantize_int4(np.array([[0x76543210]], np.int32), np.array([[0.5]], "f4"), 8, None, FLOAT32)
        np.testing.assert_array_equal(actual, [np.arange(-8, 0) / 2])

    @pytest.mark.parametrize("columns", [8, 64, 75])
    def test_groups(self, columns):
        rng = np.random.default_rng(5)
        values = rng.integers(-8, 8, (5, columns))
        scale = rng.uniform(0.5, 2, (5, -(-columns // 32))).astype(ml_dtypes.bfloat16)
        expected = values * np.repeat(scale.astype(np.float32), 32, axis=1)[:, :columns]
        np.testing.assert_array_equal(dequantize_int4(self.pack(values), scale, columns, 32, FLOAT32), expected)

    def stored(self, columns=75):
        packed = self.pack(np.zeros((5, columns), np.int64))
        scale = np.ones((5, -(-columns // 32)), ml_dtypes.bfloat16)
        return {"w.weight_packed": packed, "w.weight_scale": scale, "w.weight_shape": np.array([5, columns], np.int32)}

    def test_checkpoint(self, tmp_path):
        checkpoint = dequantize(opened(tmp_path, self.stored()), INT4)
        assert [(name, info.shape) for name, info in checkpoint.tensors.items()] == [("w.weight", (5, 75))]
        assert not checkpoint.read("w.weight").any()

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"w.weight_shape": None}, r"'w\.weight_packed' is packed and has no 'w\.weight_shape'"),
            ({"w.weight_shape": np.array([5, 81])}, r"says \(5, 81\), which does not fit .* of shape \(5, 10\)"),
            ({"w.weight_shape": np.array([6, 75])}, r"says \(6, 75\)"),
            ({"w.weight_zero_point": np.zeros(1, np.int32)}, r"comes with 'w\.weight_zero_point'; only symmetric"),
            ({"w.weight_g_idx": np.zeros(1, np.int32)}, r"comes with 'w\.weight_g_idx'"),
        ],
    )
    def test_refused(self, tmp_path, change, message):
        stored = {name: value for name, value in (self.stored() | change).items() if value is not None}
        with pytest.raises(CheckpointError, match=message):
            dequantize(opened(tmp_path, stored), INT4)


class TestConfig:
    def test_plain_checkpoint_is_returned_as_it_is(self, tmp_path):
        checkpoint = opened(tmp_path, {"w": np.zeros(2, np.float32)})
        for config in ({}, {"quantization_config": None}, fp8_config([4, 4]), {"text_config": None}):
            assert dequantize(checkpoint, config) is checkpoint

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quant_method 'gptq'.* is not supported"),
            ({"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, "'fp8' with fmt 'e5m2' is not supported"),
            ({"quantization_config": {"bits": 4}}, "quant_method None"),
            ({"quantization_config": ["fp8"]}, r"quantization_config must be an object; got \['fp8'\]"),
            (fp8_config([128]), r"weight_block_size must be two sizes, rows and columns; got \[128\]"),
            (fp8_config([0, 128]), r"weight_block_size must be two sizes, rows and columns; got \[0, 128\]"),
            (
                compressed_config("nvfp4-pack-quantized", num_bits=4, type="float", group_size=16),
                "'nvfp4-pack-quantized'",
            ),
            (compressed_config("mxfp4-pack-quantized", num_bits=4, type="float", group_size=16), "group_size 16"),
            (compressed_config("pack-quantized", num_bits=8, type="int", group_size=32), "8-bit int weights"),
            (compressed_config("pack-quantized", num_bits=4, type="int", symmetric=False), "symmetric False"),
            (compressed_config("int-quantized", num_bits=8, type="int"), "format 'int-quantized'"),
            ({"quantization_config": {"quant_method": "compressed-tensors"}}, "config_groups has 0"),
        ],
    )
    def test_unsupported_is_named(self, tmp_path, config, message):
        with pytest.raises(CheckpointError, match=message):
            dequantize(opened(tmp_path, {"w": np.zeros(2, np.float32)}), config)

    def test_format_of_a_group_wins(self, tmp_path):
        config = json.loads(json.dumps(MXFP4).replace('"targets"', '"format": "mxfp4-pack-quantized", "targets"', 1))
        config["quantization_config"]["format"] = "mixed-precision"
        stored = {"w.weight_packed": np.zeros((1, 16), np.uint8), "w.weight_scale": np.zeros((1, 1), np.uint8)}
        assert list(dequantize(opened(tmp_path, stored), config)) == ["w.weight"]

    def test_groups_must_agree(self, tmp_path):
        config = json.loads(json.dumps(MXFP4))
        config["quantization_config"]["config_groups"]["group_1"] = {
            "format": "float-quantized",
            "weights": {"num_bits": 8, "type": "float"},
        }
        with pytest.raises(CheckpointError, match="one way of quantising weights is supported; config_groups has 2"):
            dequantize(opened(tmp_path, {"w": np.zeros(2, np.float32)}), config)

    @pytest.mark.parametrize(
        ("config", "stored", "message"),
        [
            (fp8_config([4, 4]), {"w.weight": np.ones((4, 4), FP8)}, r"'w\.weight' is quantised and has no scale"),
            (
                MXFP4,
                {"w.weight_packed": np.zeros((4, 16), np.uint8)},
                r"'w\.weight_packed' .* no scale 'w\.weight_scale'",
            ),
            (
                fp8_config(None),
                {
                    "w.weight": np.ones((4, 4), FP8),
                    "w.weight_scale": np.ones(1, "f4"),
                    "w.weight_scale_inv": np.ones(1, "f4"),
                },
                r"has both 'w\.weight_scale_inv' and 'w\.weight_scale'; exactly one",
            ),
            (
                fp8_config([4, 4]),
                {"w.weight": np.ones((4, 4), np.float32), "w.weight_scale_inv": np.ones((1, 1), "f4")},
                r"'w\.weight_scale_inv' is a scale, but there is no quantised tensor that it belongs to",
            ),
            (
                {},
                {"w.weight": np.ones((4, 4), FP8), "w.weight_scale_inv": np.ones((1, 1), "f4")},
                r"'w\.weight' is quantised, but the config has no quantization_config",
            ),
            (
                MXFP4,
                {"w.weight": np.ones((4, 4), FP8), "w.weight_scale": np.ones((1, 1), "f4")},
                r"'w\.weight' is float8_e4m3fn, which does not fit the config's format, mxfp4",
            ),
            (
                fp8_config([4, 4]),
                {"w.weight": np.ones(4, FP8), "w.weight_scale_inv": np.ones(1, "f4")},
                r"'w\.weight' has shape \(4,\); quantised weights are matrices",
            ),
        ],
    )
    def test_tensors_and_config_disagree(self, tmp_path, config, stored, message):
        with pytest.raises(CheckpointError, match=message):
            dequantize(opened(tmp_path, stored), config)

    def test_all_problems_are_listed(self, tmp_path):
        stored = {f"w{i}.weight": np.ones((2, 2), FP8) for i in range(25)}
        with pytest.raises(CheckpointError, match=r"(?s)'w0\.weight' .*\n.*\n\.\.\. and 5 more$"):
            dequantize(opened(tmp_path, stored), fp8_config([2, 2]))
