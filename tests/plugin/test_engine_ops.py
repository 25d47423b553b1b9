"""Ops by the engine's kernels: taken where they are asked for and can run, and as exact as the reference allows."""

import copy

import pytest
import torch

from atom_vllm_bridge import engine_ops
from atom_vllm_bridge.models.ops import registry
from atom_vllm_bridge.models.quantization import mxfp4
from atom_vllm_bridge.models.quantization.kept import Kept

ON_GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
GPU = torch.device("cuda")
LIMIT = 1.5


@pytest.fixture(autouse=True)
def back(monkeypatch):
    monkeypatch.setattr(registry, "_providers", dict(registry._providers))
    monkeypatch.setattr(registry, "_choices", {})
    yield
    registry.configure("")


def test_the_engine_comes_last_unless_it_is_asked_for():
    for _ in range(2):
        engine_ops.configure("")
        assert [*registry._providers][:2] == ["torch", "vllm"]
    engine_ops.configure("experts=vllm")
    with pytest.raises(ValueError, match="no provider is called"):
        engine_ops.configure("experts=marlin")


@pytest.mark.skipif(ON_GPU, reason="asks what a machine without a GPU says")
def test_a_machine_without_its_kernels_refuses_with_the_reason():
    assert engine_ops.refusal(torch.device("cpu")) == "is for NVIDIA GPUs"
    # The CPU build has the Python side of it all, and none of the kernels.
    assert engine_ops.refusal(GPU) == "was built without gptq_marlin_repack"
    engine_ops.configure("experts=vllm")
    with pytest.raises(ValueError, match="experts=vllm is set, but was built without"):
        registry.resolve("experts", GPU)


def test_a_function_that_has_changed_is_refused_by_name(monkeypatch):
    from vllm.model_executor.layers.quantization.utils import marlin_utils

    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(marlin_utils, "marlin_permute_scales", lambda s, size_k: s)
    assert engine_ops.refusal(GPU) == (
        "has a marlin_permute_scales without group_size, size_n"
    )


def stack(many, outputs, inputs, seed):
    g = torch.Generator().manual_seed(seed)
    w = Kept([outputs], inputs, many, torch.bfloat16, GPU)
    for e in range(many):
        values = torch.randn(outputs, inputs, generator=g) * inputs**-0.5
        w.rows(e * outputs, (e + 1) * outputs).keep(*mxfp4.quantize(values))
    return w


def plainly(op, x, chosen, weights, w13, w2):
    return registry.resolve_from(op, "experts")(x, chosen, weights, w13, w2, LIMIT)


@needs_gpu
@pytest.mark.parametrize("tokens", [1, 7, 64, 300])
def test_marlins_experts_are_the_references(tokens):
    many, k, dim, inner = 16, 6, 512, 256
    w13, w2 = stack(many, 2 * inner, dim, 0), stack(many, dim, inner, 1)
    g = torch.Generator().manual_seed(tokens)
    x = (torch.randn(tokens, dim, generator=g) * 3).to(GPU, torch.bfloat16)
    chosen = torch.rand(tokens, many, generator=g).topk(k).indices.to(GPU)
    weights = torch.rand(tokens, k, generator=g).to(GPU)
    want = plainly("torch", x, chosen, weights, copy.deepcopy(w13), copy.deepcopy(w2))
    engine_ops.configure("experts=vllm")
    experts = registry.resolve("experts", GPU)
    for _ in range(2):
        got = experts(x, chosen, weights, w13, w2, LIMIT)
        assert got.dtype == torch.float32
        assert (got - want).norm() <= 2e-2 * want.norm()
    with pytest.raises(ValueError, match="order of its own"):
        plainly("torch", x, chosen, weights, w13, w2)


@needs_gpu
def test_weights_that_come_again_are_repacked_again():
    w13, w2, other = stack(4, 512, 256, 3), stack(4, 256, 256, 4), stack(4, 256, 256, 2)
    x = torch.randn(3, 256, device=GPU, dtype=torch.bfloat16)
    chosen = torch.tensor([[0, 1], [2, 3], [1, 3]], device=GPU)
    weights = torch.ones(3, 2, device=GPU)
    engine_ops.configure("experts=vllm")
    experts = registry.resolve("experts", GPU)
    experts(x, chosen, weights, w13, w2, LIMIT)
    g = torch.Generator().manual_seed(5)
    for e in range(4):
        values = torch.randn(256, 256, generator=g) / 16
        for w in (w2, other):
            w.rows(e * 256, (e + 1) * 256).keep(*mxfp4.quantize(values))
    fresh13 = stack(4, 512, 256, 3)
    want = plainly("torch", x, chosen, weights, fresh13, other)
    got = experts(x, chosen, weights, w13, w2, LIMIT)
    assert (got - want).norm() <= 2e-2 * want.norm()
