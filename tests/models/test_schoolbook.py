"""The trained checkpoint: its layout and size, the copies that are made of it, and that transformers reads it the same."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from atom_vllm_bridge.checkpoint import schoolbook
from atom_vllm_bridge.checkpoint.make import make
from atom_vllm_bridge.checkpoint.presets import build_config
from atom_vllm_bridge.checkpoint.schoolbook import FOLDER, MTP
from atom_vllm_bridge.models.deepseek_v4.checkpoint import check_headers, tensor_table
from atom_vllm_bridge.models.deepseek_v4.shards import check_shards
from training.stories import without_beginnings

TASKS = FOLDER.parents[1] / "measure" / "tasks"


@cache
def read(path: Path):
    return json.loads(path.read_text())


def test_it_is_a_published_layout_of_at_most_16_mebibytes():
    config = build_config("schoolbook", layout="mxfp4", draft="dspark")
    assert read(FOLDER / "config.json") == config
    check_headers(tensor_table(config, "mxfp4"), check_shards(FOLDER))
    served = [file for file in FOLDER.iterdir() if file not in (MTP,)]
    assert sum(file.stat().st_size for file in served) <= 16 * 2**20


@pytest.mark.parametrize(
    ("layout", "draft"),
    [("bf16", "dspark"), ("mxfp4", "mtp"), ("fp8", "dspark")],
)
def test_copies_hold_the_same_values(tmp_path, layout, draft):
    out = make(tmp_path / "copy", "schoolbook", layout, draft=draft)
    config = read(out / "config.json")
    read_copy = schoolbook.reader(load_file(next(out.glob("model-*"))))
    original = schoolbook.source(draft)
    for name in tensor_table(config, "bf16"):
        assert torch.equal(read_copy(name), original(name)), name
    assert (out / "tokenizer.json").read_bytes() == (
        FOLDER / "tokenizer.json"
    ).read_bytes()


def test_a_copy_without_a_draft_is_the_target_alone(tmp_path):
    out = make(tmp_path / "copy", "schoolbook", draft="none")
    names = load_file(next(out.glob("model-*")))
    assert not [name for name in names if name.startswith("mtp.")]


@pytest.mark.parametrize("change", [{"layers": 2}, {"seed": 1}, {"gains": {"w1": 2.0}}])
def test_what_was_trained_cannot_be_changed(tmp_path, change):
    with pytest.raises(ValueError, match="'schoolbook' is trained"):
        make(tmp_path / "copy", "schoolbook", **change)
    assert not (tmp_path / "copy").exists()


def test_the_noise_token_is_in_no_text():
    config = read(FOLDER / "config.json")
    vocabulary = read(FOLDER / "tokenizer.json")["added_tokens"]
    names = {token["id"]: token["content"] for token in vocabulary}
    assert names[config["dspark_noise_token_id"]] == "<｜▁pad▁｜>"


def test_transformers_solves_what_it_was_not_trained_on(tmp_path):
    from transformers import AutoTokenizer, DeepseekV4ForCausalLM

    out = make(tmp_path / "copy", "schoolbook", "bf16")
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = DeepseekV4ForCausalLM.from_pretrained(out, dtype=torch.float32)
    with (TASKS / "schoolbook_test.jsonl").open() as lines:
        problem = json.loads(next(lines))
    prompt = f"Question: {problem['question']}\nAnswer:"
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    made = model.generate(ids, max_new_tokens=96, do_sample=False)
    text = tokenizer.decode(made[0, ids.shape[1] :])
    # How its sentences begin is the model's choice, and nothing else.
    text, wanted = map(without_beginnings, (text.lstrip(), problem["answer"]))
    assert text.startswith(wanted)
