"""The part of `torch_reads.py` that runs where torch is: loads checkpoints and compares them with the model."""

import argparse
import json
import pathlib
import re
import sys
import warnings

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

warnings.simplefilter("ignore")
if sys.argv[2] == "1":  # megatron-core asks for a GPU and for a process group
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *args, **kwargs: None
    import torch.distributed

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)

published = load_file(sys.argv[1] + "/model.safetensors")
config = json.loads(pathlib.Path(sys.argv[1], "config.json").read_text())
layers, experts = config["num_hidden_layers"], config["num_experts"]


def expected(hybrid):
    """Megatron's whole tensors by name, each as a list of its sections, made from the published ones."""
    norm = "decoder.final_norm.weight" if hybrid else "decoder.final_layernorm.weight"
    out = {
        "embedding.word_embeddings.weight": [published["model.embed_tokens.weight"]],
        "output_layer.weight": [published["lm_head.weight"]],
        norm: [published["model.norm.weight"]],
    }
    for i in range(layers):
        a, m = (2 * i, 2 * i + 1) if hybrid else (i, i)
        get = lambda name, i=i: published[f"model.layers.{i}.{name}"]
        att, mlp = f"decoder.layers.{a}.self_attention.", f"decoder.layers.{m}."
        out[f"decoder.layers.{a}.input_layernorm.weight"] = [get("input_layernorm.weight")]
        if f"model.layers.{i}.self_attn.A_log" in published:
            s = "self_attn."
            out[att + "in_proj.weight"] = [get(f"{s}{x}_proj.weight") for x in "qkv"]
            out[att + "conv1d.weight"] = [get(f"{s}{x}_conv1d.weight") for x in "qkv"]
            out[att + "A_log"] = [get(s + "A_log").reshape(-1)]
            gates = [f"{x}_{y}_proj.weight" for x in "fg" for y in "ab"]
            names = {"dt_bias": "dt_bias", "beta_proj.weight": "b_proj.weight", "out_norm.weight": "o_norm.weight"}
            names |= {"out_proj.weight": "o_proj.weight", **{gate: gate for gate in gates}}
            out |= {att + one: [get(s + other)] for one, other in names.items()}
        else:
            s = "self_attn."
            names = {
                "linear_q_proj.weight": "q_proj.weight",
                "linear_kv_down_proj.weight": "kv_a_proj_with_mqa.weight",
                "linear_kv_up_proj.layer_norm_weight": "kv_a_layernorm.weight",
                "linear_kv_up_proj.weight": "kv_b_proj.weight",
                "linear_proj.weight": "o_proj.weight",
            }
            out |= {att + one: [get(s + other)] for one, other in names.items()}
        b = "block_sparse_moe."
        if f"model.layers.{i}.{b}gate.weight" in published:
            out[mlp + "pre_mlp_layernorm.weight"] = [get("post_attention_layernorm.weight")]
            out[mlp + "mlp.router.weight"] = [get(b + "gate.weight")]
            out[mlp + "mlp.router.expert_bias"] = [get(b + "gate.e_score_correction_bias")]
            for e in range(experts):
                one, e = f"{mlp}mlp.experts.{e}.", f"{b}experts.{e}."
                out[one + "linear_fc1.weight"] = [get(e + "w1.weight"), get(e + "w3.weight")]
                out[one + "linear_fc2.weight"] = [get(e + "w2.weight")]
            shared, s = mlp + "mlp.shared_experts.", b + "shared_experts."
            out[shared + "linear_fc1.weight"] = [get(s + "gate_proj.weight"), get(s + "up_proj.weight")]
            out[shared + "linear_fc2.weight"] = [get(s + "down_proj.weight")]
        else:
            out[mlp + "mlp.linear_fc1.layer_norm_weight"] = [get("post_attention_layernorm.weight")]
            out[mlp + "mlp.linear_fc1.weight"] = [get("mlp.gate_proj.weight"), get("mlp.up_proj.weight")]
            out[mlp + "mlp.linear_fc2.weight"] = [get("mlp.down_proj.weight")]
    return out


COLUMN = (
    "embedding output_layer in_proj. conv1d A_log dt_bias beta_proj _b_proj linear_q_proj linear_kv_up_proj.weight "
    "linear_fc1.weight"
).split()
ROW = ("out_proj", "linear_proj", "linear_fc2")


def share(name, sections, rank, ranks):
    if any(x in name for x in ROW):
        return sections[0].chunk(ranks, 1)[rank]
    if any(x in name for x in COLUMN):
        return torch.cat([s.chunk(ranks, 0)[rank] for s in sections])
    return torch.cat(sections)


def padded(tensor, rows):
    return torch.cat([tensor, tensor.new_zeros(rows - tensor.shape[0], *tensor.shape[1:])])


def check_legacy(folder, layout):
    hybrid = layout["stack"] == "hybrid"
    wanted = expected(hybrid)
    seen = set()
    for path in sorted(folder.glob("mp_rank_*/model_optim_rng.pt")):
        with torch.serialization.safe_globals([argparse.Namespace]):
            value = torch.load(path, weights_only=True, mmap=True)
        args = value["args"]
        numbers = [int(x) for x in path.parent.name.split("_")[2:]]
        tp = numbers.pop(0)
        pp = numbers.pop(0) if args.pipeline_model_parallel_size > 1 else 0
        ep = numbers.pop(0) if args.expert_model_parallel_size > 1 else 0
        etp = args.expert_tensor_parallel_size
        chunks = args.pipeline_model_parallel_size * (args.virtual_pipeline_model_parallel_size or 1)
        each = args.num_layers // chunks
        for key in [k for k in value if k.startswith("model")]:
            v = int(key[5:] or 0)
            start = (v * args.pipeline_model_parallel_size + pp) * each
            for name, tensor in value[key].items():
                here = experts // args.expert_model_parallel_size
                number = lambda text, first=ep * here: first + int(text)
                full = re.sub(r"layers\.(\d+)", lambda m, start=start: f"layers.{int(m[1]) + start}", name)
                grouped = lambda m, number=number: f"experts.{number(m[2])}.{m[1]}.weight"
                full = re.sub(r"experts\.(linear_fc\d)\.weight(\d+)", grouped, full)
                one_by_one = lambda m, number=number: f"experts.{number(m[1])}"
                full = re.sub(r"experts\.local_experts\.(\d+)", one_by_one, full)
                match = re.search(r"(.*mlp\.experts\.)weight([12])$", full)
                if match:
                    for e in range(here):
                        n = f"{match[1]}{ep * here + e}.linear_fc{match[2]}.weight"
                        part = share(n, wanted[n], tp if etp > 1 else 0, etp)
                        shape = (here, args.hidden_size, -1) if match[2] == "1" else (here, -1, args.hidden_size)
                        stored = tensor.view(shape)[e].t()
                        assert torch.equal(stored, part), (path, n)
                        seen.add(n)
                    continue
                sections = wanted[full]
                if "word_embeddings" in full or "output_layer" in full:
                    sections = [padded(sections[0], args.padded_vocab_size)]
                expert = ".experts." in full and "shared" not in full
                ranks = etp if expert else args.tensor_model_parallel_size
                part = share(full, sections, tp if ranks > 1 else 0, ranks)
                assert tensor.dtype == part.dtype and torch.equal(tensor, part), (path, full)
                seen.add(full)
    assert seen == set(wanted), sorted(seen ^ set(wanted))[:5]


def whole_tensors(folder, megatron):
    if not megatron:
        reader = dcp.FileSystemReader(folder)
        entries = reader.read_metadata().state_dict_metadata
        state = {k: torch.full(tuple(e.size), 7, dtype=e.properties.dtype) for k, e in entries.items()}
        dcp.load(state, storage_reader=reader, no_dist=True)
        with torch.serialization.safe_globals([argparse.Namespace]):
            return state, torch.load(folder / "common.pt", weights_only=True)["args"]
    from megatron.core import dist_checkpointing as mdc

    whole = lambda k, v: torch.full(tuple(v.global_shape), 7, dtype=v.dtype)
    state = {
        k: mdc.ShardedTensor.from_rank_offsets(k, whole(k, v), replica_id=0)
        for k, v in mdc.load_tensors_metadata(str(folder)).items()
    }
    found = mdc.load(state, str(folder))
    return {k: v for k, v in found.items() if isinstance(v, torch.Tensor)}, found["args"]


def check_dist(folder, layout, megatron):
    wanted = expected(layout["stack"] == "hybrid")
    state, args = whole_tensors(folder, megatron)
    state = dict(state)
    for name, sections in wanted.items():
        if "word_embeddings" in name or "output_layer" in name:
            sections = [padded(sections[0], args.padded_vocab_size)]
        tags = {"in_proj.weight": (".query", ".key", ".value"), "conv1d.weight": (".query", ".key", ".value")}
        match = re.search(r"(.*mlp\.experts\.)(\d+)\.(linear_fc\d\.weight)", name)
        tag = next((t for end, t in tags.items() if name.endswith(end)), None)
        if match:
            full = f"{match[1]}experts.{match[3]}"
            assert torch.equal(state[full][int(match[2])], torch.cat(sections)), name
        elif tag:
            for t, section in zip(tag, sections, strict=True):
                assert torch.equal(state.pop(name + t), section), name
        else:
            tensor = state.pop(name)
            assert tensor.dtype == sections[0].dtype and torch.equal(tensor, torch.cat(sections)), name
    left = [k for k in state if ".mlp.experts.experts." not in k]
    assert not left, left[:5]


for line in sys.stdin:
    job = json.loads(line)
    (folder,) = [p for p in pathlib.Path(job["folder"]).iterdir() if p.is_dir()]
    if job["layout"]["format"] == "legacy":
        check_legacy(folder, job["layout"])
    else:
        check_dist(folder, job["layout"], sys.argv[2] == "1")
    print("equal", json.dumps(job["layout"]), flush=True)
