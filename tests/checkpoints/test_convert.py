"""Converting: round trips of every layout, stops and failures at any moment, memory, the command line."""

import errno
import json
import os
import signal
import subprocess
import sys
import time

import ml_dtypes
import numpy as np
import pytest
from helpers import DATA, tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from megatron_cases import case_names, copy_of, random_model, tensors_of, unpacked

import kimi_zoo as kz
from kimi_zoo.checkpoints.files import CheckpointError
from kimi_zoo.checkpoints.megatron import open_megatron
from kimi_zoo.checkpoints.megatron_legacy import Legacy
from kimi_zoo.checkpoints.safetensors import save_tensors
from kimi_zoo.checkpoints.staging import partial_folder
from kimi_zoo.checkpoints.summary import summarize
from kimi_zoo.checkpoints.watch import finite_check

LAYOUTS = st.builds(
    dict,
    format=st.sampled_from(["torch_dist", "legacy"]),
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2]),
    ep=st.sampled_from([1, 2, 4]),
    whole_experts=st.booleans(),
    vpp=st.sampled_from([1, 2]),
    stack=st.sampled_from(["gpt", "hybrid"]),
    experts=st.sampled_from(["te_grouped", "sequential", "grouped", None]),
    norms=st.sampled_from(["fused", "separate"]),
    vocab_multiple=st.sampled_from([1, 8]),
)


@given(
    layout=LAYOUTS,
    gate=st.sampled_from(["direct", "low_rank"]),
    rank=st.sampled_from([None, 12]),
    mla=st.sampled_from([None, "head_wise", "element_wise"]),
    shared=st.integers(0, 2),
    tied=st.booleans(),
    dtype=st.sampled_from([ml_dtypes.bfloat16, np.float32, np.float16]),
    seed=st.integers(0, 9),
)
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_there_and_back(tmp_path_factory, layout, gate, rank, mla, shared, tied, dtype, seed):
    """Any layout, cut for any ranks, gives the same bytes back; written again from those, the same files."""
    config = tiny(
        layer_kinds=("kda", "mla", "kda", "kda"), mlp_kinds=("dense", "moe", "moe", "moe"), intermediate_size=16,
        linear_num_heads=4, linear_head_dim=3, num_attention_heads=4, num_experts=4, num_experts_per_token=2,
        moe_intermediate_size=8, num_shared_experts=shared, kda_decay_gate=gate, kda_output_gate=gate,
        q_lora_rank=rank, mla_output_gate=mla, tie_word_embeddings=tied, bos_token_id=None, eos_token_id=None,
        pad_token_id=None,
    )  # fmt: skip
    tmp_path = tmp_path_factory.mktemp("model")
    source = random_model(tmp_path / "hf", config, dtype, seed)
    wanted = dict(layout)
    if wanted.pop("whole_experts") and wanted["tp"] % wanted["ep"] == 0:
        wanted["etp"] = 1
    chosen = kz.MegatronLayout(**wanted)
    done = kz.convert(source, tmp_path / "megatron", layout=chosen)
    assert done.verified == len(tensors_of(source))
    kz.convert(tmp_path / "megatron", tmp_path / "back")
    assert tensors_of(tmp_path / "back") == tensors_of(source)
    raw = json.loads((tmp_path / "back" / "config.json").read_text())
    assert kz.parse_config(raw) == config or gate == "direct"
    kz.convert(tmp_path / "back", tmp_path / "again")  # as it was laid out before
    assert contents(tmp_path / "again") == contents(tmp_path / "megatron")


def contents(folder):
    """Names and bytes of the weight files below a folder."""
    return {
        str(path.relative_to(folder)): path.stat().st_size if path.suffix == ".pt" else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.suffix in (".pt", ".distcp") and path.name != "common.pt"
    }


@pytest.mark.parametrize("name", case_names())
def test_back_to_megatron_equals_the_original(name, tmp_path):
    """Stored parameters, rank by rank, but for padding; `fsdp_dtensor` comes back as `torch_dist`."""
    original = unpacked() / name / "megatron"
    kz.convert(original, tmp_path / "hf")
    kz.convert(tmp_path / "hf", tmp_path / "back")
    one, other = open_megatron(original).run, open_megatron(tmp_path / "back").run
    if one.kind == "fsdp_dtensor":
        assert other.kind == "torch_dist"
        return
    assert (
        one.kind == other.kind
        and one.keys == other.keys
        and one.parallel == other.parallel | {k: v for k, v in one.parallel.items() if k == "CP"}
    )
    for argument, value in one.args.items():
        if argument not in OF_THE_RUN and value is not None:
            assert other.args[argument] == value, argument
    if isinstance(one.source, Legacy) and isinstance(other.source, Legacy):
        for key, parts in one.source.parts.items():
            for mine, theirs in zip(parts, other.source.parts[key], strict=True):
                assert (mine.tp, mine.ep, mine.file.parent.name) == (theirs.tp, theirs.ep, theirs.file.parent.name)
                assert_equal(mine.tensor, theirs.tensor, key)
    else:
        for key, tensor in one.source.items():
            assert_equal(tensor, other.source[key], key)


# objects of Megatron's classes are not carried; the rest is what has another form by default
OF_THE_RUN = {
    "attention_backend",
    "ckpt_format",
    "is_hybrid_model",
    "moe_layer_freq",
    "gated_attention_proj_granularity",
}


def assert_equal(mine, theirs, key):
    assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype), key
    one, other = mine.read(), theirs.read()
    if "word_embeddings" in key.name or "output_layer" in key.name:
        return  # padding is written as zeros
    assert one.tobytes() == other.tobytes(), key


def test_like_another_checkpoint(tmp_path):
    """Layout and arguments are taken from a checkpoint, the weights from elsewhere."""
    like = unpacked() / "legacy_gpt_tp2_grouped_release" / "megatron"
    source = unpacked() / "legacy_gpt_tp2_grouped_release" / "hf"
    kz.convert(source, tmp_path / "m", like=like)
    one, other = open_megatron(like).run, open_megatron(tmp_path / "m").run
    assert one.keys == other.keys and one.experts == other.experts == "grouped"
    assert other.args["lr"] == one.args["lr"] and (tmp_path / "m" / "release").is_dir()


@pytest.mark.parametrize("name", ["bin_one", "bin_sharded", "dcp"])
def test_torch_formats_with_published_names(name, tmp_path):
    source = unpacked() / "torch" / name
    done = kz.convert(source, tmp_path / "out")
    assert tensors_of(tmp_path / "out") == tensors_of(unpacked() / "td_gpt_two_stage" / "hf")
    assert done.plan.target.startswith("published")
    kz.from_pretrained(source)
    kz.convert(source, tmp_path / "m", to="megatron", layout=kz.MegatronLayout(tp=2))
    kz.convert(tmp_path / "m", tmp_path / "out", overwrite=True)
    assert tensors_of(tmp_path / "out") == tensors_of(unpacked() / "td_gpt_two_stage" / "hf")


def test_torch_formats_need_a_configuration(tmp_path):
    for name in ("bin_one", "dcp"):
        folder = tmp_path / name
        folder.mkdir()
        for path in (unpacked() / "torch" / name).iterdir():
            if path.name != "config.json":
                (folder / path.name).write_bytes(path.read_bytes())
        with pytest.raises(CheckpointError, match=r"no config\.json beside"):
            kz.convert(folder, tmp_path / "out")
        config = unpacked() / "td_gpt_two_stage" / "hf" / "config.json"
        kz.convert(folder, tmp_path / f"out_{name}", config=config)
        assert tensors_of(tmp_path / f"out_{name}") == tensors_of(unpacked() / "td_gpt_two_stage" / "hf")


def test_facts_of_the_run_are_carried(tmp_path):
    source = unpacked() / "td_gpt_two_stage" / "megatron"
    kz.convert(source, tmp_path / "hf")
    facts = json.loads((tmp_path / "hf" / "megatron.json").read_text())
    assert facts["iteration"] == 10 and facts["parallel"]["TP"] == 2 and facts["args"]["lr"] == 1e-4
    stored = kz.checkpoints.safetensors.open_checkpoint(tmp_path / "hf")
    assert stored.metadata["megatron.iteration"] == "10" and stored.metadata["format"] == "pt"


def test_kda_stays_out_of_fp8(tmp_path):
    """The flag is carried both ways; projections in 8 bits contradict it."""
    from test_megatron import computed, names_below, rewrite

    source = copy_of("legacy_gpt_ep2", tmp_path)
    rewrite(source, lambda model, args, tp, pp: args.update(kda_disable_fp8=True))
    kz.convert(source, tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["kda_disable_fp8"] is True
    kz.convert(tmp_path / "hf", tmp_path / "back")
    assert open_megatron(tmp_path / "back").run.args["kda_disable_fp8"] is True

    def narrow(model, args, tp, pp):
        for name in names_below(model, "in_proj.weight"):
            model[name] = computed(model[name].read().astype(ml_dtypes.float8_e4m3fn))

    with pytest.raises(CheckpointError, match=r"kda_disable_fp8 is set, but projections are stored in 8 bits: model"):
        open_megatron(rewrite(source, narrow))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"tp": 3}, "KDA heads: 4 is not divisible by tp 3"),
        ({"ep": 3}, "experts: 4 is not divisible by ep 3"),
        ({"pp": 2, "vpp": 2}, "layers: 2 is not divisible by pp \\* vpp 4"),
        ({"tp": 4, "etp": 2}, "etp 2 must be 1 or tp, 4"),
        ({"tp": 2, "etp": 1, "ep": 4}, "tp 2 must be divisible by ep 4"),
        ({"tp": 0}, "tp must be a whole number of at least 1; got 0"),
        ({"format": "legacy", "experts": "singleton"}, "are a form of torch_dist"),
    ],
)
def test_layouts_that_do_not_divide(tmp_path, layout, message):
    source = unpacked() / "legacy_gpt_ep2" / "hf"
    with pytest.raises(CheckpointError, match=message):
        kz.convert(source, tmp_path / "out", layout=kz.MegatronLayout(**layout))
    assert list(tmp_path.iterdir()) == []


def test_published_tensors_that_do_not_fit(tmp_path):
    source = unpacked() / "legacy_gpt_ep2" / "hf"
    stored = kz.checkpoints.safetensors.open_checkpoint(source)
    tensors = {name: np.array(stored.read(name)) for name in stored}
    del tensors["model.norm.weight"]
    tensors["model.layers.0.self_attn.extra.weight"] = np.zeros(3, np.float32)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:20]
    save_tensors(tensors, tmp_path / "hf")
    (tmp_path / "hf" / "config.json").write_bytes((source / "config.json").read_bytes())
    with pytest.raises(CheckpointError) as error:
        kz.convert(tmp_path / "hf", tmp_path / "out")
    for text in (
        "model.norm.weight is missing",
        "lm_head.weight has shape [20, 16]; expected [26, 16]",
        "model.layers.0.self_attn.extra.weight is not a tensor of this model",
    ):
        assert text in str(error.value)


# the destination


def test_existing_destinations(tmp_path):
    source = unpacked() / "legacy_gpt_ep2" / "megatron"
    out = tmp_path / "out"
    kz.convert(source, out)
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        kz.convert(source, out)
    (out / "old.txt").write_text("x")
    kz.convert(source, out, overwrite=True)
    assert not (out / "old.txt").exists()
    kz.convert(out, tmp_path / "m")
    kz.convert(out, tmp_path / "m", overwrite=True)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").write_text("x")
    with pytest.raises(CheckpointError, match="does not look like a plain checkpoint"):
        kz.convert(source, tmp_path / "notes", overwrite=True)
    for inside in (out, out / "deeper"):
        with pytest.raises(CheckpointError, match="lie within one another"):
            kz.convert(out, inside, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "notes", "out"]


def test_too_little_space_is_said_before(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: os.terminal_size((0, 0)) and type("U", (), {"free": 10}))
    with pytest.raises(CheckpointError, match="needs 14,332 bytes, but only 10 are free"):
        kz.convert(unpacked() / "td_gpt_two_stage" / "megatron", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def failing_fsync(monkeypatch, after, error):
    """Makes the `after`-th synchronisation of a file fail."""
    real, count = os.fsync, [0]

    def fsync(handle):
        count[0] += 1
        if count[0] == after:
            raise error
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize("to", ["hf", "megatron"])
def test_a_full_disk_keeps_what_is_finished(tmp_path, monkeypatch, to):
    source = unpacked() / "td_gpt_two_stage" / ("megatron" if to == "hf" else "hf")
    options = {"max_shard_size": "2kB"} if to == "hf" else {"layout": kz.MegatronLayout(tp=2, ep=2, pp=2)}
    expected = kz.convert(source, tmp_path / "whole", **options)
    with monkeypatch.context() as patch:
        failing_fsync(patch, 6, OSError(errno.ENOSPC, "No space left on device"))
        with pytest.raises(OSError, match=r"is full.*finished files are kept.*run the same command again"):
            kz.convert(source, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists() and partial_folder(tmp_path / "out").is_dir()
    done = kz.convert(source, tmp_path / "out", **options)
    assert 0 < done.resumed < len(done.plan.files) == len(expected.plan.files)
    assert everything(tmp_path / "out") == everything(tmp_path / "whole")
    assert not partial_folder(tmp_path / "out").exists()


def everything(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_stop_is_resumed_only_for_the_same_work(tmp_path, monkeypatch):
    source = copy_of("td_gpt_two_stage", tmp_path)
    with monkeypatch.context() as patch:
        failing_fsync(patch, 7, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            kz.convert(source, tmp_path / "out", max_shard_size="2kB")
    kept = partial_folder(tmp_path / "out")
    assert kept.is_dir() and not (tmp_path / "out").exists()
    assert kz.convert(source, tmp_path / "out", max_shard_size="3kB").resumed == 0
    assert not kept.exists()


@pytest.mark.parametrize("damage", ["bytes", "cut", "journal", "stray"])
def test_damaged_leftovers_do_not_matter(tmp_path, monkeypatch, damage):
    """A finished file that has changed since is noticed when everything is read back, or written again."""
    source = unpacked() / "td_gpt_two_stage" / "megatron"
    with monkeypatch.context() as patch:
        failing_fsync(patch, 9, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            kz.convert(source, tmp_path / "out", max_shard_size="2kB")
    kept = partial_folder(tmp_path / "out")
    first = sorted((kept / "new").glob("*.safetensors"))[0]
    data = first.read_bytes()
    if damage == "bytes":
        first.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(CheckpointError, match="does not read back as it was written"):
            kz.convert(source, tmp_path / "out", max_shard_size="2kB")
        assert not kept.exists() and not (tmp_path / "out").exists()
        return
    if damage == "cut":
        first.write_bytes(data[:-1])
    elif damage == "journal":
        journal = kept / "journal.jsonl"
        journal.write_bytes(journal.read_bytes()[:-3])
    else:
        (kept / "new" / ".model.tmp").write_bytes(b"left by a process that was killed")
    assert kz.convert(source, tmp_path / "out", max_shard_size="2kB").resumed > 0
    kz.convert(source, tmp_path / "whole", max_shard_size="2kB")
    assert everything(tmp_path / "out") == everything(tmp_path / "whole")


def test_two_at_once(tmp_path):
    fcntl = pytest.importorskip("fcntl")  # Windows has no such locks, and the product takes none there
    partial = partial_folder(tmp_path / "out")
    partial.mkdir()
    with open(partial / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="is being written by another process"):
            kz.convert(unpacked() / "td_gpt_two_stage" / "megatron", tmp_path / "out")
    assert partial.exists()


def test_what_is_written_wrongly_is_found(tmp_path, monkeypatch):
    """A fault between checksum and disk."""
    import kimi_zoo.checkpoints.safetensors_saving as saving

    real = saving._write_stream

    def faulty(file, name, parts, expected):
        if name.endswith("lm_head.weight"):
            parts = iter([np.zeros(sum(part.nbytes for part in parts), np.uint8)])
        real(file, name, parts, expected)

    monkeypatch.setattr(saving, "_write_stream", faulty)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight does not read back as it was written"):
        kz.convert(unpacked() / "td_gpt_two_stage" / "megatron", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("dtype", "infinite", "largest"),
    [
        (np.float64, np.inf, np.finfo(np.float64).max),
        (np.float32, -np.inf, np.finfo(np.float32).max),
        (np.float16, np.nan, np.finfo(np.float16).max),
        (ml_dtypes.bfloat16, np.inf, ml_dtypes.finfo(ml_dtypes.bfloat16).max),
        (ml_dtypes.float8_e4m3fn, np.nan, 448.0),
        (ml_dtypes.float8_e5m2, -np.inf, 57344.0),
    ],
)
def test_values_that_are_not_finite(dtype, infinite, largest):
    check = finite_check(np.dtype(dtype))
    raw = lambda *values: np.array(values).astype(dtype).view(np.uint8)
    assert check(raw(0.0, -float(largest), float(largest))) and check(raw())
    assert not check(raw(0.0, infinite, 1.0))
    assert finite_check(np.dtype(np.int32))(np.full(8, 255, np.uint8))


# as a process


@pytest.fixture
def run_convert(tmp_path):
    variables = {name: value for name, value in os.environ.items() if not name.startswith("KIMI_ZOO")}

    def run(*arguments, **options):
        command = [sys.executable, "-m", "kimi_zoo", "convert", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, env=variables, cwd=tmp_path, **options)

    return run


def test_command_line(tmp_path, run_convert):
    source = unpacked() / "td_gpt_two_stage"
    plan = run_convert(source / "megatron", "out", "--plan")
    assert plan.returncode == 0 and "Megatron torch_dist, iteration 10: 47 tensors" in plan.stdout
    assert not (tmp_path / "out").exists()
    done = run_convert(source / "megatron", "out", "--to", "hf", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["verified_tensors"] == found["tensors"] == 47
    assert found["layout"]["TP"] == 2 and found["left_out"]["entries of the optimizer"] == 57
    assert tensors_of(tmp_path / "out") == tensors_of(source / "hf")
    again = run_convert(source / "megatron", "out")
    assert again.returncode == 2 and "exists and is not empty" in again.stderr and "Traceback" not in again.stderr
    back = run_convert("out", "m", "--format", "legacy", "--tp", "2", "--pp", "2", "--iteration", "7")
    assert back.returncode == 0 and "read back equal" in back.stdout
    assert (tmp_path / "m" / "iter_0000007" / "mp_rank_01_001" / "model_optim_rng.pt").is_file()
    wrong = run_convert("nowhere", "x")
    assert wrong.returncode == 2 and "nowhere" in wrong.stderr


def test_killed_at_any_moment(tmp_path):
    """Nothing under the final name, then the same result as without the kill."""
    config = tiny(vocab_size=4000, hidden_size=64, num_attention_heads=4, num_experts=4, moe_intermediate_size=8)
    source = random_model(tmp_path / "hf", config, np.float32)
    kz.convert(source, tmp_path / "whole", layout=kz.MegatronLayout(tp=2, pp=2))
    command = [sys.executable, "-m", "kimi_zoo", "convert", str(source), str(tmp_path / "out"), "--tp=2", "--pp=2"]
    start = time.perf_counter()
    subprocess.run([*command[:-3], str(tmp_path / "timed"), *command[-2:]], check=True, capture_output=True)
    whole_run = time.perf_counter() - start
    killed = 0
    for fraction in (0.5, 0.7, 0.8, 0.85, 0.9, 0.95):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(whole_run * fraction)
        process.send_signal(signal.SIGKILL)
        if process.wait() == 0:
            break
        killed += 1
        assert not (tmp_path / "out").exists() or everything(tmp_path / "out") == everything(tmp_path / "whole")
        if (tmp_path / "out").exists():
            break
    assert killed
    if not (tmp_path / "out").exists():
        kz.convert(source, tmp_path / "out", layout=kz.MegatronLayout(tp=2, pp=2))
    assert everything(tmp_path / "out") == everything(tmp_path / "whole")


MEASURE = """
import json, resource, sys
import kimi_zoo as kz
from kimi_zoo.checkpoints.convert import convert
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert(sys.argv[1], sys.argv[2], layout=kz.MegatronLayout(**json.loads(sys.argv[3])))
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"growth": (after - before) * 1024, "jax": "jax" in sys.modules}))
"""


def test_memory_does_not_grow_with_the_model(tmp_path):
    """180 MB through 100 MB: streams of a few megabytes, and JAX is not even imported."""
    config = tiny(
        vocab_size=2048, hidden_size=512, intermediate_size=8192, linear_num_heads=16, linear_head_dim=64,
        num_attention_heads=16, num_experts=32, moe_intermediate_size=512, v_head_dim=32, qk_nope_head_dim=32,
    )  # fmt: skip
    source = random_model(tmp_path / "hf", config, ml_dtypes.bfloat16)
    size = (source / "model.safetensors").stat().st_size
    assert size > 170e6
    for one, other, layout in (
        ("hf", "dist", {"format": "torch_dist", "tp": 2}),
        ("dist", "published", {}),
        ("hf", "legacy", {"format": "legacy", "tp": 2}),
        ("legacy", "published2", {}),
    ):
        command = [sys.executable, "-c", MEASURE, str(tmp_path / one), str(tmp_path / other), json.dumps(layout)]
        found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        assert found["growth"] < 100e6, (one, other, found)
        assert found["jax"] is False


# inspect


def run_inspect(path, *arguments):
    command = [sys.executable, "-m", "kimi_zoo", "inspect", str(path), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("name", ["td_hybrid_pp2_ep2_etp1", "legacy_gpt_tp2_pp2_vpp2_sequential", "fsdp_dtensor_gpt"])
def test_inspect_shows_the_same_model(name):
    case = unpacked() / name
    ours, published = (summarize(case / folder) for folder in ("megatron", "hf"))
    for field in ("layers", "parameters", "active", "routing", "parts", "dtypes", "memory"):
        assert getattr(ours, field) == getattr(published, field), field
    assert ours.run["iteration"] == 10 and ours.format.startswith("Megatron")


def test_inspect_of_what_cannot_be_converted(tmp_path):
    """Arguments alone; parameters that are not known: shown as far as they go, with the reason."""
    found = summarize(DATA / "field_cases" / "megatron_args_namespace")
    assert found.run["iteration"] == 5 and found.run["args"] == {
        "num_layers": 2,
        "hidden_size": 16,
        "padded_vocab_size": 16,
        "tensor_model_parallel_size": 1,
    }
    found = summarize(unpacked() / "malformed" / "unknown_key" / "megatron")
    assert any("mystery_proj.weight is not a parameter that is known" in note for note in found.notes)
    assert any("mystery_proj" in info.name for info in found.tensors)
    with pytest.raises(CheckpointError, match="names iter_0000005, which is not there; present: iter_0000004"):
        summarize(DATA / "field_cases" / "megatron_tracker_missing_iter")


def test_inspect_as_a_command():
    done = run_inspect(unpacked() / "td_gpt_two_stage" / "megatron", "--tensors")
    assert done.returncode == 0, done.stderr
    for text in (
        "Megatron torch_dist",
        "iteration 10, TP 2",
        "57 entries of the optimizer",
        "self_attn.f_a_proj.weight",
    ):
        assert text in done.stdout
    found = json.loads(run_inspect(unpacked() / "torch" / "dcp", "--json").stdout)
    assert found["format"] == "torch distributed checkpoint" and found["loaded"] and found["parameters"]["total"]
    bad = run_inspect(unpacked() / "malformed" / "metadata_code_pickle" / "megatron")
    assert bad.returncode == 2 and "names 'io.open'" in bad.stderr and "Traceback" not in bad.stderr
