"""Triton's ops on rows against torch's, with outputs and unwritten rows poisoned."""

import pytest
import torch
from against_torch import both, close, sizes
from interpreted import DEVICE, ON_GPU, outside, run_interpreted, runs

from atom_vllm_bridge.models.ops.registry import resolve_from
from atom_vllm_bridge.models.quantization.kv_codecs import fp8_ds_mla, fp8_row, raw

EPS = 1e-6
SEEDS = [0, 1, 2] if ON_GPU else [0]
SEEDED = pytest.mark.parametrize("seed", SEEDS)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


class Draw:
    """Seeded tensors on the device, the same on every device; memory that is free holds NaN."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)
        # What the next outputs are allocated in holds NaN.
        if ON_GPU:
            [
                torch.full((n,), torch.nan, device=DEVICE)
                for n in (1 << 26, *[1 << 17] * 16)
            ]

    def __call__(self, *shape, dtype=torch.float32):
        return torch.randn(shape, generator=self.generator).to(DEVICE, dtype)

    def rotation(self, tokens, pairs):
        angle = self(tokens, pairs) * 3
        return torch.polar(torch.ones_like(angle), angle)

    def ids(self, count, among, skipped=0.25):
        """Distinct ids, some of them −1; not 0, a row that nobody owns and that the reference may touch."""
        ids = 1 + torch.randperm(among - 1, generator=self.generator)[:count]
        ids[torch.rand(count, generator=self.generator) < skipped] = -1
        return ids.to(DEVICE)


@outside
def test_the_tests_of_this_file_pass_under_the_interpreter():
    run_interpreted(__file__)


@runs
@SEEDED
@DTYPES
@pytest.mark.parametrize("weighted", [True, False])
@sizes([(3, 40)], [(1, 4096), (129, 1024), (7, 7168)])
def test_rms_norm(size, weighted, dtype, seed):
    draw, (got, want) = Draw(seed), both("rms_norm")
    x = draw(size[0], size[1] + 8, dtype=dtype)[:, 3 : size[1] + 3]
    weight = draw(size[1]) if weighted else None
    close(got(x, weight, EPS), want(x, weight, EPS), TOLERANCE[dtype])


@runs
@SEEDED
@pytest.mark.parametrize("op", ["rope", "inverse_rope"])
@sizes([((2, 3, 12), 4), ((3, 10), 3)], [((129, 64, 512), 32), ((1, 64, 128), 32)])
def test_rope(size, op, seed):
    draw, (got, want), (shape, pairs) = Draw(seed), both(op), size
    x, rotation = draw(*shape), draw.rotation(shape[0], pairs)
    turned = got(x.clone(), rotation)
    close(turned, want(x.clone(), rotation), 1e-6)
    kept = shape[-1] - 2 * pairs
    assert torch.equal(turned[..., :kept], x[..., :kept])
    back = {"rope": "inverse_rope", "inverse_rope": "rope"}[op]
    close(resolve_from("triton", back)(turned, rotation), x, 1e-6)


@runs
@SEEDED
@DTYPES
@pytest.mark.parametrize("turned", [True, False])
@sizes([(3, 3, 12, 3)], [(1, 64, 512, 32), (129, 64, 512, 32), (17, 64, 128, 32)])
def test_query_heads(size, turned, dtype, seed):
    draw, (got, want), (tokens, heads, dim, pairs) = (
        Draw(seed),
        both("query_heads"),
        size,
    )
    x = draw(tokens, heads * dim + 5, dtype=dtype)[:, 5:]
    rotation = draw.rotation(tokens, pairs) if turned else None
    close(got(x, heads, EPS, rotation), want(x.clone(), heads, EPS, rotation), 1e-5)


def cache(codec, blocks, per_block, gap):
    """Rows that hold junk, blocks `gap` elements further apart than their rows need."""
    size = blocks * (per_block * codec.width + gap)
    memory = torch.full((size,), 77, dtype=codec.dtype, device=DEVICE)
    rows = memory.view(blocks, -1)[:, : per_block * codec.width]
    return memory, rows.unflatten(1, (per_block, codec.width))


CODECS = {
    "float32": lambda dim, tail: raw(dim, torch.float32),
    "bfloat16": lambda dim, tail: raw(dim, torch.bfloat16),
    "fp8_ds_mla": fp8_ds_mla,
    "fp8_row": lambda dim, tail: fp8_row(dim),
}


@runs
@SEEDED
@pytest.mark.parametrize(
    ("dtype", "gap"),
    [(torch.float32, 0), (torch.bfloat16, 5), (torch.float32, "row")],
    ids=str,
)
@pytest.mark.parametrize("name", CODECS)
@sizes([(5, 32, 4), (4, 140, 6)], [(1, 512, 32), (129, 512, 32), (65, 128, 32)])
def test_write_keys(size, name, dtype, gap, seed):
    draw, (tokens, dim, pairs) = Draw(seed), size
    codec = CODECS[name](dim, 2 * pairs)
    gap = codec.width if gap == "row" else gap
    x = draw(tokens, dim + 8, dtype=dtype)[:, 8:] * torch.logspace(
        -3, 2, tokens, device=DEVICE
    ).unsqueeze(1).to(dtype)
    weight, rotation = draw(dim), draw.rotation(tokens, pairs)
    blocks = tokens // 4 + 2
    out = []
    for op in both("write_keys"):
        memory, rows = cache(codec, blocks, 7, gap)
        step = 8 if gap == codec.width else 7
        ids = Draw(seed).ids(tokens, blocks * 7)
        ids = torch.where(ids < 0, -1, ids // 7 * step + ids % 7)
        op(x, weight, EPS, rotation, rows, ids, codec)
        out.append((memory, rows))
    (memory, rows), (want_memory, want) = out
    if codec.dtype == torch.uint8:
        close(codec.decode(rows.flatten(0, 1)), codec.decode(want.flatten(0, 1)), 2e-2)
        # A value at the middle between two codes may go either way, and the interpreter cuts bfloat16 off.
        assert (memory != want_memory).double().mean() < (0.01 if ON_GPU else 0.05)
    else:
        torch.testing.assert_close(
            memory, want_memory, rtol=TOLERANCE[codec.dtype], atol=1e-5
        )
        assert ((memory == 77) == (want_memory == 77)).all()


@runs
def test_e4m3_and_scales_are_torchs_to_the_bit():
    """The norm of ones changes nothing that rounds."""
    dim = 64
    for name, tail in (("fp8_row", 0), ("fp8_ds_mla", 2)):
        codec = CODECS[name](dim, tail)
        steps = torch.arange(1, dim + 1, device=DEVICE) * 0.37
        weight = steps * torch.where(steps < 8, 2.0**-9, 19.0)
        for factor in (1.0, 448 / float(weight[: dim - tail].max()), 1e-7, 0.0):
            sign = torch.where(torch.arange(dim, device=DEVICE) % 3 == 0, -1.0, 1.0)
            still = torch.ones(1, 1, dtype=torch.complex64, device=DEVICE)
            one = torch.ones(1, dtype=torch.int64, device=DEVICE)
            out = []
            for op in both("write_keys"):
                _, rows = cache(codec, 1, 2, 0)
                op(sign.view(1, -1), weight * factor, 0.0, still, rows, one, codec)
                out.append(rows)
            (got, got_tail, scales), (want, want_tail, want_scales) = (
                rows[0, 1].split([dim - tail, 2 * tail, codec.width - dim - tail])
                for rows in out
            )
            assert torch.equal(got, want)
            assert torch.equal(scales, want_scales)
            # The interpreter cuts bfloat16 off instead of rounding it.
            step = 0 if ON_GPU else 1
            assert ((got_tail.int() - want_tail.int()).abs() <= step).all()


@runs
@SEEDED
@pytest.mark.parametrize("gap", [0, 5])
def test_write_rows(gap, seed):
    draw, codec = Draw(seed), raw(40, torch.bfloat16)
    values = draw(6, 48).to(torch.bfloat16)[:, :40]
    ids = draw.ids(6, 21)
    out = []
    for op in both("write_rows"):
        memory, rows = cache(codec, 3, 7, gap)
        op(rows, ids, values)
        out.append(memory)
    assert torch.equal(*out)


@runs
@SEEDED
@DTYPES
@sizes([(5, 20, 4)], [(1, 512, 4), (129, 1024, 4), (64, 512, 128)])
def test_write_inputs(size, dtype, seed):
    draw, (tokens, half, ratio) = Draw(seed), size
    inputs, ape = draw(tokens, 2 * half + 3, dtype=dtype)[:, 3:], draw(ratio, half)
    phase, ids = torch.arange(tokens, device=DEVICE) % ratio, draw.ids(tokens, 150)
    out = []
    for op in both("write_inputs"):
        memory, rows = cache(raw(2 * half, torch.float32), 15, 10, 5)
        op(inputs.clone(), ape, phase, rows, ids)
        out.append(memory)
    torch.testing.assert_close(*out, rtol=1e-6, atol=1e-6)


@runs
@SEEDED
@pytest.mark.parametrize("parts", [2, 4])
@sizes([(3, 5, 40)], [(1, 8, 512), (64, 128, 512), (65, 8, 128)])
def test_compressor_pool(size, parts, seed):
    draw, (got, want), (entries, sources, dim) = (
        Draw(seed),
        both("compressor_pool"),
        size,
    )
    count = sources * 2 + 1
    rows = draw(3, count * parts * dim + 4)[:, : count * parts * dim]
    state = rows.unflatten(1, (count * parts, dim))
    state[0, 0] = torch.nan
    g = draw.generator
    ids = torch.randint(1, 2 * count * parts, (entries, 2, sources), generator=g)
    unseen = torch.rand(entries, sources, generator=g) < 0.3
    unseen[:, -1] = False
    expected = want(state, ids.to(DEVICE), unseen.to(DEVICE))
    # Torch needs finite values where nothing is to be read; nothing is.
    ids[:, 0][unseen] = 0
    close(got(state, ids.to(DEVICE), unseen.to(DEVICE)), expected, 1e-5)


HC_SIZES = sizes(
    [(3, 4, 40), (2, 3, 24), (1, 2, 100)],
    [(1, 4, 4096), (16, 4, 4096), (129, 4, 4096), (1000, 4, 4096), (5, 4, 7168)],
)


@runs
@SEEDED
@DTYPES
@pytest.mark.parametrize("normed", [True, False])
@HC_SIZES
def test_hc_pre(size, normed, dtype, seed):
    draw, (got, want), (tokens, n, dim) = Draw(seed), both("hc_pre"), size
    streams = draw(tokens, n, dim, dtype=dtype)
    fn, base = draw((2 + n) * n, n * dim) * (n * dim) ** -0.5, draw((2 + n) * n)
    arguments = (streams, fn, base, draw(3), 20, EPS, EPS)
    weight = draw(dim) if normed else None
    results = got(*arguments, weight), want(*arguments, weight)
    close(results[0][0], results[1][0], TOLERANCE[dtype])
    close(results[0][1], results[1][1], 1e-5)
    close(results[0][2], results[1][2], 2e-5)


@runs
@SEEDED
@DTYPES
@HC_SIZES
def test_hc_post(size, dtype, seed):
    draw, (got, want), (tokens, n, dim) = Draw(seed), both("hc_post"), size
    x, residual = draw(tokens, dim, dtype=dtype), draw(tokens, n, dim, dtype=dtype)
    arguments = x, residual, draw(tokens, n), draw(tokens, n, n)
    close(got(*arguments), want(*arguments), TOLERANCE[dtype])


@runs
@SEEDED
@DTYPES
@HC_SIZES
def test_hc_head(size, dtype, seed):
    draw, (got, want), (tokens, n, dim) = Draw(seed), both("hc_head"), size
    fn = draw(n, n * dim) * (n * dim) ** -0.5
    arguments = draw(tokens, n, dim, dtype=dtype), fn, draw(n), draw(1), EPS, EPS
    close(got(*arguments), want(*arguments), TOLERANCE[dtype])


ROUTES = sizes(
    [(3, 24, 40, 6), (2, 64, 70, 2)], [(1, 256, 4096, 6), (129, 256, 4096, 6)]
)


@runs
@SEEDED
@DTYPES
@ROUTES
def test_router_chooses_and_weighs(size, dtype, seed):
    draw, (got, want), (tokens, experts, dim, k) = Draw(seed), both("router"), size
    x, gate = draw(tokens, dim, dtype=dtype), draw(experts, dim) * dim**-0.5 * 4
    bias = draw(experts)
    chosen, weights = got(x, gate, 1.5, k, bias)
    expected, expected_weights = want(x, gate, 1.5, k, bias)
    # Sums in another order may exchange two experts that are all but equal.
    score = torch.nn.functional.softplus(x.double() @ gate.double().T).sqrt() + bias
    close(score.gather(1, chosen), score.gather(1, expected), 1e-6)
    assert (chosen != expected).double().mean() < 0.01
    close(weights, expected_weights, 1e-5)
    table = torch.randint(experts, (tokens, k), generator=draw.generator).to(DEVICE)
    chosen, weights = got(x, gate, 1.5, k, None, table)
    assert torch.equal(chosen, table)
    close(weights, want(x, gate, 1.5, k, None, table)[1], 1e-5)


@runs
def test_of_equal_experts_the_lower_id_comes_first():
    x, gate = torch.ones(2, 16, device=DEVICE), torch.zeros(24, 16, device=DEVICE)
    bias = torch.zeros(24, device=DEVICE)
    bias[[20, 7, 11]] = 1.0
    bias[3] = -0.0
    chosen, weights = resolve_from("triton", "router")(x, gate, 1.5, 6, bias)
    assert chosen.tolist() == [[7, 11, 20, 0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.full_like(weights, 0.25))


@runs
def test_scores_far_from_zero_are_exact():
    """Where a plain log(1 + e^x) has lost its digits."""
    x = torch.tensor([[-30.0], [-12.0], [-3.0], [0.0], [9.0], [40.0]], device=DEVICE)
    gate = torch.tensor([[1.0], [0.5]], device=DEVICE)
    bias = torch.zeros(2, device=DEVICE)
    got, want = (op(x, gate, 1.0, 2, bias) for op in both("router"))
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=0)


@runs
@SEEDED
@DTYPES
@pytest.mark.parametrize("limit", [1.0, float("inf")])
@sizes([(3, 20)], [(1, 2048), (129, 2048)])
def test_swiglu(size, limit, dtype, seed):
    draw, (got, want) = Draw(seed), both("swiglu")
    hidden = draw(size[0], 2 * size[1] + 6, dtype=dtype)[:, : 2 * size[1]]
    close(got(hidden, limit), want(hidden, limit), TOLERANCE[dtype])


@runs
def test_a_token_of_nan_stays_alone():
    draw = Draw(0)
    streams, x = draw(3, 4, 40), draw(3, 40)
    streams[1], x[1] = torch.nan, torch.nan
    fn, base, scale = draw(24, 160), draw(24), draw(3)
    gate, bias = draw(24, 40), draw(24)
    cases = {
        "hc_pre": (streams, fn, base, scale, 20, EPS, EPS, draw(40)),
        "hc_head": (streams, fn[:4], base[:4], scale[:1], EPS, EPS),
        "router": (x, gate, 1.5, 6, bias),
    }
    for op, arguments in cases.items():
        got, want = (function(*arguments) for function in both(op))
        if op == "router":
            assert len(set(got[0][1].tolist())) == 6
            assert got[0].min() >= 0
            assert got[0].max() < 24
        first = (got, want) if op == "hc_head" else (got[-1], want[-1])
        close(first[0][[0, 2]], first[1][[0, 2]], 2e-5)
