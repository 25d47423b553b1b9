"""Which provider an op gets."""

import pytest
import torch

from atom_vllm_bridge.models.ops import registry
from atom_vllm_bridge.models.ops.registry import Provider, configure, resolve, table


@pytest.fixture
def second(monkeypatch):
    """A provider that has hc_post alone, on a CPU alone; the registry is put back afterwards."""

    def load(op):
        return (lambda *a: "second") if op == "hc_post" else None

    def refusal(device):
        return None if device.type == "cpu" else "needs a CPU"

    monkeypatch.setattr(registry, "_providers", dict(registry._providers))
    monkeypatch.setattr(registry, "_choices", {})
    registry.register(Provider("second", load, refusal))
    yield
    configure("")


def test_every_op_has_its_reference():
    for op in registry.names():
        assert registry.resolve_from("torch", op).__name__ == op


@pytest.mark.usefixtures("second")
def test_a_registered_provider_comes_first_where_it_can():
    assert resolve("hc_post", "cpu")() == "second"
    assert resolve("hc_pre", "cpu") is registry.resolve_from(
        registry.providers_of("hc_pre")[-1], "hc_pre"
    )
    resolve("hc_post", "meta")
    reasons = {(c.op, c.device): (c.provider, c.reason) for c in table()}
    assert reasons["hc_post", "cpu"] == ("second", "first in the list")
    provider, reason = reasons["hc_post", "meta"]
    assert provider == "torch"
    assert "second: needs a CPU" in reason
    assert "second has no hc_pre" in reasons["hc_pre", "cpu"][1]


@pytest.mark.usefixtures("second")
def test_the_setting_prefers_and_pins():
    configure("torch")
    assert resolve("hc_post", "cpu") is registry.resolve_from("torch", "hc_post")
    configure("second, hc_post=torch")
    assert resolve("hc_post", "cpu") is registry.resolve_from("torch", "hc_post")
    assert table()[0].reason == "pinned by the setting"
    configure("")
    assert resolve("hc_post", "cpu")() == "second"


@pytest.mark.usefixtures("second")
def test_a_pin_that_cannot_hold_is_refused():
    configure("hc_pre=second,hc_post=second")
    with pytest.raises(ValueError, match="second has no hc_pre"):
        resolve("hc_pre", "cpu")
    with pytest.raises(ValueError, match="needs a CPU"):
        resolve("hc_post", torch.device("meta"))


@pytest.mark.parametrize(
    ("spec", "message"),
    [("cuda", "no provider is called 'cuda'"), ("hc=torch", "no op is called 'hc'")],
)
def test_unknown_names_are_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        configure(spec)
