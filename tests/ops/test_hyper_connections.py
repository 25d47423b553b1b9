"""hc_pre, hc_post and hc_head against loops over single numbers."""

import math

import pytest
import torch

from atom_vllm_bridge.models.ops.registry import providers_of, resolve_from

ITERATIONS, EPS, NORM_EPS = 20, 1e-6, 1e-6
SHAPES = [(1, 4, 96), (5, 4, 33), (3, 2, 64), (40, 4, 16)]


def draw(tokens, n, d, gain=1.0, seed=0):
    g = torch.Generator().manual_seed(seed)
    return {
        "streams": torch.randn(tokens, n, d, generator=g),
        "fn": torch.randn((2 + n) * n, n * d, generator=g) * gain,
        "base": torch.randn((2 + n) * n, generator=g),
        "scale": torch.rand(3, generator=g) + 0.5,
    }


def mixes(streams, fn, norm_eps):
    z = [float(v) for v in streams.flatten()]
    rms = math.sqrt(sum(v * v for v in z) / len(z) + norm_eps)
    return [
        sum(w * v for w, v in zip(map(float, row), z, strict=True)) / rms for row in fn
    ]


def sigmoid(x):
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def plain_pre(streams, fn, base, scale):
    """One token, as the formula: every sum with its ε."""
    n, d = streams.shape
    mix, b = mixes(streams, fn, NORM_EPS), [float(v) for v in base]
    s0, s1, s2 = (float(s) for s in scale)
    pre = [sigmoid(mix[i] * s0 + b[i]) + EPS for i in range(n)]
    post = [2 * sigmoid(mix[n + i] * s1 + b[n + i]) for i in range(n)]
    comb = []
    for i in range(n):
        row = [mix[k] * s2 + b[k] for k in range(2 * n + i * n, 2 * n + (i + 1) * n)]
        weights = [math.exp(v - max(row)) for v in row]
        comb.append([w / sum(weights) + EPS for w in weights])

    def columns():
        for j in range(n):
            total = sum(comb[i][j] for i in range(n)) + EPS
            for i in range(n):
                comb[i][j] /= total

    columns()
    for _ in range(ITERATIONS - 1):
        for i in range(n):
            total = sum(comb[i]) + EPS
            comb[i] = [v / total for v in comb[i]]
        columns()
    y = [sum(pre[i] * float(streams[i, c]) for i in range(n)) for c in range(d)]
    return torch.tensor(y), torch.tensor(post), torch.tensor(comb)


@pytest.mark.parametrize("gain", [0.1, 1.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("provider", providers_of("hc_pre"))
def test_pre_is_the_formula(provider, shape, gain):
    case = draw(*shape, gain=gain)
    y, post, comb = resolve_from(provider, "hc_pre")(
        **case, iterations=ITERATIONS, eps=EPS, norm_eps=NORM_EPS
    )
    for t, streams in enumerate(case["streams"][:5]):
        expected = plain_pre(streams, case["fn"], case["base"], case["scale"])
        for got, want in zip((y[t], post[t], comb[t]), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("provider", providers_of("hc_pre"))
def test_comb_is_doubly_stochastic(provider):
    _, _, comb = resolve_from(provider, "hc_pre")(
        **draw(64, 4, 16, gain=0.1), iterations=ITERATIONS, eps=EPS, norm_eps=NORM_EPS
    )
    assert (comb.sum(1) - 1).abs().max() < 1e-4
    assert (comb.sum(2) - 1).abs().max() < 1e-4
    assert comb.std() > 0.05  # not just the uniform matrix


@pytest.mark.parametrize("provider", providers_of("hc_pre"))
def test_bfloat16_streams_are_read_exactly(provider):
    case = draw(6, 4, 32)
    case["streams"] = case["streams"].bfloat16()
    run = resolve_from(provider, "hc_pre")
    rest = {"iterations": ITERATIONS, "eps": EPS, "norm_eps": NORM_EPS}
    y, post, comb = run(**case, **rest)
    assert y.dtype == torch.bfloat16
    wide = run(**case | {"streams": case["streams"].float()}, **rest)
    torch.testing.assert_close(y, wide[0].bfloat16(), rtol=1e-2, atol=1e-5)
    torch.testing.assert_close(post, wide[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(comb, wide[2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("provider", providers_of("hc_post"))
def test_post_sums_over_the_first_index_of_comb(provider, shape, dtype):
    tokens, n, d = shape
    g = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, d, generator=g).to(dtype)
    residual = torch.randn(tokens, n, d, generator=g).to(dtype)
    post, comb = torch.rand(tokens, n, generator=g), torch.rand(
        tokens, n, n, generator=g
    )
    out = resolve_from(provider, "hc_post")(x, residual, post, comb)
    assert out.dtype == dtype
    for j in range(n):
        want = post[:, j, None] * x.float()
        for i in range(n):
            want = want + comb[:, i, j, None] * residual[:, i].float()
        torch.testing.assert_close(out[:, j].float(), want.to(dtype).float())


@pytest.mark.parametrize("provider", providers_of("hc_head"))
def test_head_weighs_with_sigmoids_alone(provider):
    n, d = 4, 24
    case = draw(3, n, d)
    fn, base, scale = case["fn"][:n], case["base"][:n], case["scale"][:1]
    y = resolve_from(provider, "hc_head")(
        case["streams"], fn, base, scale, EPS, NORM_EPS
    )
    for t, streams in enumerate(case["streams"]):
        mix = mixes(streams, fn, NORM_EPS)
        pre = [
            sigmoid(m * float(scale) + float(b)) + EPS
            for m, b in zip(mix, base, strict=True)
        ]
        want = sum(p * s for p, s in zip(pre, streams, strict=True))
        torch.testing.assert_close(y[t], want, rtol=1e-5, atol=1e-5)
