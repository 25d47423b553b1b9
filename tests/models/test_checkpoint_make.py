"""Generated checkpoints: the published names and dtypes, the same values in every layout."""

import hashlib
import importlib.util
import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from typer.testing import CliRunner

from atom_vllm_bridge.checkpoint.make import make
from atom_vllm_bridge.checkpoint.presets import build_config
from atom_vllm_bridge.checkpoint.tokenizer import (
    BOS,
    CONTROL,
    EOS,
    MARKERS,
    SMALLEST,
    write_tokenizer,
)
from atom_vllm_bridge.checkpoint.weights import draw
from atom_vllm_bridge.cli.checkpoint import checkpoint_app
from atom_vllm_bridge.models.deepseek_v4.checkpoint import (
    LAYOUTS,
    count_stages,
    detect_layout,
    draft_kind,
    tensor_table,
)
from atom_vllm_bridge.models.deepseek_v4.shards import check_shards
from atom_vllm_bridge.models.quantization import block_fp8, mxfp4

# Sides that are no multiples of 128 or 32, so that every matrix has ragged edges.
SMALL = {
    "hidden_size": 136,
    "head_dim": 40,
    "qk_rope_head_dim": 16,
    "num_attention_heads": 6,
    "q_lora_rank": 72,
    "o_groups": 3,
    "o_lora_rank": 48,
    "index_n_heads": 3,
    "index_head_dim": 24,
    "index_topk": 16,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 50,
    "vocab_size": 300,
    "dspark_markov_rank": 12,
}
TOUCHED = "layers.1.ffn.experts.3.w2.weight"


def read(directory: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for shard in sorted(directory.glob("*.safetensors")):
        with safe_open(shard, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.offset_keys()}
    return tensors


def dequantized(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    values = {}
    for name, tensor in tensors.items():
        scale = tensors.get(name.removesuffix(".weight") + ".scale")
        if name.endswith(".weight") and scale is not None:
            module = mxfp4 if tensor.dtype == torch.int8 else block_fp8
            tensor = module.dequantize(tensor, scale)
        if not name.endswith(".scale"):
            values[name] = tensor
    return values


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """layout → directory of the small checkpoint, made once."""
    made: dict[tuple, Path] = {}

    def get(layout: str, **options) -> Path:
        key = (layout, *sorted(options.items()))
        if key not in made:
            out = tmp_path_factory.mktemp("small") / "checkpoint"
            made[key] = make(out, layout=layout, overrides=SMALL, **options)
        return made[key]

    return get


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    root = tmp_path_factory.mktemp("tiny")
    return {layout: make(root / layout, layout=layout) for layout in ("bf16", "mxfp4")}


# The table


def test_the_dspark_stages_of_flash_count_as_published():
    config = build_config("flash-shaped", layers=43)
    table = tensor_table(config, "mxfp4")
    mtp = Counter(s.dtype for name, s in table.items() if name.startswith("mtp."))
    assert mtp == {"I8": 2304, "F8_E4M3": 25, "F8_E8M0": 2329, "BF16": 20, "F32": 27}
    assert sum(mtp.values()) == 4705


def test_flash_has_the_published_shapes():
    config = build_config("flash-shaped", layers=43)
    assert config["compress_ratios"] == [0, 0] + [4, 128] * 20 + [4] + [0] * 3
    assert config["dspark_target_layer_ids"] == [40, 41, 42]
    assert config["dspark_noise_token_id"] == 128799
    table = tensor_table(config, "mxfp4")
    for name, spec in {
        "embed.weight": ((129280, 4096), "BF16"),
        "layers.0.hc_attn_fn": ((24, 16384), "F32"),
        "layers.2.attn.wq_a.scale": ((8, 32), "F8_E8M0"),
        "layers.2.attn.wo_a.weight": ((8192, 4096), "F8_E4M3"),
        "layers.2.attn.compressor.ape": ((4, 1024), "F32"),
        "layers.3.attn.compressor.ape": ((128, 512), "F32"),
        "layers.2.attn.indexer.compressor.wkv.weight": ((256, 4096), "BF16"),
        "layers.2.ffn.gate.tid2eid": ((129280, 6), "I64"),
        "layers.3.ffn.gate.bias": ((256,), "F32"),
        "layers.0.ffn.experts.255.w2.weight": ((4096, 1024), "I8"),
        "layers.0.ffn.experts.255.w2.scale": ((4096, 64), "F8_E8M0"),
        "mtp.0.main_proj.weight": ((4096, 12288), "F8_E4M3"),
        "mtp.2.markov_head.markov_w1.weight": ((129280, 256), "BF16"),
        "mtp.2.confidence_head.proj.weight": ((1, 4352), "BF16"),
    }.items():
        assert table[name][:2] == spec, name
    assert "layers.1.attn.compressor.ape" not in table
    assert "layers.3.attn.indexer.wq_b.weight" not in table
    assert "layers.3.ffn.gate.tid2eid" not in table


def test_flash_base_has_fp8_experts_and_float32_scales():
    table = tensor_table(build_config("flash-shaped"), "fp8")
    assert table["layers.0.ffn.experts.0.w2.weight"][:2] == ((4096, 2048), "F8_E4M3")
    assert table["layers.0.ffn.experts.0.w2.scale"][:2] == ((32, 16), "F32")
    assert {s.dtype for name, s in table.items() if name.endswith(".scale")} == {"F32"}


def test_an_mtp_stage_has_its_own_projections_and_head():
    config = build_config(draft="mtp", overrides={"num_nextn_predict_layers": 2})
    table = tensor_table(config, "mxfp4")
    assert draft_kind(config) == "mtp"
    for stage in range(2):
        for leaf in ("e_proj.weight", "h_proj.scale", "enorm.weight", "hc_head_fn"):
            assert f"mtp.{stage}.{leaf}" in table
    assert not any("markov" in name for name in table)


def test_an_unknown_compress_ratio_is_refused():
    config = build_config(overrides={"compress_ratios": [0, 4, 64, 4, 128, 4]})
    with pytest.raises(ValueError, match=r"compress_ratios\[2\] = 64 is unknown"):
        tensor_table(config)


# Written checkpoints


@pytest.mark.parametrize("draft", ["dspark", "mtp", "none"])
@pytest.mark.parametrize("layout", ["bf16", "mxfp4", "fp8"])
def test_a_checkpoint_holds_exactly_the_table(small, layout, draft):
    directory = small(layout, draft=draft)
    config = json.loads((directory / "config.json").read_text())
    headers = check_shards(directory)
    table = tensor_table(config, layout)
    assert {name: (h.shape, h.dtype) for name, h in headers.items()} == {
        name: (spec.shape, spec.dtype) for name, spec in table.items()
    }
    stages = {"dspark": 3, "mtp": 1, "none": 0}[draft]
    assert count_stages(headers) == stages
    assert len(config["compress_ratios"]) == config["num_hidden_layers"] + stages
    assert draft_kind(config) == (None if draft == "none" else draft)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(s.nbytes for s in table.values())


@pytest.mark.parametrize("layout", ["bf16", "mxfp4", "fp8"])
def test_the_layout_shows_in_the_dtypes(small, layout):
    assert detect_layout(check_shards(small(layout))) == LAYOUTS[layout]


@pytest.mark.parametrize("layout", ["mxfp4", "fp8"])
def test_wo_a_may_be_stored_unquantised_with_the_same_values(small, layout):
    plain, usual = small(layout, wo_a="bf16"), small(layout)
    headers = check_shards(plain)
    assert detect_layout(headers).wo_a == "BF16"
    assert "layers.0.attn.wo_a.scale" not in headers
    assert "layers.0.attn.wo_b.scale" in headers
    name = "layers.0.attn.wo_a.weight"
    assert torch.equal(read(plain)[name].float(), dequantized(read(usual))[name])


@pytest.mark.parametrize("layout", ["mxfp4", "fp8"])
def test_bf16_holds_the_dequantised_values_to_the_bit(small, layout):
    bf16, quantized = read(small("bf16", like=layout)), read(small(layout))
    values = dequantized(quantized)
    assert bf16.keys() == values.keys()
    for name, value in values.items():
        assert torch.equal(bf16[name].to(value.dtype), value), name


def test_quantised_layouts_differ_only_in_the_experts(small):
    mxfp4_values = dequantized(read(small("mxfp4")))
    fp8_values = dequantized(read(small("fp8")))
    differing = {
        n for n, v in fp8_values.items() if not torch.equal(v, mxfp4_values[n])
    }
    assert differing == {n for n in fp8_values if ".experts." in n}


def test_values_depend_on_name_and_seed_only(small, tmp_path):
    first = read(small("mxfp4"))
    again = make(
        tmp_path / "again", layers=2, draft="none", overrides=SMALL, shard_bytes=20_000
    )
    fewer = read(again)
    assert len(list(again.glob("*.safetensors"))) > 5
    assert TOUCHED in fewer
    for name, tensor in fewer.items():
        assert torch.equal(
            tensor.view(-1).view(torch.uint8), first[name].view(-1).view(torch.uint8)
        ), name
    other = read(
        make(tmp_path / "other", layers=2, draft="none", overrides=SMALL, seed=1)
    )
    assert not torch.equal(other[TOUCHED], first[TOUCHED])


def test_values_are_the_same_on_every_machine():
    values = draw("layers.0.attn.wkv.weight", (64, 256), {}, {}, seed=0)
    digest = hashlib.sha256(values.numpy().tobytes()).hexdigest()
    assert digest[:16] == "c5bb9855884b5c47"


def test_shards_are_filled_up_to_the_bound(tmp_path):
    bound = 100_000
    directory = make(tmp_path / "out", overrides=SMALL, shard_bytes=bound)
    table = tensor_table(json.loads((directory / "config.json").read_text()))
    sizes: Counter = Counter()
    for name, header in check_shards(directory).items():
        sizes[header.shard] += table[name].nbytes
    count = len(sizes)
    assert sorted(sizes) == [
        f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)
    ]
    assert all(0.5 * bound < size <= bound for size in list(sizes.values())[:-1])


def test_matrices_have_deviation_gain_over_root_fan_in():
    shape = (512, 384)
    for name, gains, gain in [
        ("layers.0.attn.wq_b.weight", {}, 1.0),
        ("layers.0.ffn.experts.7.w1.weight", {"w1": 8.0}, 8.0),
        (
            "layers.0.ffn.shared_experts.w1.weight",
            {"w1": 8.0, "shared_experts.w1": 2.0},
            2.0,
        ),
    ]:
        values = draw(name, shape, {}, gains, seed=3)
        assert values.std().item() == pytest.approx(gain / 384**0.5, rel=0.01), name
        assert abs(values.mean().item()) < 0.01 * gain


def test_gains_reach_the_written_weights(small, tmp_path):
    base = read(small("bf16"))
    large = read(
        make(
            tmp_path / "large",
            layout="bf16",
            overrides=SMALL,
            gains={"w1": 8.0, "w3": 4.0},
        )
    )
    expert = "layers.0.ffn.experts.0."
    assert torch.equal(large[expert + "w1.weight"], 8 * base[expert + "w1.weight"])
    assert torch.equal(large[expert + "w3.weight"], 4 * base[expert + "w3.weight"])
    assert torch.equal(large[expert + "w2.weight"], base[expert + "w2.weight"])


@pytest.mark.parametrize(("experts", "chosen"), [(64, 6), (5, 2), (8, 8), (3, 1)])
def test_hash_routing_names_distinct_experts_and_uses_all(experts, chosen):
    table = draw(
        "layers.0.ffn.gate.tid2eid", (500, chosen), {"n_routed_experts": experts}, {}, 0
    )
    assert table.dtype == torch.int64
    assert all(len(set(row)) == chosen for row in table.tolist())
    assert set(table.flatten().tolist()) == set(range(experts))


def test_the_config_says_how_the_weights_are_stored():
    assert "quantization_config" not in build_config(layout="bf16")
    assert build_config(layout="mxfp4")["expert_dtype"] == "fp4"
    config = build_config(layout="fp8")
    assert config["expert_dtype"] == "fp8"
    assert config["quantization_config"]["weight_block_size"] == [128, 128]


def test_the_draft_can_do_without_a_confidence_head(tmp_path):
    directory = make(
        tmp_path / "out", overrides={**SMALL, "enable_confidence_head": False}
    )
    assert not any("confidence" in name for name in check_shards(directory))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"preset": "huge"},
            "no preset 'huge': choose one of tiny, schoolbook, flash-shaped",
        ),
        ({"layout": "int4"}, "no layout 'int4': choose one of bf16, mxfp4, fp8"),
        ({"draft": "eagle"}, "no draft 'eagle': choose one of dspark, mtp, none"),
        ({"like": "fp8"}, "like='fp8' is for layout 'bf16', not 'mxfp4'"),
        ({"layers": 0}, "0 layers: a checkpoint needs at least one"),
        (
            {"overrides": {"index_topK": 3}},
            "no config key 'index_topK' to override: kno",
        ),
        ({"overrides": {"o_groups": 3}}, "2048 does not divide into o_groups = 3"),
        (
            {"overrides": {"n_routed_experts": 4}},
            "_per_tok = 6 exceeds n_routed_experts",
        ),
        ({"overrides": {"hidden_size": 99}}, "hidden_size = 99 is odd"),
        (
            {"overrides": {"vocab_size": 200}},
            "vocab_size = 200 holds no byte-level tok",
        ),
        ({"overrides": {"compress_ratios": [0]}}, "has 1 entries for 6 layers"),
        (
            {"overrides": {"dspark_target_layer_ids": [6]}},
            "_ids holds 6, but there are 6",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        make(tmp_path / "out", **arguments)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_directory_in_use_is_not_overwritten_unasked(tmp_path):
    make(tmp_path, overrides=SMALL, layers=1, draft="none", shard_bytes=20_000)
    with pytest.raises(FileExistsError, match="is not empty: choose another directory"):
        make(tmp_path, overrides=SMALL)
    make(tmp_path, overrides=SMALL, layers=1, draft="none", seed=1, overwrite=True)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    assert check_shards(tmp_path)


@pytest.mark.parametrize("fault", [{"layout": "fp8", "like": "mxfp4"}, {"wo_a": "x"}])
def test_a_refusal_leaves_the_checkpoint_that_is_there(tmp_path, fault):
    make(tmp_path, overrides=SMALL, layers=1, draft="none")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=r"like=|wo_a"):
        make(tmp_path, overrides=SMALL, layers=1, overwrite=True, **fault)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_the_command_makes_a_checkpoint_and_reports_faults_in_one_line(tmp_path):
    run = CliRunner().invoke
    out = str(tmp_path / "out")
    result = run(checkpoint_app, ["make", out, "--layers", "1", "--draft", "none"])
    assert result.exit_code == 0, result.output
    assert f"{out}: tiny, mxfp4, " in result.stdout
    assert json.loads(Path(out, "config.json").read_text())["num_hidden_layers"] == 1
    again = run(checkpoint_app, ["make", out])
    assert again.exit_code == 1
    assert again.stderr.startswith(f"atom-vllm-bridge: {out} is not empty")


def test_the_command_says_in_one_line_that_the_hosts_packages_are_missing(
    tmp_path, monkeypatch
):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n: None if n == "torch" else find(n)
    )
    done = CliRunner().invoke(checkpoint_app, ["make", str(tmp_path / "out")])
    assert done.exit_code == 1
    assert done.stderr.startswith("atom-vllm-bridge: not installed: torch. ")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


# transformers reads them


def test_transformers_loads_both_layouts_with_nothing_missing_and_equal_weights(tiny):
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    models = {}
    for layout, directory in tiny.items():
        models[layout], info = DeepseekV4ForCausalLM.from_pretrained(
            directory,
            config=DeepseekV4Config.from_pretrained(directory),
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
        )
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            assert not info[kind], (layout, kind, info[kind])
    bf16 = dict(models["bf16"].named_parameters())
    for name, parameter in models["mxfp4"].named_parameters():
        assert torch.equal(parameter.float(), bf16[name].float()), name
    assert models["bf16"].config.layer_types[:3] == [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
    ]


# The tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny["mxfp4"])


@settings(max_examples=100, deadline=None)
@given(text=st.text() | st.text(st.sampled_from("ab \n<>｜▁/think🙂é\u0301\x00")))
def test_any_text_comes_back(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert max(ids, default=0) < 1024


def test_english_takes_fewer_tokens_than_bytes(tokenizer):
    text = "What is the weather in Paris? Please call the tool with the city."
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) < len(text.encode()) / 2.5


def test_text_starts_with_one_bos(tokenizer):
    assert tokenizer.encode("")[0] == tokenizer.bos_token_id == 0
    assert tokenizer.encode("a b")[1:] == tokenizer.encode(
        "a b", add_special_tokens=False
    )
    assert tokenizer.eos_token_id == 1


def test_every_id_of_the_model_decodes(tokenizer):
    assert len(tokenizer) == 1024
    assert all(tokenizer.decode([i]) for i in range(1024))


def test_markers_are_single_tokens_and_stay_in_decoded_text(tokenizer):
    for marker in (*CONTROL, *MARKERS):
        assert tokenizer.encode(f"a{marker}b", add_special_tokens=False) == [
            *tokenizer.encode("a", add_special_tokens=False),
            tokenizer.convert_tokens_to_ids(marker),
            *tokenizer.encode("b", add_special_tokens=False),
        ]
        ids = [tokenizer.convert_tokens_to_ids(marker)]
        shown = tokenizer.decode(ids, skip_special_tokens=True)
        assert shown == ("" if marker in CONTROL else marker)


@pytest.mark.parametrize("thinking", [False, True])
def test_a_chat_with_tools_uses_the_marker_ids(tokenizer, thinking):
    from vllm.tokenizers.deepseek_v4_encoding import encode_messages

    call = {"function": {"name": "f", "arguments": '{"city": "Rome"}'}}
    tool = {"function": {"name": "f", "parameters": {}}}
    prompt = encode_messages(
        [
            {"role": "system", "content": "Be brief.", "tools": [tool]},
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "reasoning": "Ask.", "tool_calls": [call]},
            {"role": "tool", "content": "Sunny."},
        ],
        thinking_mode="thinking" if thinking else "chat",
    )
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert tokenizer.decode(ids) == prompt
    counts = Counter(ids)
    for marker in (BOS, EOS, "<｜User｜>", "<｜Assistant｜>", "</think>", "｜DSML｜"):
        assert (
            counts[tokenizer.convert_tokens_to_ids(marker)] == prompt.count(marker) > 0
        )
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids[-1:]) == ("<think>" if thinking else "</think>")


def test_the_smallest_tokenizer_is_the_bytes(tmp_path):
    from transformers import AutoTokenizer

    write_tokenizer(tmp_path, SMALLEST, 100)
    smallest = AutoTokenizer.from_pretrained(tmp_path)
    text = "né 🙂"
    ids = smallest.encode(text, add_special_tokens=False)
    assert len(ids) == len(text.encode())
    assert smallest.decode(ids) == text
