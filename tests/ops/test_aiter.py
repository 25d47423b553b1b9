"""Adapters to aiter: what they hand over, and that with what comes back they are the op. Against published signatures (fake_aiter.py)."""

import json
import sys
from dataclasses import replace

import fake_aiter
import pytest
import torch

from atom_vllm_bridge.models.ops import registry
from atom_vllm_bridge.models.ops.aiter import (
    attention_output,
    entries,
    experts,
    feed_forward,
    hc_head,
    hc_post,
    hc_pre,
    indexer_logits,
    indexer_topk,
    linear,
    rope,
    router,
    sparse_attention,
    swiglu,
    weights,
    write_keys,
)
from atom_vllm_bridge.models.ops.ragged import ragged
from atom_vllm_bridge.models.ops.torch.sparse_attention import Keys
from atom_vllm_bridge.models.quantization import block_fp8, mxfp4
from atom_vllm_bridge.models.quantization.kept import Kept
from atom_vllm_bridge.models.quantization.kv_codecs import fp8_ds_mla, fp8_row, raw

CPU, BF16 = torch.device("cpu"), torch.bfloat16
VERSIONS = pytest.mark.parametrize("version", ["earlier", "later"])
ARCHITECTURES = pytest.mark.parametrize("architecture", ["gfx942", "gfx950"])


def draw(*shape, seed=0, dtype=BF16):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g).to(dtype)


def angles(tokens, pairs=32):
    return torch.polar(
        torch.ones(tokens, pairs), draw(tokens, pairs, seed=9, dtype=torch.float32)
    )


def near(got, want, tolerance):
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    assert (got.double() - want.double()).norm() <= tolerance * want.double().norm()


def reference(op, *arguments):
    return registry.resolve_from("torch", op)(*arguments)


@pytest.fixture
def later(monkeypatch):
    return fake_aiter.install(monkeypatch, "later", "gfx950")


@pytest.fixture
def fallen_back(monkeypatch):
    """Ops that an adapter left to Triton; their results are torch's."""
    taken, find = [], registry.resolve_from

    def found(provider, op):
        if provider == "triton":
            taken.append((provider, op))
        return find("torch", op)

    monkeypatch.setattr(registry, "resolve_from", found)
    return taken


@pytest.mark.parametrize("version", ["earlier", "later"])
def test_signatures_say_where_they_are_from(version):
    read = json.loads((fake_aiter.VERSIONS / f"{version}.json").read_text())
    for entry in read["functions"].values():
        repository, _, commit = entry["commit"].partition("@")
        assert repository.endswith("/aiter")
        assert len(commit) == 40


STREAMS = draw(5, 4, 256)
MIX = 0.05 * draw(24, 1024, seed=1, dtype=torch.float32)
BASE, SCALE = draw(24, seed=2, dtype=torch.float32), torch.tensor([0.3, 0.2, 0.4])


@VERSIONS
@pytest.mark.parametrize("weight", [None, 1 + 0.1 * draw(256, dtype=torch.float32)])
def test_hyper_connections_read(version, weight, monkeypatch):
    fake_aiter.install(monkeypatch, version, "gfx942")
    arguments = (STREAMS, MIX, BASE, SCALE, 20, 1e-6, 1e-6, weight)
    for got, want in zip(
        hc_pre.hc_pre(*arguments), reference("hc_pre", *arguments), strict=True
    ):
        near(got, want, 5e-3)


@VERSIONS
def test_hyper_connections_write_and_collapse(version, monkeypatch):
    fake_aiter.install(monkeypatch, version, "gfx950")
    x, post = draw(5, 256, seed=3), draw(5, 4, seed=4, dtype=torch.float32)
    comb = draw(5, 4, 4, seed=5, dtype=torch.float32)
    near(
        hc_post.hc_post(x, STREAMS, post, comb),
        reference("hc_post", x, STREAMS, post, comb),
        5e-3,
    )
    arguments = STREAMS, MIX[:4], BASE[:4], SCALE[:1], 1e-6, 1e-6
    near(hc_head.hc_head(*arguments), reference("hc_head", *arguments), 5e-3)


def test_float32_streams_are_tritons(later, fallen_back):
    hc_pre.hc_pre(STREAMS.float(), MIX, BASE, SCALE, 20, 1e-6, 1e-6)
    hc_head.hc_head(STREAMS.float(), MIX[:4], BASE[:4], SCALE[:1], 1e-6, 1e-6)
    assert fallen_back == [("triton", "hc_pre"), ("triton", "hc_head")]
    assert not later


def test_the_router_chooses_and_weighs(later, fallen_back):
    x, gate = draw(7, 64), draw(16, 64, seed=1, dtype=torch.float32)
    bias = draw(16, seed=2, dtype=torch.float32)
    chosen, weight = router.router(x, gate, 1.5, 4, bias)
    want, weighed = reference("router", x, gate, 1.5, 4, bias)
    assert torch.equal(chosen, want)
    near(weight, weighed, 1e-6)
    assert not fallen_back
    router.router(x, gate, 1.5, 4, None, want)
    assert fallen_back == [("triton", "router")]


@pytest.mark.parametrize("limit", [1.0, float("inf")])
def test_the_gate_clamps(limit, later, fallen_back):
    hidden = 3 * draw(2, 3, 512)
    near(swiglu.swiglu(hidden, limit), reference("swiglu", hidden, limit), 1e-6)
    assert not fallen_back
    swiglu.swiglu(hidden[..., :400], limit)
    swiglu.swiglu(hidden.float(), limit)
    assert len(fallen_back) == 2


def test_the_indexers_queries_are_rotated_and_not_mixed(later, fallen_back):
    x, rotation = draw(6, 8, 128, dtype=torch.float32), angles(6)
    want = reference("rope", x.clone(), rotation)
    got = rope.rope(x, rotation)
    assert got.data_ptr() == x.data_ptr()
    near(got, want, 5e-3)
    ((_, given),) = later
    assert given["do_rotate_act"] is False
    assert not fallen_back


def cache(codec, blocks=6, size=16, seed=0):
    values = draw(blocks, size, codec.dim, seed=seed, dtype=torch.float32)
    return codec.encode(values)


@pytest.mark.parametrize(
    "codec", [fp8_ds_mla(512, 64), fp8_row(128)], ids=lambda c: c.name
)
def test_keys_are_stored_as_the_codec_has_them(codec, later, fallen_back):
    x, rotation = draw(9, codec.dim), angles(9)
    # As in a checkpoint, a weight that bfloat16 holds.
    weight = (1 + 0.1 * draw(codec.dim, seed=3, dtype=torch.float32)).bfloat16().float()
    rows = cache(codec)
    got, want = rows.clone(), rows.clone()
    ids = torch.tensor([3, -1, 17, 40, 95, 8, -1, 0, 50])
    arguments = x, weight, 1e-6, rotation
    write_keys.write_keys(*arguments, got, ids, codec)
    reference("write_keys", *arguments, want, ids, codec)
    assert not fallen_back
    written = ids[ids >= 0]
    others = torch.ones(96, dtype=torch.bool).index_fill_(0, written, False)
    assert torch.equal(got.flatten(0, 1)[others], rows.flatten(0, 1)[others])
    got, want = (codec.decode(r.flatten(0, 1)[written]) for r in (got, want))
    near(got, want, 3e-2)


def test_keys_of_other_rows_are_tritons(later, fallen_back):
    small = fp8_ds_mla(128, 64)
    arguments = draw(3, 128), torch.ones(128), 1e-6, angles(3)
    write_keys.write_keys(*arguments, cache(small), torch.arange(3), small)
    assert fallen_back == [("triton", "write_keys")]


@pytest.mark.parametrize("k", [4, 9, 64])
def test_the_best_entries_come_best_first_and_the_lower_of_equals_first(k, later):
    scores = draw(3, 2, 40, dtype=torch.float32).mul(2).round()
    available = torch.tensor([[40, 39], [5, 0], [17, 1]])
    got = indexer_topk.indexer_topk(scores, available, k)
    assert torch.equal(got, reference("indexer_topk", scores, available, k))


@ARCHITECTURES
@pytest.mark.parametrize("queries", [1, 5])
def test_entries_are_scored(architecture, queries, monkeypatch, fallen_back):
    calls = fake_aiter.install(monkeypatch, "later", architecture)
    codec, heads, tiles, entries_ = fp8_row(128), 8, 3, 24
    rows = cache(codec)
    # Zeros of both signs, which the two kinds of fp8 do not share.
    rows[:, :, 3], rows[:, :, 4] = 0x80, 0
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 96, (tiles, entries_), generator=g)
    available = torch.randint(0, entries_ + 1, (tiles, queries), generator=g)
    query = draw(tiles, queries, heads, 128, seed=2, dtype=torch.float32)
    weight = draw(tiles, queries, heads, seed=3, dtype=torch.float32)
    arguments = query, weight, rows, ids, codec, available
    got, want = (
        op(*arguments)
        for op in (
            indexer_logits.indexer_logits,
            registry.resolve_from("torch", "indexer_logits"),
        )
    )
    seen = torch.arange(entries_) < available.unsqueeze(-1)
    near(got[seen], want[seen], 4e-2)
    paged = queries == 1 and architecture == "gfx950"
    names = ["deepgemm_fp8_paged_mqa_logits"] if paged else ["fp8_mqa_logits"] * tiles
    assert [name for name, _ in calls] == names


def test_queries_and_their_weights_keep_their_product():
    query, weight = draw(4, 8, 128, dtype=torch.float32), torch.ones(4, 8)
    query[1, 2] = 0
    for fp8 in (torch.float8_e4m3fn, torch.float8_e4m3fnuz):
        codes, scaled = indexer_logits.quantized(query, weight, fp8)
        assert codes.float().isfinite().all()
        near(codes.float() * scaled.unsqueeze(-1), query, 4e-2)


def attention(codec, compressed, queries=2, seed=0):
    g = torch.Generator().manual_seed(seed)
    query = draw(3, queries, 4, 512, seed=seed, dtype=torch.float32)
    sink = draw(4, seed=seed + 1, dtype=torch.float32)

    def keys(width, seed):
        hidden = torch.rand(3, queries, width, generator=g) < 0.4
        ids = torch.randint(0, 96, (3, width), generator=g)
        return Keys(cache(codec, seed=seed), ids, hidden)

    other = keys(12, 5) if compressed else None
    if other is not None:
        other.hidden[1] = True
        none = other.hidden.all(2).all(1).view(-1, 1, 1)
        other = Keys(other.rows, other.ids, other.hidden, none)
    return query, sink, 0.05, keys(20, 4), other, codec


CODECS = {"bfloat16": raw(512, BF16), "fp8_ds_mla": fp8_ds_mla(512, 64)}


@pytest.mark.parametrize(
    ("version", "architecture", "codec", "compressed", "called"),
    [
        ("earlier", "gfx942", "bfloat16", False, "pa_decode_sparse"),
        ("later", "gfx942", "bfloat16", False, "pa_decode_sparse"),
        ("later", "gfx942", "bfloat16", True, None),
        ("later", "gfx942", "fp8_ds_mla", False, None),
        ("earlier", "gfx950", "bfloat16", False, "pa_decode_sparse"),
        ("earlier", "gfx950", "bfloat16", True, "pa_sparse_prefill_opus"),
        ("earlier", "gfx950", "fp8_ds_mla", True, None),
        ("later", "gfx950", "bfloat16", True, "pa_decode_sparse"),
        ("later", "gfx950", "fp8_ds_mla", False, "pa_decode_sparse"),
        ("later", "gfx950", "fp8_ds_mla", True, "pa_decode_sparse"),
    ],
)
def test_attention_reads_lists_of_rows(
    version, architecture, codec, compressed, called, monkeypatch, fallen_back
):
    calls = fake_aiter.install(monkeypatch, version, architecture)
    arguments = attention(CODECS[codec], compressed)
    want = reference("sparse_attention", *arguments)
    near(sparse_attention.sparse_attention(*arguments), want, 1e-2)
    assert [name for name, _ in calls] == ([called] if called else [])
    assert bool(fallen_back) == (called is None)


def test_attention_over_too_much_to_list_is_tritons(later, fallen_back, monkeypatch):
    arguments = attention(CODECS["bfloat16"], False)
    monkeypatch.setattr(sparse_attention, "MOST_LISTED", 3 * 2 * 20 - 1)
    sparse_attention.sparse_attention(*arguments)
    assert fallen_back == [("triton", "sparse_attention")]
    assert not later


def test_lists_made_before_the_step_are_read_where_they_lie(later):
    query, sink, scale, window, _, codec = attention(CODECS["bfloat16"], False)
    lists = ragged(window.ids, window.hidden)
    given = replace(window, ragged=lists)
    sparse_attention.sparse_attention(query, sink, scale, given, None, codec)
    ((_, arguments),) = later
    assert arguments["kv_indices"].data_ptr() == lists.indices.data_ptr()
    assert arguments["kv_indptr"].data_ptr() == lists.indptr.data_ptr()
    assert arguments["has_invalid"] is False


def kept(format, outputs, inputs, count=None, seed=0, device=CPU):
    w = Kept([outputs], inputs, count, BF16, device)
    quantize = {"fp8": block_fp8.quantize, "mxfp4": mxfp4.quantize}[format]
    for e in range(count or 1):
        values = draw(outputs, inputs, seed=seed + e, dtype=torch.float32)
        # Blocks of different sizes, and exact zeros of both signs.
        values[: outputs // 2] *= 8
        values[0, :3] = torch.tensor([0.0, -0.0, -1e-9])
        pair = quantize(values * inputs**-0.5)
        w.rows(e * outputs, (e + 1) * outputs).keep(*pair)
    return w


@VERSIONS
@ARCHITECTURES
def test_rows_times_a_matrix_of_fp8(version, architecture, monkeypatch, fallen_back):
    calls = fake_aiter.install(monkeypatch, version, architecture)
    x, w = draw(5, 384), kept("fp8", 256, 384)
    want = x.float() @ w.plain(torch.float32)
    for _ in range(2):
        near(linear.linear(x, w).float(), want, 4e-2)
    assert [name for name, _ in calls] == ["gemm_a8w8_blockscale"] * 2
    part = linear.linear(x, w.columns(128, 256))
    near(part.float(), want[:, 128:], 5e-2)
    assert not fallen_back
    with pytest.raises(ValueError, match="order of its own"):
        w.plain(BF16)


def test_weights_are_put_into_order_without_loss(later):
    w = kept("fp8", 256, 384)
    want = w.plain(torch.float32).mT
    for kind in (torch.float8_e4m3fn, torch.float8_e4m3fnuz):
        w = kept("fp8", 256, 384)
        found = weights.fp8(w.bands[0], kind)
        assert torch.equal(fake_aiter.blocks(found.codes, found.scales), want)


def test_weights_that_come_again_are_put_into_order_again(later):
    w, x = kept("fp8", 128, 128), draw(2, 128)
    linear.linear(x, w)
    pair = block_fp8.quantize(draw(128, 128, seed=7, dtype=torch.float32))
    w.rows(0, 128).keep(*pair)
    near(linear.linear(x, w).float(), x.float() @ block_fp8.dequantize(*pair).T, 5e-2)


def test_bands_that_are_not_fp8_are_multiplied_as_they_are(later, fallen_back):
    w = Kept([128, 24], 256, None, BF16, CPU)
    w.rows(0, 128).keep(*block_fp8.quantize(draw(128, 256, dtype=torch.float32)))
    w.rows(128, 152).copy_(draw(24, 256, seed=1))
    x = draw(3, 256, seed=2)
    want = x.float() @ w.plain(torch.float32)
    got = linear.linear(x, w)
    near(got.float(), want, 5e-2)
    assert torch.equal(got[:, 128:], x @ draw(24, 256, seed=1).T)
    assert not fallen_back


def test_a_matrix_without_whole_blocks_is_tritons_and_stays_readable(
    later, fallen_back
):
    w = kept("fp8", 200, 384)
    x = draw(2, 384)
    near(linear.linear(x, w), x @ w.plain(BF16), 1e-2)
    assert fallen_back == [("triton", "linear")]
    assert not later


def test_a_feed_forward_multiplies_and_gates(later, fallen_back):
    x, w13, w2 = draw(4, 256), kept("fp8", 512, 256), kept("fp8", 256, 256, seed=3)
    want = reference("feed_forward", x, w13, w2, 1.0)
    near(feed_forward.feed_forward(x, w13, w2, 1.0), want, 0.1)
    assert not fallen_back
    assert [name for name, _ in later] == [
        "gemm_a8w8_blockscale",
        "fused_clamp_act_mul",
        "gemm_a8w8_blockscale",
    ]


class Attention:
    """What attention's output needs of it."""

    def __init__(self, wo_a, wo_b):
        self.wo_a, self.wo_b = wo_a, wo_b
        self.inverse_rope = registry.resolve_from("torch", "inverse_rope")
        self.grouped_output_projection = registry.resolve_from(
            "torch", "grouped_output_projection"
        )


@VERSIONS
def test_attentions_output_is_turned_back_and_projected(
    version, monkeypatch, fallen_back
):
    calls = fake_aiter.install(monkeypatch, version, "gfx950")
    heads, groups, rank, tokens = 4, 2, 128, 5
    o, rotation = draw(tokens, heads, 512, dtype=torch.float32), angles(tokens)
    wo_a = kept("fp8", rank, heads * 512 // groups, groups)
    wo_b = kept("fp8", 256, groups * rank, seed=7)
    parts = Attention(wo_a, wo_b)
    want = reference("attention_output", parts, o.clone(), rotation, BF16)
    got = attention_output.attention_output(parts, o, rotation, BF16)
    near(got, want, 6e-2)
    names = [name for name, _ in calls]
    assert names[:2] == ["inverse_rope_group_quant", "batched_gemm_a8w8_mxscale"]
    renamed = {"earlier": ("transpose_scale", False), "later": ("scale_layout", "row")}
    name, value = renamed[version]
    assert calls[0][1][name] == value


def test_attentions_output_in_float32_is_its_own_ops(later):
    parts = Attention(draw(2, 128, 1024, dtype=torch.float32), draw(256, 64).float())
    o, rotation = draw(3, 4, 512, dtype=torch.float32), angles(3)
    want = reference("attention_output", parts, o.clone(), rotation, torch.float32)
    got = attention_output.attention_output(parts, o, rotation, torch.float32)
    assert torch.equal(got, want)
    assert not later


def test_experts_of_fp4(later, fallen_back):
    many, k, dim, inner, tokens = 3, 2, 256, 256, 4
    w13 = kept("mxfp4", 2 * inner, dim, many)
    w2 = kept("mxfp4", dim, inner, many, seed=5)
    x = draw(tokens, dim)
    # One choice is of an expert that is not here.
    chosen = torch.tensor([[0, 1], [2, 3], [1, 0], [2, 1]])
    weight = torch.rand(tokens, k, generator=torch.Generator().manual_seed(0))
    want = reference("experts", x, chosen, weight, w13, w2, 1.0)
    for _ in range(2):
        near(experts.experts(x, chosen, weight, w13, w2, 1.0), want, 1e-2)
    assert not fallen_back
    with pytest.raises(ValueError, match="order of its own"):
        w13.plain(BF16)


def test_tiles_are_the_published_ones():
    bytes_ = torch.randperm(64 * 96).view(64, 96)
    assert torch.equal(weights.tiled(bytes_), fake_aiter.tiles_of_weights(bytes_))
    assert torch.equal(weights.tiled_scales(bytes_), fake_aiter.tiles_of_scales(bytes_))


def needs(op):
    return sys.modules[f"atom_vllm_bridge.models.ops.aiter.{op}"].NEEDS


@pytest.mark.parametrize(
    ("version", "architecture", "op", "named", "reason"),
    [
        ("later", "gfx950", "hc_pre", False, None),
        ("later", "gfx950", "sparse_attention", False, None),
        ("earlier", "gfx942", "swiglu", False, None),
        ("earlier", "gfx950", "router", True, "has no topk_gating or topk_softplus"),
        ("earlier", "gfx950", "indexer_topk", True, "has no top_k_per_row_prefill"),
        ("earlier", "gfx950", "write_keys", True, "has no indexer_k_quant_and_cache"),
        ("earlier", "gfx950", "rope", True, "has no rope_rotate_activation"),
        ("earlier", "gfx950", "experts", True, "has a fused_moe without swiglu_limit"),
        ("later", "gfx950", "experts", True, None),
        (
            "later",
            "gfx950",
            "experts",
            False,
            "rounds rows to fp4 or fp8; ATOM_BRIDGE_OPS=experts=aiter takes it",
        ),
        (
            "later",
            "gfx942",
            "experts",
            True,
            "not on gfx942: its matrix units do not take fp4",
        ),
        (
            "later",
            "gfx942",
            "write_keys",
            True,
            "not on gfx942: it stores e4m3fnuz there, and the cache holds e4m3fn",
        ),
    ],
)
def test_an_op_is_taken_by_gpu_and_signature(
    version, architecture, op, named, reason, monkeypatch
):
    fake_aiter.install(monkeypatch, version, architecture)
    assert needs(op).missing(op, CPU, named) == reason


@pytest.mark.parametrize(
    ("signature", "reason"),
    [
        (
            "(o, positions, cos_cache, sin_cache, num_groups, quant_group_size=128)",
            "has a inverse_rope_group_quant without scale_layout or scale_shuffle or transpose_scale",
        ),
        (
            "(o, positions, cos, sin_cache, num_groups, scale_layout='row')",
            "has a inverse_rope_group_quant that also wants cos",
        ),
        (
            "(o, positions, cos_cache, num_groups, scale_layout='row')",
            "has a inverse_rope_group_quant without sin_cache",
        ),
        (
            "(*args, **kwargs)",
            "has a inverse_rope_group_quant whose arguments cannot be read",
        ),
    ],
)
def test_a_function_that_has_changed_is_refused_by_name(signature, reason, monkeypatch):
    place = "aiter.ops.inverse_rope_group_quant:inverse_rope_group_quant"
    fake_aiter.install(monkeypatch, "later", "gfx950", {place: signature})
    assert attention_output.INVERSE_ROPE.missing() == reason
    with pytest.raises(RuntimeError, match="aiter has a inverse_rope_group_quant"):
        attention_output.INVERSE_ROPE(o=None)


def test_arguments_are_given_in_the_order_that_a_version_has(monkeypatch):
    got = {}

    def swapped(kv_cache_fp8, q, *, last=3, first=1):
        got.update(kv=kv_cache_fp8, q=q, last=last, first=first)

    monkeypatch.setattr(entries, "_found", {})
    monkeypatch.setitem(sys.modules, "aiter", sys.modules[__name__])
    monkeypatch.setattr(sys.modules[__name__], "swapped", swapped, raising=False)
    entry = entries.Entry(
        places=("aiter:absent", "aiter:swapped"),
        takes=("q", "kv"),
        renamed={"kv": ("kv_cache_fp8",)},
        constants={"last": 4, "unknown": 5},
    )
    entry(q="query", kv="keys")
    assert got == {"kv": "keys", "q": "query", "last": 4, "first": 1}
    assert entry.has("q", "kv")
    assert not entry.has("other")


def test_an_aiter_that_does_not_import_is_said_in_a_line(monkeypatch):
    monkeypatch.setattr(entries, "_found", {})

    def broken(name):
        raise OSError("libamdhip64.so.7: cannot open shared object file\nand more")

    monkeypatch.setattr(entries.importlib, "import_module", broken)
    assert hc_post.MHC_POST.missing() == (
        "cannot be imported: libamdhip64.so.7: cannot open shared object file"
    )
