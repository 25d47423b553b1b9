"""A draft takes every `mtp.*` tensor of a checkpoint once, the target none; what is not as it should be is named."""

import json
from collections import Counter
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace

import pytest
import torch
from harness import SMALL, config_of
from plain_drafts import read_checkpoint

from atom_vllm_bridge import weights
from atom_vllm_bridge.checkpoint.make import make
from atom_vllm_bridge.models.deepseek_v4 import loading
from atom_vllm_bridge.models.deepseek_v4.checkpoint import (
    CheckpointError,
    count_stages,
    tensor_table,
)
from atom_vllm_bridge.models.deepseek_v4.dspark import DSparkConfig, DSparkDraft
from atom_vllm_bridge.models.deepseek_v4.model import DeepseekV4Model
from atom_vllm_bridge.models.deepseek_v4.mtp import MTPDraft
from atom_vllm_bridge.models.quantization import block_fp8, mxfp4
from atom_vllm_bridge.models.quantization.kv_codecs import kv_codec

LAYOUTS = ("bf16", "mxfp4", "fp8")
MARKOV = "mtp.2.markov_head."


@cache
def checkpoint(layout="bf16", draft="dspark", **overrides):
    return make(
        Path(mkdtemp(prefix="draft-weights-")) / "checkpoint",
        layout=layout,
        draft=draft,
        overrides=SMALL
        | {"num_hidden_layers": 2, "n_routed_experts": 4}
        | ({"dspark_markov_rank": 8} if draft == "dspark" else {})
        | overrides,
        tokenizer=False,
    )


@cache
def tensors_of(directory):
    return read_checkpoint(directory)[0]


def published(directory):
    return json.loads((directory / "config.json").read_text())


def empty_draft(directory, names=None, confidence=True):
    """The draft that the adapter builds for these names; every parameter is NaN."""
    config, hf = config_of(directory), published(directory)
    common = {
        "dtype": torch.float32,
        "device": "cpu",
        "kv_codec": kv_codec("auto", torch.float32, config),
    }
    if "dspark_block_size" in hf:
        stages = count_stages(names or tensors_of(directory))
        draft = DSparkDraft(
            config, DSparkConfig.from_hf(hf), stages, confidence=confidence, **common
        )
    else:
        draft = MTPDraft(config, **common)
    for parameter in draft.parameters():
        parameter.fill_(torch.nan)
    return draft


def load(model, directory, tensors, into=weights.load_draft):
    """Through the bridge, as vLLM hands over what it reads."""
    adapter = torch.nn.Module()
    adapter.model = model
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(model=str(directory), revision=None),
        load_config=SimpleNamespace(download_dir=None, load_format="auto"),
    )
    return into(adapter, tensors.items(), vllm_config)


@pytest.fixture
def reports(monkeypatch):
    """What each load used."""
    made = []

    def load_and_keep(*args, **kwargs):
        made.append(real(*args, **kwargs))
        return made[-1]

    real = loading.load
    monkeypatch.setattr(loading, "load", load_and_keep)
    return made


def dequantised(tensors, name):
    weight, scale = tensors[name], tensors.get(name.removesuffix("weight") + "scale")
    if scale is None:
        return weight.float()
    known = mxfp4 if weight.dtype == torch.int8 else block_fp8
    return known.dequantize(weight, scale).float()


@pytest.mark.parametrize("draft", ["dspark", "mtp"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_draft_takes_every_mtp_tensor_once_and_the_target_none(
    layout, draft, reports
):
    directory = checkpoint(layout, draft)
    tensors, config = tensors_of(directory), config_of(directory)
    table = tensor_table(published(directory), layout)
    of_draft = {name for name in table if name.startswith("mtp.")}
    assert tensors.keys() == table.keys()
    assert len(of_draft) > 30

    model = empty_draft(directory)
    load(model, directory, tensors)
    target = DeepseekV4Model(config, dtype=torch.float32)
    load(target, directory, tensors, weights.load_target)
    for report, mine in zip(reports, (of_draft, table.keys() - of_draft), strict=True):
        assert report.tensors == len(mine)
        assert report.nbytes == sum(table[name].nbytes for name in mine)
        assert sorted(report.ignored) == sorted(table.keys() - mine)
        assert report.filled == sum(not name.endswith(".scale") for name in mine)
    slots = model.weight_slots()
    assert slots.keys() == {n for n in of_draft if not n.endswith(".scale")}
    for name, slot in slots.items():
        assert torch.equal(slot, dequantised(tensors, name)), name
    assert all(p.isfinite().all() for p in model.parameters())
    assert not any(name.startswith("mtp.") for name in target.weight_slots())


@pytest.mark.parametrize("draft", ["dspark", "mtp"])
def test_slots_of_a_draft_cover_all_parameters_once(draft):
    """Each slot is filled with a number of its own; no parameter keeps another value."""
    model = empty_draft(checkpoint(draft=draft))
    counts = {}
    for number, slot in enumerate(model.weight_slots().values()):
        slot.fill_(number)
        counts[number] = slot.numel()
    seen: Counter[float] = Counter()
    for parameter in model.parameters():
        for value, count in zip(*parameter.unique(return_counts=True), strict=True):
            seen[float(value)] += int(count)
    assert seen == counts


def test_names_of_all_parameters_are_returned():
    directory = checkpoint()
    model = empty_draft(directory)
    names = load(model, directory, tensors_of(directory))
    assert names == {f"model.{name}" for name, _ in model.named_parameters()}


def test_the_markov_head_is_not_taken_for_an_experts_matrices():
    directory = checkpoint()
    marked = dict(tensors_of(directory))
    for name, value in (("markov_w1", 77.0), ("markov_w2", 99.0)):
        marked[f"{MARKOV}{name}.weight"] = torch.full_like(
            marked[f"{MARKOV}{name}.weight"], value
        )
    model = empty_draft(directory)
    load(model, directory, marked)
    for value, where in ((77.0, "markov_w1"), (99.0, "markov_w2")):
        places = {n for n, p in model.named_parameters() if (p == value).any()}
        assert places == {where}
        assert (getattr(model, where) == value).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_stages_are_those_of_the_index(layout, stages):
    directory = checkpoint(layout, n_mtp_layers=stages)
    model = empty_draft(directory)
    assert len(model.stages) == stages
    load(model, directory, tensors_of(directory))
    assert all(p.isfinite().all() for p in model.parameters())
    last = f"mtp.{stages - 1}."
    heads = {n for n in model.weight_slots() if "markov" in n or ".hc_head" in n}
    assert len(heads) == 5
    assert all(name.startswith(last) for name in heads)


# Faults


def faults(directory, change, confidence=True):
    """The problems that a load finds after `change` was done to the tensors."""
    tensors = dict(tensors_of(directory))
    change(tensors)
    with pytest.raises(CheckpointError) as error:
        load(empty_draft(directory, tensors, confidence=confidence), directory, tensors)
    return error.value.problems


def without(*prefixes):
    def change(tensors):
        for name in [n for n in tensors if n.startswith(prefixes)]:
            del tensors[name]

    return change


@pytest.mark.parametrize("stage", [0, 1])
def test_a_missing_stage_is_named(stage):
    (problem,) = faults(checkpoint(), without(f"mtp.{stage}."))
    assert problem == f"mtp.{stage} is missing, though mtp.2 is there."


def test_without_its_last_stage_the_heads_are_named():
    problems = "\n".join(faults(checkpoint(), without("mtp.2.")))
    for name in (
        "markov_head.markov_w1.weight",
        "markov_head.markov_w2.weight",
        "norm.weight",
        "hc_head_fn",
        "hc_head_base",
        "hc_head_scale",
    ):
        assert f"mtp.1.{name} is missing" in problems


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mtp.0.main_proj.weight", [64, 128]),
        ("mtp.0.main_norm.weight", [64]),
        (f"{MARKOV}markov_w1.weight", [160, 8]),
        (f"{MARKOV}markov_w2.weight", [160, 8]),
        ("mtp.1.ffn.experts.3.w2.weight", [64, 32]),
        ("mtp.1.attn.attn_sink", [4]),
        ("mtp.2.confidence_head.proj.weight", [1, 72]),
    ],
)
def test_a_missing_tensor_is_named(layout, name, shape):
    directory = checkpoint(layout)
    problems = faults(directory, lambda tensors: tensors.pop(name))
    assert len(problems) == 1
    assert problems[0].startswith(f"{name} is missing, expected {shape}")
    assert problems[0].endswith("in model-00001-of-00001.safetensors.")


@pytest.mark.parametrize(
    "name",
    [
        "mtp.0.main_norm.bias",
        "mtp.1.main_proj.weight",
        "mtp.0.norm.weight",
        "mtp.0.markov_head.markov_w1.weight",
        "mtp.0.enorm.weight",
        "mtp.0.attn.compressor.ape",
        "mtp.2.ffn.experts.4.w1.weight",
    ],
)
def test_an_extra_tensor_is_named(name):
    problems = faults(checkpoint(), lambda t: t.update({name: torch.ones(1)}))
    assert problems == [f"{name} is left over: nothing in the model takes it."]


def test_a_confidence_head_that_was_not_announced_is_left_over():
    (problem,) = faults(checkpoint(), lambda tensors: None, confidence=False)
    assert problem.startswith("mtp.2.confidence_head.proj.weight is left over")


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("mtp.0.main_proj.weight", (64, 64), [64, 128]),
        (f"{MARKOV}markov_w1.weight", (8, 160), [160, 8]),
        (f"{MARKOV}markov_w2.weight", (160, 4), [160, 8]),
        ("mtp.1.attn.wkv.weight", (32, 32), [32, 64]),
        ("mtp.2.hc_head_base", (1,), [4]),
        ("mtp.2.confidence_head.proj.weight", (72,), [1, 72]),
    ],
)
def test_a_wrong_shape_is_named(name, shape, expected):
    (problem,) = faults(checkpoint(), lambda t: t.update({name: torch.ones(shape)}))
    assert problem.startswith(f"{name} is {list(shape)}, expected {expected}, in ")


@pytest.mark.parametrize(
    ("name", "shape"), [("e_proj.weight", [64, 64]), ("hnorm.weight", [64])]
)
def test_a_missing_tensor_of_an_mtp_layer_is_named(name, shape):
    problems = faults(checkpoint(draft="mtp"), lambda t: t.pop(f"mtp.0.{name}"))
    assert len(problems) == 1
    assert problems[0].startswith(f"mtp.0.{name} is missing, expected {shape}")


def test_a_second_mtp_layer_is_left_over():
    directory = checkpoint(draft="mtp", num_nextn_predict_layers=2)
    problems = faults(directory, lambda tensors: None)
    assert "mtp.1.enorm.weight is left over" in "\n".join(problems)
    assert all(problem.startswith("mtp.1.") for problem in problems)
