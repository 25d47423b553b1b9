"""Every op that aiter takes agrees with torch's: on AMD's GPU as the installed aiter computes it, elsewhere as a pretended one does."""

import sys
from dataclasses import replace

import fake_aiter
import pytest
import torch
from test_aiter import CODECS, Attention, angles, attention, cache, draw, kept

from atom_vllm_bridge.models.ops import registry
from atom_vllm_bridge.models.ops.torch.sparse_attention import Keys
from atom_vllm_bridge.models.quantization.kv_codecs import fp8_ds_mla, fp8_row

ON_AMD = torch.version.hip is not None and torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_AMD else "cpu")
BF16, FP32 = torch.bfloat16, torch.float32


def at(*shape, seed=0, dtype=BF16):
    return draw(*shape, seed=seed, dtype=dtype).to(DEVICE)


def matrix(*arguments, **named):
    return kept(*arguments, **named, device=DEVICE)


def moved(x):
    if isinstance(x, Keys):
        none = None if x.none is None else x.none.to(DEVICE)
        rows, ids, hidden = (t.to(DEVICE) for t in (x.rows, x.ids, x.hidden))
        return replace(x, rows=rows, ids=ids, hidden=hidden, none=none)
    return x.to(DEVICE) if isinstance(x, torch.Tensor) else x


def streams(rows):
    return (
        at(5, 4, 4096),
        0.01 * at(rows, 4 * 4096, seed=1, dtype=FP32),
        at(rows, seed=2, dtype=FP32),
    )


def hc_pre(op):
    scale = torch.tensor([0.3, 0.2, 0.4], device=DEVICE)
    y, post, comb = op(*streams(24), scale, 20, 1e-6, 1e-6)
    return torch.cat([t.float().flatten(1) for t in (y, post, comb)], 1)


def hc_head(op):
    return op(*streams(4), torch.tensor([0.3], device=DEVICE), 1e-6, 1e-6)


def hc_post(op):
    post, comb = at(5, 4, seed=4, dtype=FP32), at(5, 4, 4, seed=5, dtype=FP32)
    return op(at(5, 4096, seed=3), at(5, 4, 4096), post, comb)


def router(op):
    gate, bias = at(256, 4096, seed=1, dtype=FP32), at(256, seed=2, dtype=FP32)
    chosen, weights = op(at(7, 4096), 0.02 * gate, 1.5, 6, bias)
    return torch.zeros(7, 256, device=DEVICE).scatter(1, chosen, weights)


def swiglu(op):
    return op(3 * at(5, 4096), 10.0)


def rope(op):
    return op(at(6, 64, 128, dtype=FP32), angles(6).to(DEVICE))


def write_keys(codec):
    def run(op):
        rows = cache(codec).to(DEVICE)
        weight = 1 + 0.1 * at(codec.dim, seed=3).float()
        ids = torch.tensor([3, -1, 17, 40, 95, 8], device=DEVICE)
        arguments = at(6, codec.dim), weight.bfloat16().float(), 1e-6
        op(*arguments, angles(6).to(DEVICE), rows, ids, codec)
        return codec.decode(rows)

    return run


def indexer_logits(queries):
    def run(op):
        g = torch.Generator().manual_seed(1)
        ids = torch.randint(0, 96, (3, 64), generator=g).to(DEVICE)
        available = torch.randint(1, 65, (3, queries), generator=g).to(DEVICE)
        query = at(3, queries, 64, 128, seed=2, dtype=FP32)
        weight = at(3, queries, 64, seed=3, dtype=FP32)
        rows = cache(fp8_row(128)).to(DEVICE)
        scores = op(query, weight, rows, ids, fp8_row(128), available)
        seen = torch.arange(64, device=DEVICE) < available.unsqueeze(-1)
        return scores.masked_fill(~seen, 0.0)

    return run


def indexer_topk(op):
    scores = at(3, 2, 4096, dtype=FP32).mul(8).round()
    available = torch.tensor([[4096, 4000], [5, 0], [700, 1]], device=DEVICE)
    return op(scores, available, 512)


def sparse_attention(codec, compressed):
    def run(op):
        arguments = attention(CODECS[codec], compressed)
        return op(*(moved(x) for x in arguments))

    return run


def linear(op):
    return op(at(5, 1024), matrix("fp8", 512, 1024))


def feed_forward(op):
    w13 = matrix("fp8", 512, 1024)
    return op(at(5, 1024), w13, matrix("fp8", 1024, 256, seed=3), 10.0)


def attention_output(op):
    wo_a = matrix("fp8", 128, 4 * 512 // 2, 2)
    parts = Attention(wo_a, matrix("fp8", 256, 256, seed=7))
    o = at(5, 4, 512, dtype=FP32)
    return op(parts, o, angles(5).to(DEVICE), BF16)


def experts(op):
    w13, w2 = matrix("mxfp4", 512, 512, 3), matrix("mxfp4", 512, 256, 3, seed=5)
    chosen = torch.tensor([[0, 1], [2, 3], [1, 0], [2, 1]], device=DEVICE)
    weights = at(4, 2, dtype=FP32).abs()
    return op(at(4, 512), chosen, weights, w13, w2, 10.0)


# Op → what is compared, and ‖got − want‖ / ‖want‖.
CASES = [
    (hc_pre, 1e-2),
    (hc_head, 1e-2),
    (hc_post, 1e-2),
    (router, 1e-4),
    (swiglu, 1e-2),
    (rope, 1e-2),
    (write_keys(fp8_ds_mla(512, 64)), 3e-2),
    (write_keys(fp8_row(128)), 3e-2),
    (indexer_logits(1), 5e-2),
    (indexer_logits(5), 5e-2),
    (indexer_topk, 0.0),
    (sparse_attention("bfloat16", False), 1e-2),
    (sparse_attention("bfloat16", True), 1e-2),
    (sparse_attention("fp8_ds_mla", True), 1e-2),
    (linear, 5e-2),
    (feed_forward, 0.1),
    (attention_output, 7e-2),
    (experts, 0.3),
]


def op_of(case):
    return case.__qualname__.split(".")[0]


@pytest.mark.parametrize(
    ("case", "tolerance"), CASES, ids=[op_of(case) for case, _ in CASES]
)
def test_aiter_computes_the_op(case, tolerance, monkeypatch):
    op = op_of(case)
    adapter = registry.resolve_from("aiter", op)
    if not ON_AMD:
        fake_aiter.install(monkeypatch, "later", "gfx950")
    needs = sys.modules[adapter.__module__].NEEDS
    if reason := needs.missing(op, DEVICE, True):
        pytest.skip(f"{op}: aiter {reason}")
    with torch.inference_mode():
        got, want = case(adapter), case(registry.resolve_from("torch", op))
    assert got.shape == want.shape
    got, want = got.double(), want.double()
    assert (got - want).norm() <= tolerance * want.norm()
