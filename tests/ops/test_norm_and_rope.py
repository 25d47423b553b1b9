"""rms_norm, rope and inverse_rope."""

import math

import pytest
import torch

from atom_vllm_bridge.models.ops.registry import providers_of, resolve_from


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(
    "shape", [(1, 256), (7, 96), (3, 4, 40), (64, 4, 512)], ids=str
)
@pytest.mark.parametrize("provider", providers_of("rms_norm"))
def test_rows_have_unit_mean_square(provider, shape, weighted, dtype):
    g = torch.Generator().manual_seed(0)
    x = (torch.randn(shape, generator=g) * 3).to(dtype)
    weight = torch.rand(shape[-1], generator=g) + 0.5 if weighted else None
    kept = x.clone()
    y = resolve_from(provider, "rms_norm")(x, weight, 1e-6)
    assert torch.equal(x, kept)
    wide = x.double()
    want = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    if weight is not None:
        want = want * weight.double()
    assert y.dtype == dtype
    torch.testing.assert_close(y, want.to(dtype))


@pytest.mark.parametrize("provider", providers_of("rms_norm"))
def test_epsilon_keeps_a_row_of_zeros_finite(provider):
    y = resolve_from(provider, "rms_norm")(torch.zeros(2, 8), torch.ones(8), 1e-6)
    assert torch.equal(y, torch.zeros(2, 8))


@pytest.mark.parametrize("shape", [(5, 24), (5, 3, 24), (1, 24), (40, 2, 80)], ids=str)
@pytest.mark.parametrize("provider", providers_of("rope"))
def test_neighbouring_values_of_the_tail_are_turned(provider, shape):
    g = torch.Generator().manual_seed(0)
    pairs = 4
    x = torch.randn(shape, generator=g)
    angle = torch.randn(shape[0], pairs, generator=g) * 3
    rotation = torch.polar(torch.ones_like(angle), angle)
    out = resolve_from(provider, "rope")(x.clone(), rotation)
    head = shape[-1] - 2 * pairs
    assert torch.equal(out[..., :head], x[..., :head])
    for t in range(min(shape[0], 6)):
        for p in range(pairs):
            c, s = math.cos(angle[t, p]), math.sin(angle[t, p])
            a, b = x[t, ..., head + 2 * p], x[t, ..., head + 2 * p + 1]
            torch.testing.assert_close(out[t, ..., head + 2 * p], a * c - b * s)
            torch.testing.assert_close(out[t, ..., head + 2 * p + 1], a * s + b * c)


@pytest.mark.parametrize("provider", providers_of("inverse_rope"))
def test_inverse_undoes(provider):
    x = torch.randn(6, 3, 20, generator=torch.Generator().manual_seed(0))
    angle = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    rotation = torch.polar(torch.ones_like(angle), angle)
    turned = resolve_from("torch", "rope")(x.clone(), rotation)
    assert (turned - x).abs().max() > 0.1
    back = resolve_from(provider, "inverse_rope")(turned, rotation)
    torch.testing.assert_close(back, x)


@pytest.mark.parametrize(
    ("op", "provider"),
    [(op, name) for op in ("rope", "inverse_rope") for name in providers_of(op)],
)
@pytest.mark.parametrize("shape", [(0, 24), (0, 3, 24)], ids=str)
def test_no_token_is_no_fault(op, provider, shape):
    x = torch.empty(shape)
    rotation = torch.empty(0, 4, dtype=torch.complex64)
    assert resolve_from(provider, op)(x, rotation).shape == shape
