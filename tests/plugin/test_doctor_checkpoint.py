"""doctor reads a checkpoint, sound or not, without torch and vLLM."""

import json
import shutil
from pathlib import Path

import pytest
from installations import OURS, fault

from atom_vllm_bridge.models.deepseek_v4.shards import check_shards


@pytest.fixture
def checkpoint(six_layers, tmp_path):
    return Path(shutil.copytree(six_layers, tmp_path / "checkpoint"))


def test_a_checkpoint_is_read_without_torch(empty, six_layers):
    report = empty.report("--model", str(six_layers))
    assert report["checkpoint"] == {
        "directory": str(six_layers),
        "architecture": "DeepseekV4ForCausalLM",
        "layers": {
            "sliding_attention": 1,
            "compressed_sparse_attention": 3,
            "heavily_compressed_attention": 2,
        },
        "feed_forward": {"hash_moe": 2, "moe": 4},
        "experts": {"routed": 64, "per_token": 6, "shared": 1},
        "index_topk": 512,
        "sliding_window": 128,
        "max_position_embeddings": 1048576,
        "layout": "mxfp4",
        "dtypes": {
            "projections": "F8_E4M3",
            "wo_a": "F8_E4M3",
            "experts": "I8",
            "scale": "F8_E8M0",
        },
        "tensors": len(check_shards(six_layers)),
        "draft": "dspark",
        "draft_stages": 3,
    }
    assert not [f for f in report["faults"] if "checkpoint" in f]
    assert report["plan"] == {
        "classes": {
            "DeepseekV4ForCausalLM": "atom_vllm_bridge.target:AtomDeepseekV4ForCausalLM",
            "DSparkDraftModel": "atom_vllm_bridge.dspark:AtomDSparkDraftModel",
        },
        "draft": {"kind": "dspark", "trained": 5, "asked": None, "k": None},
        # Six layers and a window of 128: 6 · 127 and max(128, 512), in whole 128.
        "rollback_tokens": {"exact": 768, "atom": 512, "window": 128},
        "layouts": None,
    }
    assert (
        "compressed_sparse_attention: 3"
        in empty.doctor("--model", str(six_layers)).stdout
    )


def test_a_checkpoint_is_read_beside_a_vllm_that_does_not_load(empty, six_layers):
    empty.package("vllm", "0.32.0", OURS)
    empty.module("vllm/__init__.py", "raise ImportError('libcudart.so.13')\n")
    draft = '{"method": "dspark", "num_speculative_tokens": 7}'
    report = empty.report("--model", str(six_layers), "--speculative-config", draft)
    fault(report, "Cannot examine patches, plan", "libcudart.so.13")
    assert report["checkpoint"]["draft"] == "dspark"
    plan = report["plan"]
    assert plan["draft"] == {
        "kind": "dspark",
        "trained": 5,
        "asked": "dspark",
        "k": 7,
    }
    # With a draft one window more, (6 · 127 + 128), and K.
    assert plan["rollback_tokens"] == {"exact": 896, "atom": 512, "window": 128}
    assert plan["layouts"] is None


def test_a_truncated_shard_is_named(empty, checkpoint):
    (shard,) = checkpoint.glob("*.safetensors")
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size - 100)
    report = empty.report("--model", str(checkpoint))
    fault(report, shard.name, "is truncated")
    assert report["checkpoint"]["index_topk"] == 512
    assert report["checkpoint"]["layout"] is None


def test_an_unknown_compress_ratio_and_a_missing_config_are_faults(empty, checkpoint):
    path = checkpoint / "config.json"
    config = json.loads(path.read_text())
    config["compress_ratios"][1] = 16
    path.write_text(json.dumps(config))
    fault(empty.report("--model", str(checkpoint)), "config.json", "16")
    path.unlink()
    fault(empty.report("--model", str(checkpoint)), "config.json cannot be read")


@pytest.mark.parametrize("names", [[None], ["DeepseekV4ForCausalLM", 4], 5, "V4"])
def test_architectures_that_are_no_names_are_a_fault(empty, checkpoint, names):
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": names}))
    report = empty.report("--model", str(checkpoint))
    fault(report, "config.json cannot be used: architectures is", "no list of names")
    assert report["checkpoint"]["layout"] == "mxfp4"


def test_a_missing_tensor_and_a_missing_stage_are_named(empty, checkpoint):
    lost = "layers.2.attn.wkv.weight"
    _drop(checkpoint, lambda name: name == lost)
    fault(empty.report("--model", str(checkpoint)), f"{lost} is missing")
    _drop(checkpoint, lambda name: name.startswith("mtp.2."))
    fault(
        empty.report("--model", str(checkpoint)), "3 draft stages", "the shards hold 2"
    )


def test_a_name_that_is_not_in_the_hubs_cache_is_a_fault_that_says_so(empty):
    report = empty.report("--model", "some-lab/DeepSeek-V4")
    line = fault(report, "some-lab/DeepSeek-V4", "nothing of it can be checked")
    assert line.endswith("hf download some-lab/DeepSeek-V4")
    assert report["plan"] is None


def test_a_directory_that_is_no_checkpoint_is_a_fault(empty, tmp_path):
    report = empty.report("--model", str(tmp_path / "nowhere"))
    fault(report, "nowhere holds neither", "give a checkpoint's directory")


def _drop(checkpoint: Path, gone) -> None:
    """Rewrite a checkpoint of one shard without the tensors whose names `gone` accepts."""
    (shard,) = checkpoint.glob("*.safetensors")
    data = shard.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    kept, body = {}, bytearray()
    for name, entry in header.items():
        if gone(name):
            continue
        begin, end = (start + offset for offset in entry["data_offsets"])
        offsets = [len(body), len(body) + end - begin]
        kept[name] = entry | {"data_offsets": offsets}
        body += data[begin:end]
    text = json.dumps(kept).encode()
    shard.write_bytes(len(text).to_bytes(8, "little") + text + body)
    index = {"weight_map": dict.fromkeys(kept, shard.name)}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
