"""Loading: every slot filled once, every tensor used once, every fault named."""

import json
import random
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from atom_vllm_bridge.checkpoint.make import make
from atom_vllm_bridge.models.deepseek_v4.checkpoint import (
    TensorHeader,
    TensorSpec,
    check_headers,
    count_stages,
    detect_layout,
    tensor_table,
)
from atom_vllm_bridge.models.deepseek_v4.loading import (
    CheckpointError,
    check_shards,
    iterate,
    load,
)
from atom_vllm_bridge.models.quantization import block_fp8, mxfp4

INDEX = "model.safetensors.index.json"
SHARD = "model-00012-of-00048.safetensors"


def random_values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


FP8, FP8_SCALE = block_fp8.quantize(random_values(200, 130))
FP4, FP4_SCALE = mxfp4.quantize(random_values(6, 70))
TENSORS = {
    "norm.weight": random_values(7).bfloat16(),
    "gate.bias": random_values(5),
    "gate.tid2eid": torch.arange(8).view(4, 2),
    "wq.weight": FP8,
    "wq.scale": FP8_SCALE,
    "w1.weight": FP4,
    "w1.scale": FP4_SCALE,
    "wo.weight": random_values(3, 4).bfloat16(),
}


def empty_slots(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {
        "norm.weight": torch.full((7,), torch.nan, dtype=dtype),
        "gate.bias": torch.full((5,), torch.nan),
        "gate.tid2eid": torch.full((4, 2), -1, dtype=torch.int32),
        "wq.weight": torch.full((200, 130), torch.nan, dtype=dtype),
        "w1.weight": torch.full((6, 70), torch.nan, dtype=dtype),
        "wo.weight": torch.full((3, 4), torch.nan, dtype=dtype),
    }


def faults(change, **options) -> list[str]:
    """The problems found after `change` was done to the tensors."""
    tensors = dict(TENSORS)
    stream = change(tensors) or list(tensors.items())
    with pytest.raises(CheckpointError) as error:
        load(empty_slots(), stream, where=lambda name: SHARD, **options)
    return error.value.problems


# What is loaded


@settings(max_examples=30, deadline=None)
@given(st.permutations(list(TENSORS)), st.sampled_from([torch.float32, torch.bfloat16]))
def test_any_order_of_arrival_gives_the_same_values(order, dtype):
    slots = empty_slots(dtype)
    report = load(slots, [(name, TENSORS[name]) for name in order])
    assert (report.filled, report.tensors, report.ignored) == (6, 8, [])
    assert report.nbytes == sum(tensor.nbytes for tensor in TENSORS.values())
    expected = {
        **TENSORS,
        "wq.weight": block_fp8.dequantize(FP8, FP8_SCALE),
        "w1.weight": mxfp4.dequantize(FP4, FP4_SCALE),
    }
    for name, slot in slots.items():
        assert torch.equal(slot, expected[name].to(slot.dtype)), name


def test_values_land_in_views_of_a_larger_parameter():
    fused = torch.full((403, 130), torch.nan)
    slots = {"wq.weight": fused[2:202], "wk.weight": fused[202:402]}
    load(
        slots,
        {
            "wq.scale": FP8_SCALE,
            "wk.weight": torch.ones(200, 130),
            "wq.weight": FP8,
        }.items(),
    )
    assert torch.equal(fused[2:202], block_fp8.dequantize(FP8, FP8_SCALE))
    assert (fused[202:402] == 1).all()
    assert fused[[0, 1, 402]].isnan().all()


def test_parameters_that_need_gradients_are_filled():
    parameter = torch.nn.Parameter(torch.zeros(2))
    load({"norm.weight": parameter}, [("norm.weight", torch.ones(2))])
    assert parameter.tolist() == [1.0, 1.0]
    assert parameter.grad_fn is None


def test_ignored_and_optional_names_are_not_faults():
    slots = {**empty_slots(), "mtp.confidence.weight": torch.zeros(1)}
    stream = [*TENSORS.items(), ("mtp.0.norm.weight", torch.ones(1))]
    report = load(
        slots,
        stream,
        ignore=lambda name: name.startswith("mtp."),
        optional=lambda name: "confidence" in name,
    )
    assert report.ignored == ["mtp.0.norm.weight"]
    assert report.filled == 6


# Faults, each one line


def test_a_missing_tensor_is_named():
    assert faults(lambda t: t.pop("gate.bias") is None) == [
        f"gate.bias is missing, expected [5], in {SHARD}."
    ]


def test_a_left_over_tensor_is_named():
    problems = faults(lambda t: t.update({"gate.extra": torch.ones(1)}))
    assert problems == [
        f"gate.extra is left over: nothing in the model takes it, in {SHARD}."
    ]


def test_a_scale_of_an_unquantised_weight_is_left_over_in_either_order():
    line = f"wo.scale is left over: its weight is not quantised, in {SHARD}."
    assert faults(lambda t: t.update({"wo.scale": torch.ones(1, 1)})) == [line]
    assert faults(lambda t: [("wo.scale", torch.ones(1, 1)), *t.items()]) == [line]


def test_a_tensor_that_comes_twice_is_named():
    for name in ("norm.weight", "wq.scale"):
        problems = faults(lambda t, n=name: [*t.items(), (n, t[n])])
        assert problems == [f"{name} came twice, expected once, in {SHARD}."]


def test_a_wrong_shape_is_named():
    problems = faults(lambda t: t.update({"norm.weight": torch.ones(1, 7)}))
    assert problems == [f"norm.weight is [1, 7], expected [7], in {SHARD}."]
    problems = faults(lambda t: t.update({"wq.weight": FP8[:199]}))
    assert problems == [f"wq.weight is [199, 130], expected [200, 130], in {SHARD}."]
    problems = faults(lambda t: t.update({"w1.weight": torch.ones(6, 70).char()}))
    assert problems == [
        f"w1.weight is [6, 70], expected [6, 35] (two inputs a byte), in {SHARD}."
    ]


@pytest.mark.parametrize(
    ("name", "tensor", "expected"),
    [
        (
            "norm.weight",
            torch.ones(7, dtype=torch.int64),
            "is int64, expected bfloat16 or",
        ),
        (
            "norm.weight",
            torch.ones(7).double(),
            "is float64, expected bfloat16 or float16 or",
        ),
        ("gate.tid2eid", torch.ones(4, 2), "is float32, expected int32 or int64"),
        ("gate.bias", torch.ones(5).char(), "is int8, expected bfloat16 or float16 or"),
        (
            "wq.weight",
            torch.ones(200, 130).to(torch.float8_e5m2),
            "is float8_e5m2, expected",
        ),
        (
            "wq.scale",
            torch.ones(2, 2).int(),
            "is int32, expected float8_e8m0fnu or float32",
        ),
    ],
)
def test_a_wrong_dtype_is_named_alone(name, tensor, expected):
    for order in (1, -1):
        problems = faults(lambda t, o=order: list({**t, name: tensor}.items())[::o])
        assert len(problems) == 1
        assert problems[0].startswith(f"{name} {expected}")
        assert problems[0].endswith(f", in {SHARD}.")


@pytest.mark.parametrize("wrong", [-1, 8])
def test_an_expert_that_does_not_exist_is_named(wrong):
    experts = torch.tensor([[0, 7], [3, 1]])
    slots = {"gate.tid2eid": torch.zeros(2, 2, dtype=torch.int64)}
    slots["gate.weight"] = torch.zeros(8, 4)
    stream = {"gate.weight": torch.ones(8, 4), "gate.tid2eid": experts}
    load(slots, stream.items())
    assert torch.equal(slots["gate.tid2eid"], experts)
    stream["gate.tid2eid"] = torch.tensor([[0, 7], [wrong, 0]])
    with pytest.raises(CheckpointError) as error:
        load(slots, stream.items(), where=lambda name: SHARD)
    low, high = min(wrong, 0), max(wrong, 7)
    assert error.value.problems == [
        f"gate.tid2eid names experts {low} to {high}, expected 0 to 7, in {SHARD}. "
        "n_routed_experts may be of another checkpoint."
    ]
    assert torch.equal(slots["gate.tid2eid"], experts)


def test_a_missing_scale_is_named():
    assert faults(lambda t: t.pop("wq.scale") is None) == [
        f"wq.scale is missing, though wq.weight is float8_e4m3fn, in {SHARD}."
    ]
    assert faults(lambda t: t.pop("w1.scale") is None) == [
        f"w1.scale is missing, though w1.weight is int8, in {SHARD}."
    ]


def test_a_scale_without_its_weight_names_the_weight():
    assert faults(lambda t: t.pop("w1.weight") is None) == [
        f"w1.weight is missing, expected [6, 70], though its scale [6, 3] is there, in {SHARD}."
    ]


def test_a_scale_of_another_layout_says_so():
    scale = torch.ones(1, 1).to(torch.float8_e8m0fnu)
    assert faults(lambda t: t.update({"w1.scale": scale})) == [
        f"w1.scale is [1, 1], expected [6, 3] (one scale for 32 inputs), in {SHARD}. "
        "The shard may be from another layout."
    ]
    assert faults(lambda t: t.update({"wq.scale": scale})) == [
        f"wq.scale is [1, 1], expected [2, 2] (one scale for 128 × 128 weights), in {SHARD}. "
        "The shard may be from another layout."
    ]


def test_all_faults_come_in_one_error_that_starts_with_the_first():
    tensors = {"norm.weight": torch.ones(1), "other": torch.ones(1)}
    with pytest.raises(CheckpointError) as error:
        load(empty_slots(), tensors.items())
    lines = str(error.value).splitlines()
    assert lines[0] == (
        "checkpoint: norm.weight is [1], expected [7]. (the first of 7 faults)"
    )
    assert lines[1:] == error.value.problems[1:]
    assert {line.split()[0] for line in lines[2:]} == empty_slots().keys() - {
        "norm.weight"
    }
    assert isinstance(error.value, ValueError)


def test_a_long_list_of_faults_is_cut_but_counted():
    with pytest.raises(CheckpointError) as error:
        load({f"slot{i}": torch.zeros(1) for i in range(500)}, [])
    lines = str(error.value).splitlines()
    assert "(the first of 500 faults)" in lines[0]
    assert lines[-1] == "… and 480 more"
    assert len(error.value.problems) == 500


# Shards


@pytest.fixture
def shards(tmp_path):
    """Two shards and their index."""
    first, second = (
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    )
    save_file(
        {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4).char()}, tmp_path / first
    )
    save_file(
        {"c": torch.ones(3, 0), "d": torch.tensor(2.0).bfloat16()}, tmp_path / second
    )
    write_index(tmp_path, {"a": first, "b": first, "c": second, "d": second})
    return tmp_path


def write_index(directory, weight_map):
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def shard_faults(directory) -> list[str]:
    with pytest.raises(CheckpointError) as error:
        check_shards(directory)
    return error.value.problems


def test_headers_say_where_what_and_how_large(shards):
    assert check_shards(shards) == {
        "a": TensorHeader("model-00001-of-00002.safetensors", "F32", (2, 3)),
        "b": TensorHeader("model-00001-of-00002.safetensors", "I8", (4,)),
        "c": TensorHeader("model-00002-of-00002.safetensors", "F32", (3, 0)),
        "d": TensorHeader("model-00002-of-00002.safetensors", "BF16", ()),
    }


def test_iterate_reads_every_tensor_and_only_the_wanted_ones(shards):
    tensors = dict(iterate(shards, progress=False))
    assert torch.equal(tensors["a"], torch.arange(6.0).view(2, 3))
    assert torch.equal(tensors["b"], torch.ones(4).char())
    assert tensors["c"].shape == (3, 0)
    assert tensors["d"].item() == 2.0
    assert [
        n for n, _ in iterate(shards, wanted=lambda n: n in "ad", progress=False)
    ] == [
        "a",
        "d",
    ]


def test_iterate_shows_a_bar_in_bytes(shards, capsys):
    list(iterate(shards))
    shown = capsys.readouterr().err
    assert "Loading weights" in shown
    assert "30.0/30.0" in shown


def test_a_single_file_needs_no_index(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    assert check_shards(tmp_path) == {
        "a": TensorHeader("model.safetensors", "F32", (2,))
    }


def test_a_directory_without_a_checkpoint_is_refused(tmp_path):
    assert shard_faults(tmp_path) == [
        f"{tmp_path} holds neither {INDEX} nor model.safetensors: give a checkpoint's directory."
    ]


@pytest.mark.parametrize("keep", [0, 7, 8, 50, -1])
def test_a_truncated_shard_is_named(shards, keep):
    path = shards / "model-00001-of-00002.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:keep])
    (problem,) = shard_faults(shards)
    assert problem.startswith("model-00001-of-00002.safetensors is truncated: ")
    assert problem.endswith("Download it again.")
    with pytest.raises(CheckpointError):
        next(iterate(shards, progress=False))


def test_bytes_after_the_data_are_a_fault(shards):
    with (shards / "model-00002-of-00002.safetensors").open("ab") as file:
        file.write(b"x")
    (problem,) = shard_faults(shards)
    assert problem.startswith("model-00002-of-00002.safetensors is too long: ")


@pytest.mark.parametrize("header", [b"not json", b'["a"]', b'{"a": {"dtype": "F32"}}'])
def test_an_unreadable_header_is_named(shards, header):
    path = shards / "model-00002-of-00002.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    (problem,) = shard_faults(shards)
    assert problem.startswith(
        "model-00002-of-00002.safetensors has an unreadable header"
    )


def test_an_unreadable_index_is_named(shards):
    (shards / INDEX).write_text("{")
    (problem,) = shard_faults(shards)
    assert problem.startswith(f"{shards / INDEX} is not an index (JSONDecodeError: ")


def test_a_missing_shard_is_named(shards):
    (shards / "model-00002-of-00002.safetensors").unlink()
    assert shard_faults(shards) == [
        f"model-00002-of-00002.safetensors is missing from {shards}: download it again."
    ]


def test_index_and_shards_must_name_the_same_tensors(shards):
    first, second = (
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    )
    write_index(shards, {"a": second, "c": second, "d": second, "e": first})
    assert shard_faults(shards) == [
        f"b is in {first}, but {INDEX} does not name it.",
        f"a should be in {second}, says {INDEX}, but is in {first}.",
        f"e should be in {first}, says {INDEX}, but is in no shard.",
    ]


def test_a_tensor_held_twice_is_named(shards):
    first, second = (
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    )
    save_file({"a": torch.ones(1), "c": torch.ones(1)}, shards / second)
    write_index(shards, {"a": first, "b": first, "c": second})
    assert shard_faults(shards) == [f"a is held twice, in {first} and in {second}."]


# Headers against the table

TABLE = {
    "layers.0.w1.weight": TensorSpec((4, 8), "I8"),
    "layers.0.w1.scale": TensorSpec((4, 1), "F8_E8M0"),
    "layers.0.tid2eid": TensorSpec((9, 2), "I64"),
    "mtp.0.norm.weight": TensorSpec((3,), "BF16"),
    "confidence": TensorSpec((1,), "BF16", optional=True),
}


def headers(**changes) -> dict[str, TensorHeader]:
    found = {n: TensorHeader(SHARD, s.dtype, s.shape) for n, s in TABLE.items()}
    for name, header in changes.items():
        found[name.replace("__", ".")] = header
    return {name: header for name, header in found.items() if header is not None}


def table_faults(found, **options) -> list[str]:
    with pytest.raises(CheckpointError) as error:
        check_headers(TABLE, found, **options)
    return error.value.problems


def test_headers_that_match_pass_and_equivalent_dtypes_too():
    check_headers(TABLE, headers())
    check_headers(
        TABLE,
        headers(
            layers__0__tid2eid=TensorHeader(SHARD, "I32", (9, 2)),
            layers__0__w1__scale=TensorHeader(SHARD, "F32", (4, 1)),
            mtp__0__norm__weight=TensorHeader(SHARD, "F32", (3,)),
            confidence=None,
        ),
    )


def test_headers_that_do_not_match_are_named():
    found = headers(
        layers__0__w1__weight=TensorHeader(SHARD, "F8_E4M3", (4, 8)),
        layers__0__w1__scale=TensorHeader(SHARD, "F8_E8M0", (4, 2)),
        layers__0__tid2eid=None,
        extra=TensorHeader(SHARD, "F32", ()),
    )
    assert table_faults(found) == [
        f"layers.0.w1.weight is F8_E4M3, expected I8, in {SHARD}.",
        f"layers.0.w1.scale is [4, 2], expected [4, 1], in {SHARD}.",
        "layers.0.tid2eid is missing, expected I64 [9, 2].",
        f"extra is left over: nothing in the model takes it, in {SHARD}.",
    ]


def test_an_ignored_prefix_may_be_absent_or_unknown():
    found = headers(mtp__0__norm__weight=None, mtp__7__x=TensorHeader(SHARD, "F32", ()))
    check_headers(TABLE, found, ignored=("mtp.",))
    assert len(table_faults(found)) == 2


def test_a_missing_stage_is_named():
    assert count_stages(dict.fromkeys(["embed.weight", "mtp.0.x", "mtp.1.x"])) == 2
    assert count_stages({}) == 0
    with pytest.raises(
        CheckpointError, match=r"mtp.1 is missing, though mtp.2 is there"
    ):
        count_stages(dict.fromkeys(["mtp.0.x", "mtp.2.x"]))


def test_a_checkpoint_of_another_model_is_not_given_a_layout():
    with pytest.raises(CheckpointError, match="Is this a DeepSeek-V4 checkpoint"):
        detect_layout(
            {"model.embed_tokens.weight": TensorHeader(SHARD, "BF16", (1, 1))}
        )


# A whole checkpoint

SMALL = {
    "hidden_size": 136,
    "head_dim": 40,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 72,
    "o_lora_rank": 48,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 50,
    "vocab_size": 300,
}


@pytest.mark.parametrize("layout", ["mxfp4", "fp8"])
def test_a_quantised_checkpoint_loads_as_its_bf16_copy(tmp_path, layout):
    loaded = {}
    for stored in ("bf16", layout):
        directory = make(
            tmp_path / stored,
            layout=stored,
            like=layout if stored == "bf16" else None,
            overrides=SMALL,
            shard_bytes=200_000,
        )
        config = json.loads((directory / "config.json").read_text())
        found = check_shards(directory)
        check_headers(tensor_table(config, detect_layout(found)), found)
        slots = {
            name: torch.empty(
                spec.shape, dtype=torch.int32 if spec.dtype == "I64" else torch.bfloat16
            )
            for name, spec in tensor_table(config, "bf16").items()
        }
        tensors = list(iterate(directory, progress=False))
        random.Random(0).shuffle(tensors)
        report = load(slots, tensors, where=lambda name, f=found: f[name].shard)
        assert report.tensors == len(found)
        loaded[stored] = slots
    for name, values in loaded["bf16"].items():
        assert torch.equal(loaded[layout][name], values), name


MEASURE = """
import json, sys
from pathlib import Path
import torch
from atom_vllm_bridge.models.deepseek_v4.checkpoint import tensor_table
from atom_vllm_bridge.models.deepseek_v4.loading import iterate, load
directory = Path(sys.argv[1])
config = json.loads((directory / "config.json").read_text())
torch.ones(300, 300).to(torch.float8_e4m3fn).float().sum()
Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
def resident(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))
before = resident("VmRSS")
slots = {
    name: torch.empty(spec.shape, dtype=torch.bfloat16)
    for name, spec in tensor_table(config, "bf16").items()
    if spec.dtype != "I64"
}
load(slots, iterate(directory, wanted=lambda n: "tid2eid" not in n, progress=False))
print(resident("VmHWM") - before, sum(slot.nbytes for slot in slots.values()))
"""


@pytest.mark.parametrize("layout", ["bf16", "mxfp4"])
def test_memory_stays_below_1_3_times_the_weights(tmp_path, layout):
    make(tmp_path / "tiny", layout=layout, tokenizer=False)
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / "tiny")],
        capture_output=True,
        text=True,
        check=True,
    )
    grown, weights = map(int, result.stdout.split())
    assert weights > 100 * 2**20
    assert weights * 0.9 < grown < weights * 1.3
