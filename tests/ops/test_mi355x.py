"""What doctor says of ops on a machine that pretends to have MI355Xs (or others of AMD's), and pretended installations of aiter."""

import os
from types import SimpleNamespace

import fake_aiter
import pytest
import torch

from atom_vllm_bridge import engine_ops
from atom_vllm_bridge.cli import doctor, probes
from atom_vllm_bridge.cli.doctor.asking import Answer
from atom_vllm_bridge.cli.doctor.report import text
from atom_vllm_bridge.models.ops import registry
from atom_vllm_bridge.models.ops.aiter import entries, namesakes

ROUNDING = {
    "attention_output": "rounds rows to fp8",
    "experts": "rounds rows to fp4 or fp8",
    "feed_forward": "rounds rows to fp8",
    "indexer_logits": "rounds queries to fp8",
    "linear": "rounds rows to fp8",
    "rope": "rounds rows and angles to bfloat16",
    "write_keys": "rounds angles and the norm's weight to bfloat16",
}
TAKEN = {
    "hc_head",
    "hc_post",
    "hc_pre",
    "indexer_topk",
    "router",
    "sparse_attention",
    "swiglu",
}


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    monkeypatch.setattr(registry, "_providers", dict(registry._providers))
    monkeypatch.setattr(registry, "_choices", {})
    monkeypatch.setattr(entries, "_found", {})
    yield
    registry.configure("")


@pytest.fixture
def gpu(monkeypatch):
    """Pretends a GPU by what ROCm calls its architecture."""

    def pretend(architecture):
        monkeypatch.setattr(torch.version, "hip", "7.2.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        properties = SimpleNamespace(
            name="AMD Instinct", gcnArchName=architecture, multi_processor_count=256
        )
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device: properties
        )

    return pretend


@pytest.fixture
def mi355x(gpu):
    gpu("gfx950:sramecc+:xnack-")


def report(monkeypatch, ops=""):
    """doctor's, with the ops probe run here and the others pretended."""
    answers = {
        "ops": lambda: probes.ops(ops),
        "platform": lambda: {
            "chosen": "atom_vllm_bridge.platforms.rocm.AtomRocmPlatform",
            "ours": "atom_vllm_bridge.platforms.rocm.AtomRocmPlatform",
            "stock": "vllm.platforms.rocm.RocmPlatform",
            "enum": "ROCM",
            "refusal": None,
        },
        "patches": lambda: None,
        "devices": lambda: None,
    }
    monkeypatch.setattr(doctor, "ask", lambda probe, *rest: Answer(answers[probe]()))
    return doctor.examine(doctor.Asked(), dict(os.environ))


def chosen(found):
    return {
        row["op"]: (row["provider"], row["reason"]) for row in found.sections["ops"]
    }


@pytest.mark.usefixtures("mi355x")
def test_ops_are_aiters_where_it_rounds_no_more_than_others(monkeypatch):
    fake_aiter.install(monkeypatch, "later", None)
    found = report(monkeypatch)
    table = chosen(found)
    assert set(table) == set(registry.names())
    assert {op for op, (name, _) in table.items() if name == "aiter"} == TAKEN
    for op, rounds in ROUNDING.items():
        taken = f"aiter: {rounds}; ATOM_BRIDGE_OPS={op}=aiter takes it"
        provider = "torch" if op == "attention_output" else "triton"
        assert table[op][0] == provider
        assert table[op][1].startswith(taken)
    for op in set(table) - TAKEN - set(ROUNDING):
        assert table[op][1].startswith(f"aiter has no {op}")
    printed = text(found)
    for op, (provider, reason) in table.items():
        line = next(li for li in printed.splitlines() if li.split()[:1] == [op])
        assert line.split(maxsplit=2)[1:] == [provider, reason]


@pytest.mark.usefixtures("mi355x")
def test_whoever_names_aiter_gets_all_of_it(monkeypatch):
    fake_aiter.install(monkeypatch, "later", None)
    table = chosen(report(monkeypatch, "aiter"))
    taken = {op for op, (name, _) in table.items() if name == "aiter"}
    assert taken == TAKEN | set(ROUNDING)


@pytest.mark.usefixtures("mi355x")
def test_every_piece_that_an_older_aiter_lacks_is_named(monkeypatch):
    fake_aiter.install(monkeypatch, "earlier", None)
    table = chosen(report(monkeypatch))
    for op, piece in {
        "router": "has no topk_gating or topk_softplus",
        "indexer_topk": "has no top_k_per_row_prefill",
        "write_keys": "has no indexer_k_quant_and_cache",
        "rope": "has no rope_rotate_activation",
        "experts": "has a fused_moe without swiglu_limit",
    }.items():
        assert table[op] == ("triton", f"aiter: {piece}")


def test_what_a_gpu_cannot_do_is_named(gpu, monkeypatch):
    gpu("gfx942:sramecc+:xnack-")
    fake_aiter.install(monkeypatch, "later", None)
    table = chosen(report(monkeypatch))
    for op, piece in {
        "experts": "its matrix units do not take fp4",
        "attention_output": "its product with E8M0 scales is for CDNA 4",
        "write_keys": "it stores e4m3fnuz there, and the cache holds e4m3fn",
    }.items():
        assert f"aiter: not on gfx942: {piece}" in table[op][1]
    assert table["sparse_attention"][0] == "aiter"
    gpu("gfx90a")
    monkeypatch.setattr(registry, "_choices", {})
    for provider, reason in chosen(report(monkeypatch)).values():
        assert provider in ("triton", "torch")
        assert "aiter: is adapted for gfx942 and gfx950, and this is gfx90a" in reason


@pytest.mark.usefixtures("mi355x")
def test_without_aiter_every_op_says_what_to_install(monkeypatch):
    monkeypatch.setattr(namesakes, "look", lambda module: None)
    for provider, reason in chosen(report(monkeypatch)).values():
        assert provider in ("triton", "torch")
        assert "aiter: is not installed; pip install amd-aiter" in reason


@pytest.mark.usefixtures("mi355x")
def test_another_project_of_the_name_is_named_and_not_imported(monkeypatch, tmp_path):
    package = tmp_path / "aiter"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('must not be imported')\n")
    info = tmp_path / "aiter-0.13.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: aiter\nVersion: 0.13.2\nSummary: Tools for iterators\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    other = "aiter 0.13.2 (“Tools for iterators”)"
    found = report(monkeypatch)
    for _, reason in chosen(found).values():
        assert f"aiter: is not installed: {other} is another project" in reason
    (fault,) = [f for f in found.faults if "another project" in f]
    assert f"{package}, {other}, is another project of that name" in fault
    assert "install amd-aiter" in fault


@pytest.mark.usefixtures("mi355x")
def test_a_pin_that_cannot_hold_says_why(monkeypatch):
    fake_aiter.install(monkeypatch, "earlier", None)
    engine_ops.configure("experts=aiter")
    with pytest.raises(ValueError, match="fused_moe without swiglu_limit"):
        registry.resolve("experts", "cuda")
