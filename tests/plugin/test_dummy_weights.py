"""`--load-format dummy`: a config.json alone is served, with random weights in the layout that it declares."""

import json

import pytest
import torch
from engines import SHALLOW, prompt, running
from safetensors.torch import save_file

from atom_vllm_bridge import dummy_weights
from atom_vllm_bridge.checkpoint.presets import build_config
from atom_vllm_bridge.models.deepseek_v4 import checkpoint
from atom_vllm_bridge.models.quantization import block_fp8, mxfp4


@pytest.mark.parametrize("layout", ["bf16", "mxfp4", "fp8"])
def test_the_tensors_are_those_of_the_layout_that_the_config_declares(layout):
    config = build_config("tiny", layout=layout)
    expected = checkpoint.tensor_table(config, layout)
    made = dict(dummy_weights.tensors(config))
    assert {name: tuple(tensor.shape) for name, tensor in made.items()} == {
        name: spec.shape for name, spec in expected.items()
    }
    quantised = [name for name in made if name.endswith(".scale")]
    assert bool(quantised) == (layout != "bf16")
    for name in quantised:
        weight = made[name.removesuffix(".scale") + ".weight"]
        if weight.dtype == torch.int8:
            values = mxfp4.dequantize(weight, made[name])
        else:
            values = block_fp8.dequantize(weight, made[name])
        gain = 0.15 if name.endswith(("w2.scale", "wo_b.scale")) else 1
        # Scales are powers of two.
        ratio = float(values.std()) * values.shape[1] ** 0.5 / gain
        assert 0.65 < ratio < 1.55, name


def test_they_are_the_same_each_time():
    config = build_config("tiny")
    pairs = zip(
        dummy_weights.tensors(config), dummy_weights.tensors(config), strict=True
    )
    for (name, one), (other_name, other) in pairs:
        assert name == other_name
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("draft", ["dspark", "mtp"])
def test_a_config_alone_gives_the_text_of_those_tensors_in_a_checkpoint(
    tmp_path, draft
):
    config = build_config("tiny", draft=draft, overrides=SHALLOW)
    text = json.dumps(config)
    (alone := tmp_path / "alone").mkdir()
    (alone / "config.json").write_text(text)
    (whole := tmp_path / "whole").mkdir()
    (whole / "config.json").write_text(text)
    save_file(dict(dummy_weights.tensors(config)), whole / "model.safetensors")
    prompts = [prompt(length, seed=length, vocabulary=512) for length in (5, 140)]
    found = []
    for directory, load_format in ((whole, "auto"), (alone, "dummy")):
        with running(
            directory,
            load_format=load_format,
            skip_tokenizer_init=True,
            speculative_config={"method": draft, "num_speculative_tokens": 2},
        ) as engine:
            answers = engine.generate(prompts)
            drafted = engine.counter("vllm:spec_decode_num_draft_tokens")
            found.append([answer.tokens for answer in answers])
            assert drafted > 0
    assert found[0] == found[1]
