"""Weights that need a gradient get it from whichever provider comes first."""

import pytest
import torch

from atom_vllm_bridge.models.ops.registry import providers_of, resolve_from
from atom_vllm_bridge.models.ops.torch.sparse_attention import Keys
from atom_vllm_bridge.models.quantization.kv_codecs import raw


def draw(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def rms_norm(op, weight):
    return op(draw(2, 8), weight, 1e-6)


def hc_pre(op, fn):
    return op(draw(2, 4, 8), fn, draw(24), draw(3), 3, 1e-6, 1e-6)[0]


def router(op, gate):
    return op(draw(2, 8), gate, 1.5, 2, draw(6))[1]


def sparse_attention(op, sink):
    ids = torch.arange(4).view(1, 4)
    window = Keys(draw(1, 4, 8), ids, torch.zeros(1, 1, 4, dtype=torch.bool))
    return op(draw(1, 1, 2, 8), sink, 0.3, window, None, raw(8, torch.float32))


CASES = [
    (rms_norm, (8,)),
    (hc_pre, (24, 32)),
    (router, (6, 8)),
    (sparse_attention, (2,)),
]


@pytest.mark.parametrize(("case", "shape"), CASES)
def test_a_weight_gets_its_gradient(case, shape):
    name = case.__name__
    gradients = []
    for provider in providers_of(name):
        weight = draw(*shape).requires_grad_()
        case(resolve_from(provider, name), weight).square().sum().backward()
        gradients.append(weight.grad)
    assert gradients[0].abs().sum() > 0
    for gradient in gradients[1:]:
        assert torch.equal(gradient, gradients[0])
