"""Triton's products with matrices that are kept as they came, against torch's with the same, which unpack them exactly."""

import pytest
import torch
from against_torch import both, close, sizes
from interpreted import DEVICE, ON_GPU, gpu_only, outside, run_interpreted, runs

from atom_vllm_bridge.models.quantization import block_fp8, mxfp4
from atom_vllm_bridge.models.quantization.kept import Kept

LIMIT = 1.5
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
# Relative to the norm of all, and, five times that, of each row.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
QUANTIZE = {"fp8": block_fp8.quantize, "mxfp4": mxfp4.quantize}


class Draw:
    """Seeded tensors on the device; what is free on a GPU holds NaN."""

    def __init__(self, seed=0):
        self.generator = torch.Generator(DEVICE).manual_seed(seed)
        self.device = {"generator": self.generator, "device": DEVICE}
        if ON_GPU:
            [torch.full((n,), torch.nan, device=DEVICE) for n in (1 << 26, 1 << 20)]

    def __call__(self, *shape, dtype=torch.float32):
        return torch.randn(shape, **self.device).to(dtype)

    def kept(self, formats, outputs, inputs, count=None):
        """A matrix of bands in these formats, or `count` of one band; magnitudes differ from block to block."""
        w = Kept(outputs, inputs, count, torch.bfloat16, torch.device(DEVICE))
        first = 0
        for kind, rows in zip(formats, outputs, strict=True):
            for _ in range(count or 1):
                values = torch.randn(rows, inputs, **self.device)
                values *= torch.rand(rows, 1, **self.device) / inputs**0.5
                part = w.rows(first, first + rows)
                if kind == "plain":
                    part.copy_(values)
                else:
                    part.keep(*QUANTIZE[kind](values))
                first += rows
        assert [band.format for band in w.bands] == list(formats)
        return w


@outside
def test_the_tests_of_this_file_pass_under_the_interpreter():
    run_interpreted(__file__)


# Rows, outputs of each band, inputs: odd ones for all, and those of V4-Flash.
LINEARS = sizes(
    [(1, (70,), 40), (3, (66,), 600), (17, (40, 33), 300), (2, (24, 20), 512)],
    [
        (rows, *matrix)
        for rows in (1, 6, 16, 17, 64, 128, 200)
        for matrix in (
            ((1536, 2624), 4096),
            ((40960,), 1024),
            ((4096,), 8192),
            ((4096,), 2048),
        )
    ]
    + [(8192, (1536, 2624), 4096), (1000, (4096,), 8192)],
)


@runs
@DTYPES
@pytest.mark.parametrize("formats", ["fp8", "mxfp4"])
@LINEARS
def test_linear(size, formats, dtype):
    draw, (got, want), (rows, outputs, inputs) = Draw(), both("linear"), size
    w = draw.kept([formats, "plain"][: len(outputs)], outputs, inputs)
    x = draw(rows, inputs + 8, dtype=dtype)[:, :inputs]
    close(got(x, w), want(x, w), TOLERANCE[dtype])


@runs
def test_a_product_is_the_same_each_time_and_leaves_no_arrival():
    draw, (linear, _) = Draw(), both("linear")
    w, x = draw.kept(["fp8"], [70], 600), draw(3, 600, dtype=torch.bfloat16)
    first = linear(x, w)
    assert not w.arrivals.any()
    for _ in range(20 if ON_GPU else 1):
        assert torch.equal(linear(x, w), first)


@runs
@DTYPES
@pytest.mark.parametrize("formats", ["plain", "fp8", "mxfp4"])
@sizes([(3, 40), (5, 1300)], [(40960, 1024), (700, 8192)])
def test_unpacked_values_are_exact(size, formats, dtype):
    from atom_vllm_bridge.models.ops.triton.linear import unpacked

    band = Draw().kept([formats], size[:1], size[1]).bands[0]
    assert torch.equal(unpacked(band, dtype), band.dequantize().to(dtype))


@runs
def test_columns_of_a_matrix_are_those_of_its_product():
    draw, (linear, _) = Draw(), both("linear")
    w, x = draw.kept(["fp8", "plain"], [100, 60], 300), draw(2, 300)
    whole = linear(x, w)
    for first, end in ((0, 64), (37, 100), (70, 140), (100, 160)):
        close(linear(x, w.columns(first, end)), whole[:, first:end], 1e-5)


@runs
@DTYPES
@pytest.mark.parametrize("formats", [("fp8", "fp8"), ("plain", "fp8")], ids=str)
@sizes(
    [(3, 2, 24, 40, 70), (5, 3, 66, 130, 40)],
    [(n, 8, 1024, 4096, 4096) for n in (1, 16, 64, 128, 700)],
)
def test_grouped_output_projection(size, formats, dtype):
    draw, (got, want) = Draw(), both("grouped_output_projection")
    rows, groups, rank, width, outputs = size
    wo_a = draw.kept(formats[:1], [rank], width, groups)
    wo_b = draw.kept(formats[1:], [outputs], groups * rank)
    o = draw(rows, groups, width, dtype=dtype)
    close(got(o, wo_a, wo_b), want(o, wo_a, wo_b), TOLERANCE[dtype])


@runs
@DTYPES
@sizes([(3, 40, 24)], [(n, 4096, 2048) for n in (1, 16, 128, 700)])
def test_feed_forward(size, dtype):
    draw, (got, want), (rows, dim, inner) = Draw(), both("feed_forward"), size
    w13 = draw.kept(["fp8"], [2 * inner], dim)
    w2 = draw.kept(["fp8"], [dim], inner)
    x = draw(rows, dim, dtype=dtype)
    close(got(x, w13, w2, LIMIT), want(x, w13, w2, LIMIT), TOLERANCE[dtype])


def routed(draw, tokens, experts, k):
    """Choices, some experts more often than others, and one token that has one expert twice."""
    likely = torch.rand(tokens, experts, **draw.device)
    likely += torch.linspace(0, 0.5, experts, device=DEVICE)
    chosen = likely.topk(k).indices
    chosen[-1, -1] = chosen[-1, 0]
    return chosen, torch.rand(tokens, k, **draw.device)


@runs
@DTYPES
@pytest.mark.parametrize("formats", ["plain", "fp8", "mxfp4"])
@sizes(
    [(1, 5, 2, 40, 24), (9, 3, 2, 304, 72), (40, 2, 2, 64, 24)],
    [(n, 16, 6, 4096, 2048) for n in (1, 6, 16, 33, 64, 128, 300)],
)
def test_experts(size, formats, dtype):
    draw, (got, want) = Draw(), both("experts")
    tokens, many, k, dim, inner = size
    w13 = draw.kept([formats], [2 * inner], dim, many)
    w2 = draw.kept([formats], [dim], inner, many)
    x = draw(tokens, dim, dtype=dtype) * 3
    chosen, weights = routed(draw, tokens, many, k)
    arguments = x, chosen, weights, w13, w2, LIMIT
    # Where values are clamped, rounding before it and after it differ more.
    close(got(*arguments), want(*arguments), 2 * TOLERANCE[dtype])


@runs
def test_the_tiles_of_amds_gpus_give_the_same(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.2.0")
    draw, (linear, plainly) = Draw(), both("linear")
    w = draw.kept(["fp8", "plain"], [70, 24], 300)
    for rows in (3, 20, 40):
        x = draw(rows, 300, dtype=torch.bfloat16)
        close(linear(x, w), plainly(x, w), TOLERANCE[torch.bfloat16])
    got, want = both("experts")
    w13, w2 = draw.kept(["mxfp4"], [48], 40, 2), draw.kept(["mxfp4"], [40], 24, 2)
    for tokens in (3, 20, 40):
        x = draw(tokens, 40, dtype=torch.bfloat16)
        arguments = x, *routed(draw, tokens, 2, 2), w13, w2, LIMIT
        close(got(*arguments), want(*arguments), 2 * TOLERANCE[torch.bfloat16])


@runs
@pytest.mark.parametrize("tokens", [1, 9, 40])
def test_experts_that_are_elsewhere_count_nothing(tokens):
    draw, (got, want) = Draw(), both("experts")
    many, k, dim, inner = 3, 2, 40, 24
    w13 = draw.kept(["mxfp4"], [2 * inner], dim, many)
    w2 = draw.kept(["mxfp4"], [dim], inner, many)
    x = draw(tokens, dim)
    chosen, weights = routed(draw, tokens, 2 * many, k)
    chosen[0] = many
    arguments = chosen.clamp(max=many), weights, w13, w2, LIMIT
    close(got(x, *arguments), want(x, *arguments), 2 * TOLERANCE[x.dtype])
    assert not got(x, *arguments)[0].any()


@runs
@pytest.mark.parametrize(
    "tokens", [1, 700, pytest.param(8192, marks=gpu_only)], ids=str
)
def test_slots_are_sorted_by_expert_in_their_order(tokens):
    from atom_vllm_bridge.models.ops.triton import experts as module

    many, rows = 20, 16
    chosen, _ = routed(Draw(), tokens, many, 3)
    found = module.sort(chosen, many, rows)
    expert, order = chosen.flatten().sort(stable=True)
    assert torch.equal(found.order.long(), order)
    seen = []
    for number, first, end in found.tiles.tolist():
        if number >= 0:
            end = min(end, first + rows)
            assert (expert[first:end] == number).all()
            seen += range(first, end)
    assert seen == list(range(3 * tokens))


@runs
def test_a_token_of_nan_stays_alone():
    draw, (got, _) = Draw(), both("experts")
    w13, w2 = (draw.kept(["mxfp4"], [64], n, 5) for n in (48, 32))
    x, (chosen, weights) = draw(6, 48), routed(draw, 6, 5, 2)
    want = got(x, chosen, weights, w13, w2, LIMIT)
    x[2] = torch.nan
    y = got(x, chosen, weights, w13, w2, LIMIT)
    others = [0, 1, 3, 4, 5]
    assert torch.equal(y[others], want[others])
    assert y[2].isnan().all()


@gpu_only
@runs
@torch.inference_mode()
def test_a_captured_product_is_the_product():
    draw = Draw()
    w = draw.kept(["fp8", "plain"], (1536, 2624), 4096)
    w13 = draw.kept(["mxfp4"], [1024], 4096, 16)
    w2 = draw.kept(["mxfp4"], [4096], 512, 16)
    x = draw(16, 4096, dtype=torch.bfloat16)
    chosen, weights = routed(draw, 16, 16, 6)
    linear, experts = (both(op)[0] for op in ("linear", "experts"))

    def step():
        return linear(x, w), experts(x, chosen, weights, w13, w2, LIMIT)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    for seed in (1, 2):
        x.copy_(Draw(seed)(16, 4096))
        chosen.copy_(routed(Draw(seed), 16, 16, 6)[0])
        want = step()
        graph.replay()
        assert all(map(torch.equal, got, want))
