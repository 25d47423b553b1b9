"""router, experts, swiglu and the grouped output projection."""

import math

import pytest
import torch

from atom_vllm_bridge.models.ops import panels
from atom_vllm_bridge.models.ops.registry import providers_of, resolve_from

SCALE, K, E, D, INNER = 1.5, 3, 8, 16, 24


def gate_case(tokens=6):
    g = torch.Generator().manual_seed(0)
    x, gate = torch.randn(tokens, D, generator=g), torch.randn(E, D, generator=g)
    return x, gate, torch.randn(E, generator=g)


@pytest.mark.parametrize("provider", providers_of("router"))
def test_bias_selects_and_scores_weigh(provider):
    x, gate, bias = gate_case()
    experts, weights = resolve_from(provider, "router")(x, gate, SCALE, K, bias=bias)
    changed = 0
    for t in range(len(x)):
        score = [math.sqrt(math.log1p(math.exp(float(x[t] @ row)))) for row in gate]
        best = sorted(range(E), key=lambda e: -(score[e] + float(bias[e])))[:K]
        changed += set(best) != set(sorted(range(E), key=lambda e: -score[e])[:K])
        assert set(experts[t].tolist()) == set(best)
        total = sum(score[e] for e in best)
        for e, w in zip(experts[t].tolist(), weights[t].tolist(), strict=True):
            assert w == pytest.approx(SCALE * score[e] / total, rel=1e-5)
    assert changed  # the bias mattered


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("levels", [1, 2, 5])
@pytest.mark.parametrize("provider", providers_of("router"))
def test_the_lower_of_equal_experts_is_chosen(provider, levels, tokens):
    g = torch.Generator().manual_seed(levels)
    many, k = 256, 6
    bias = torch.randint(0, levels, (many,), generator=g).float()
    experts, _ = resolve_from(provider, "router")(
        torch.ones(tokens, 8), torch.ones(many, 8), SCALE, k, bias=bias
    )
    best = sorted(range(many), key=lambda e: (-float(bias[e]), e))[:k]
    assert experts.tolist() == [best] * tokens


@pytest.mark.parametrize("provider", providers_of("router"))
def test_a_hash_layer_takes_the_given_experts(provider):
    x, gate, _ = gate_case(2)
    given = torch.tensor([[5, 0, 2], [7, 7, 1]])
    experts, weights = resolve_from(provider, "router")(
        x, gate, SCALE, K, experts=given
    )
    assert torch.equal(experts, given)
    torch.testing.assert_close(weights.sum(1), torch.full((2,), SCALE))
    assert weights[1, 0] == weights[1, 1]


@pytest.mark.parametrize("provider", providers_of("router"))
def test_a_large_logit_does_not_overflow(provider):
    x, gate = torch.full((1, D), 10.0), torch.ones(E, D)
    _, weights = resolve_from(provider, "router")(x, gate, 1.0, K, bias=torch.zeros(E))
    torch.testing.assert_close(weights, torch.full((1, K), 1 / K))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("limit", [0.5, 10.0, math.inf])
@pytest.mark.parametrize("tokens", [1, 2, 40])
@pytest.mark.parametrize("provider", providers_of("experts"))
def test_tokens_pass_through_their_experts(provider, tokens, limit, dtype):
    g = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, D, generator=g).to(dtype)
    w13 = (torch.randn(E, D, 2 * INNER, generator=g)).to(dtype)
    w2 = (torch.randn(E, INNER, D, generator=g)).to(dtype)
    chosen = torch.stack([torch.randperm(E, generator=g)[:K] for _ in range(tokens)])
    weights = torch.rand(tokens, K, generator=g)
    got = resolve_from(provider, "experts")(x, chosen, weights, w13, w2, limit)
    want = torch.zeros(tokens, D)
    clamped = 0
    for t in range(tokens):
        for e, w in zip(chosen[t].tolist(), weights[t], strict=True):
            gate, up = (x[t].float() @ w13[e].float()).split(INNER)
            clamped += int((gate > limit).sum() + (up.abs() > limit).sum())
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            want[t] += w * ((gate * torch.sigmoid(gate) * up) @ w2[e].float())
    assert got.dtype == torch.float32
    assert clamped > 0 if limit < 1 else clamped == 0 or limit == 10
    error = (got - want).norm() / want.norm()
    assert error < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 40])
@pytest.mark.parametrize("provider", providers_of("experts"))
def test_experts_that_are_elsewhere_count_nothing(provider, tokens, packed):
    g = torch.Generator().manual_seed(tokens)
    # As wide as whole panels.
    d, inner, here = 32, 48, E // 2
    x = torch.randn(tokens, d, generator=g)
    w13 = torch.randn(E, d, 2 * inner, generator=g)
    w2 = torch.randn(E, inner, d, generator=g)
    chosen = torch.stack([torch.randperm(E, generator=g)[:K] for _ in range(tokens)])
    # One token has no expert here, and for one rank there is none at all.
    chosen[0] = torch.arange(K) + here
    weights = torch.rand(tokens, K, generator=g)
    op = resolve_from(provider, "experts")
    whole, parts = op(x, chosen, weights, w13, w2, 10.0), []
    for first in (0, here):
        held = (chosen >= first) & (chosen < first + here)
        local = torch.where(held, chosen - first, here)
        own = [w[first : first + here] for w in (w13, w2)]
        if packed:
            own = [panels.cut(w) for w in own]
        parts.append(op(x, local, weights, *own, 10.0))
    assert not parts[0][0].any()
    torch.testing.assert_close(parts[0] + parts[1], whole, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("provider", providers_of("swiglu"))
def test_gate_is_clamped_above_only(provider):
    hidden = torch.tensor([[-20.0, 20.0, 3.0, -20.0, 20.0, 1.0]])
    got = resolve_from(provider, "swiglu")(hidden, 10.0)
    silu = [g / (1 + math.exp(-g)) for g in (-20.0, 10.0, 3.0)]
    want = torch.tensor([[silu[0] * -10, silu[1] * 10, silu[2]]])
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("provider", providers_of("grouped_output_projection"))
def test_heads_are_projected_in_their_group(provider):
    g = torch.Generator().manual_seed(0)
    o = torch.randn(3, 4, 5, generator=g)
    wo_a = torch.randn(2, 6, 10, generator=g)
    wo_b = torch.randn(12, 7, generator=g)
    got = resolve_from(provider, "grouped_output_projection")(o, wo_a, wo_b)
    low = [o[:, 2 * i : 2 * i + 2].flatten(1) @ wo_a[i].T for i in range(2)]
    torch.testing.assert_close(got, torch.cat(low, 1) @ wo_b, rtol=1e-4, atol=1e-5)
