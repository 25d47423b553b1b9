"""The self-test finds ops that are wrong, that fail and that do not run here."""

import pytest
import torch

from atom_vllm_bridge.cli import selftest
from atom_vllm_bridge.models.ops import registry
from atom_vllm_bridge.models.ops.registry import Provider, resolve_from


def test_every_op_has_a_check():
    assert set(selftest.CHECKS) == set(registry.names())


@pytest.fixture
def rows(monkeypatch):
    """What is said of a provider with three ops, and of one that does not run on a CPU."""

    def off_by_a_tenth(x, rotation):
        return resolve_from("torch", "rope")(x, rotation).mul_(1.1)

    def out_of_order(scores, available, k):
        return resolve_from("torch", "indexer_topk")(scores, available, k).flip(-1)

    def broken(*args, **kwargs):
        raise RuntimeError("no kernel image\nis available")

    def cannot_import(op):
        if op == "rope":
            raise ImportError("undefined symbol: launch")

    def half_of_it(*args, **kwargs):
        return resolve_from("torch", "hc_pre")(*args, **kwargs)[:1]

    ops = {
        "hc_pre": half_of_it,
        "swiglu": lambda *args: None,
        "rope": off_by_a_tenth,
        "indexer_topk": out_of_order,
        "hc_post": broken,
        "hc_head": resolve_from("torch", "hc_head"),
    }
    monkeypatch.setattr(registry, "_providers", dict(registry._providers))
    registry.register(Provider("mine", ops.get, lambda device: None))
    registry.register(Provider("far", ops.get, lambda device: "is elsewhere"))
    registry.register(Provider("lame", ops.get, broken))
    registry.register(Provider("torn", cannot_import, lambda device: None))
    try:
        found = selftest.selftest()
    finally:
        registry.configure("")
    return {(row["provider"], row["op"]): row for row in found}


def test_each_op_is_ok_wrong_with_the_figure_failed_or_refused(rows):
    assert rows["mine", "rope"]["state"] == "wrong"
    assert rows["mine", "rope"]["reason"] == "1.0e-01 from torch, at most 0.0001"
    assert rows["mine", "indexer_topk"]["state"] == "wrong"
    assert rows["mine", "hc_head"]["state"] == "ok"
    assert rows["mine", "hc_post"]["state"] == "failed"
    assert rows["mine", "hc_post"]["reason"] == "RuntimeError: no kernel image"
    assert rows["far", "all"]["state"] == "refused"
    assert rows["far", "all"]["reason"] == "is elsewhere"
    planted = ("mine", "far", "lame", "torn")
    shipped = {r["state"] for (p, _), r in rows.items() if p not in planted}
    assert shipped == {"ok", "refused"}
    mine = [op for provider, op in rows if provider == "mine"]
    assert mine == ["hc_head", "hc_post", "hc_pre", "indexer_topk", "rope", "swiglu"]
    # What gives something else, or raises before it runs.
    assert rows["mine", "hc_pre"]["state"] == "wrong"
    assert rows["mine", "hc_pre"]["reason"] == "1 tensors, not 3"
    assert rows["mine", "swiglu"]["state"] == "failed"
    assert rows["mine", "swiglu"]["reason"].startswith("AttributeError: 'NoneType'")
    assert rows["lame", "all"]["state"] == "failed"
    assert rows["lame", "all"]["reason"] == "RuntimeError: no kernel image"
    assert rows["torn", "rope"]["state"] == "failed"
    assert rows["torn", "rope"]["reason"] == "ImportError: undefined symbol: launch"
    assert [op for provider, op in rows if provider == "torn"] == ["rope"]


def test_what_is_not_finite_or_of_another_shape_is_infinitely_off():
    want = torch.ones(3)
    assert selftest.difference(torch.tensor([1.0, 1.0, torch.nan]), want) == torch.inf
    assert selftest.difference(torch.ones(2), want) == torch.inf
    assert selftest.difference(torch.ones(3), want) == 0
    assert selftest.difference(torch.full((3,), 1.5), want.long()) == torch.inf
    assert selftest.difference(torch.ones(3).long() * 2, want.long()) == torch.inf
