"""Triton's attention, indexer scores and selection against torch's, with what must not be read poisoned."""

import os

import pytest
import torch
from against_torch import close as rows_close
from against_torch import sizes
from interpreted import DEVICE, HERE, ON_GPU, gpu_only, outside, run_interpreted, runs

from atom_vllm_bridge.models.ops.registry import resolve_from
from atom_vllm_bridge.models.ops.torch.sparse_attention import Keys
from atom_vllm_bridge.models.quantization.kv_codecs import fp8_ds_mla, fp8_row, raw

SEEDED = pytest.mark.parametrize("seed", [0, 1, 2] if ON_GPU else [0])
CODECS = {
    "float32": lambda dim, tail: raw(dim, torch.float32),
    "bfloat16": lambda dim, tail: raw(dim, torch.bfloat16),
    "fp8_ds_mla": fp8_ds_mla,
    "fp8_row": lambda dim, tail: fp8_row(dim),
}
KEY_CODECS = pytest.mark.parametrize("name", ["float32", "bfloat16", "fp8_ds_mla"])
INDEX_CODECS = pytest.mark.parametrize("name", ["float32", "bfloat16", "fp8_row"])


def tolerance(codec):
    """The interpreter multiplies in float32 whatever the rows are."""
    return 1e-5 if codec.name == "float32" or not ON_GPU else 1e-2


def close(got, want, tolerance):
    """`against_torch.close`, row by row whatever the dimensions before."""
    assert got.shape == want.shape
    rows_close(got.flatten(0, -2), want.flatten(0, -2), tolerance)


class Draw:
    """Seeded tensors on the device, the same on every device."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape):
        return torch.randn(shape, generator=self.generator).to(DEVICE)

    def below(self, high, *shape):
        return torch.randint(high, shape, generator=self.generator).to(DEVICE)

    def often(self, chance, *shape):
        return (torch.rand(shape, generator=self.generator) < chance).to(DEVICE)

    def rows(self, codec, blocks, per_block, gap):
        """Rows of a cache, blocks `gap` elements further apart than their rows need; the last block holds NaN."""
        rows = codec.encode(self(blocks, per_block, codec.dim))
        rows[-1] = 0xFF if codec.dtype == torch.uint8 else torch.nan
        memory = rows.new_zeros(blocks, per_block * codec.width + gap)
        view = memory[:, : per_block * codec.width].unflatten(
            1, (per_block, codec.width)
        )
        return view.copy_(rows)

    def keys(self, codec, tiles, queries, width, gap):
        """Keys of which each query sees some; what a tile's queries all do not see are rows of NaN."""
        blocks, per_block = 9, 16
        ids = self.below((blocks - 1) * per_block, tiles, width)
        hidden = self.often(0.5, tiles, queries, width + 1)[..., :width]
        # As a window: some of the first and of the last are seen by none.
        hidden[..., : width // 5] = True
        hidden[..., width - width // 3 :] = True
        if tiles > 1:
            hidden[1] = True
        unseen = hidden.all(1)
        rows = self.rows(codec, blocks, per_block, gap)
        step = rows.stride(0) // codec.width if gap % codec.width == 0 else per_block
        ids = ids // per_block * step + ids % per_block
        poisoned = torch.where(unseen, (blocks - 1) * step + 3, ids)
        safe = Keys(rows, ids, hidden, hidden.all(2).all(1).view(-1, 1, 1))
        return safe, Keys(rows, poisoned, hidden, safe.none)


@pytest.fixture(autouse=True)
def _few_lanes(monkeypatch):
    """The interpreter takes its time over each lane, padding included."""
    if not ON_GPU and HERE in os.environ:
        from atom_vllm_bridge.models.ops.triton import indexer_topk as module

        monkeypatch.setattr(module, "FEW", 64)


@outside
def test_the_tests_of_this_file_pass_under_the_interpreter():
    run_interpreted(__file__)


# (Tiles, queries, heads, dim, rotary tail, window, compressed), gap between blocks.
@runs
@SEEDED
@KEY_CODECS
@sizes(
    [((2, 1, 2, 24, 8, 5, 40), "by bytes"), ((2, 3, 2, 96, 16, 38, 0), "by rows")],
    [
        ((1, 1, 64, 512, 64, 128, 512), "no"),
        ((16, 1, 64, 512, 64, 128, 2048), "by rows"),
        ((131, 1, 64, 512, 64, 128, 37), "by bytes"),
        ((1, 1, 64, 512, 64, 128, 8191), "no"),
        ((2, 37, 64, 512, 64, 164, 700), "no"),
        ((3, 128, 64, 512, 64, 255, 0), "no"),
    ],
)
def test_attention_reads_what_is_seen_and_nothing_else(size, name, seed):
    (tiles, queries, heads, dim, tail, width, more), gapped = size
    draw, codec = Draw(seed), CODECS[name](dim, tail)
    query, sink = draw(tiles, queries, heads, dim), draw(heads)
    gap = {"no": 0, "by rows": codec.width, "by bytes": 8}[gapped]
    safe, window = draw.keys(codec, tiles, queries, width, gap)
    safe2 = compressed = None
    if more:
        safe2, compressed = draw.keys(codec, tiles, queries, more, gap)
    scale = dim**-0.5
    got = resolve_from("triton", "sparse_attention")(
        query, sink, scale, window, compressed, codec
    )
    want = resolve_from("torch", "sparse_attention")(
        query, sink, scale, safe, safe2, codec
    )
    if tiles > 1:
        assert (got[1] == 0).all()
    close(got, want, tolerance(codec))


@runs
@KEY_CODECS
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("gaps", [(0, 8), (8, 0)])
def test_one_program_reads_two_caches_that_lie_differently(
    gaps, queries, name, monkeypatch
):
    from atom_vllm_bridge.models.ops.triton import sparse_attention as module

    # Both sources in one program, and more keys than are taken without a search for the first and last that are seen.
    monkeypatch.setattr(module, "PROGRAMS", 1)
    draw, codec = Draw(0), CODECS[name](24, 8)
    query, sink = draw(2, queries, 2, 24), draw(2)
    safe, window = draw.keys(codec, 2, queries, 330, gaps[0])
    safe2, compressed = draw.keys(codec, 2, queries, 291, gaps[1])
    got = module.sparse_attention(query, sink, 0.2, window, compressed, codec)
    want = resolve_from("torch", "sparse_attention")(
        query, sink, 0.2, safe, safe2, codec
    )
    close(got, want, tolerance(codec))


@runs
@pytest.mark.parametrize(("dim", "tail"), [(148, 12), (512, 64)])
def test_what_lies_behind_a_rows_scales_does_not_matter(dim, tail):
    draw, codec = Draw(0), fp8_ds_mla(dim, tail)
    query, sink = draw(2, 1, 3, dim), draw(3)
    _, none = draw.keys(codec, 2, 1, 0, 0)
    safe, keys = draw.keys(codec, 2, 1, 12, 0)
    keys.rows[..., dim + tail + -(-(dim - tail) // 64) :] = 0xFF
    op, reference = (resolve_from(p, "sparse_attention") for p in ("triton", "torch"))
    got = op(query, sink, 0.1, none, keys, codec)
    close(got, reference(query, sink, 0.1, safe, None, codec), tolerance(codec))


@runs
@KEY_CODECS
def test_the_tiles_of_amds_gpus_give_the_same(name, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.2.0")
    draw, codec = Draw(0), CODECS[name](96, 16)
    query, sink = draw(2, 3, 6, 96), draw(6)
    safe, window = draw.keys(codec, 2, 3, 38, 0)
    op, reference = (resolve_from(p, "sparse_attention") for p in ("triton", "torch"))
    got = op(query, sink, 0.1, window, None, codec)
    close(got, reference(query, sink, 0.1, safe, None, codec), tolerance(codec))


@runs
@KEY_CODECS
def test_a_query_of_nan_keeps_it_to_itself(name):
    draw, codec = Draw(0), CODECS[name](24, 8)
    safe, window = draw.keys(codec, 3, 1, 12, 0)
    query, sink = draw(3, 1, 2, 24), draw(2)
    query[2] = torch.nan
    op = resolve_from("triton", "sparse_attention")
    got = op(query, sink, 0.2, window, None, codec)
    assert got[2].isnan().all()
    want = resolve_from("torch", "sparse_attention")(
        query, sink, 0.2, safe, None, codec
    )
    close(got[:2], want[:2], tolerance(codec))


# Tiles, queries, heads, dim, entries.
@runs
@SEEDED
@INDEX_CODECS
@pytest.mark.parametrize("gap", [0, 4])
@sizes(
    [(2, 1, 3, 24, 1), (2, 3, 20, 8, 37)],
    [
        (1, 1, 64, 128, 8191),
        (16, 1, 64, 128, 4096),
        (129, 1, 64, 128, 1025),
        (2, 128, 64, 128, 700),
    ],
)
def test_indexer_scores(size, gap, name, seed):
    tiles, queries, heads, dim, entries = size
    draw, codec = Draw(seed), CODECS[name](dim, 0)
    query, weight = draw(tiles, queries, heads, dim), draw(tiles, queries, heads)
    rows = draw.rows(codec, 9, 16, gap)[:-1]
    ids = draw.below(16, tiles, entries)
    available = draw.below(entries + 1, tiles, queries)
    available[0] = entries
    got, want = (
        resolve_from(provider, "indexer_logits")(
            query, weight, rows, ids, codec, available
        )
        for provider in ("triton", "torch")
    )
    hidden = torch.arange(entries, device=DEVICE) >= available.unsqueeze(-1)
    close(got.masked_fill_(hidden, 0), want.masked_fill_(hidden, 0), tolerance(codec))


@runs
@SEEDED
@pytest.mark.parametrize("levels", [2, 10**6])
@sizes(
    [((7,), 1, 1), ((3, 2), 33, 4), ((5,), 33, 64)],
    [
        ((1,), 8193, 512),
        ((2,), 1 << 18, 512),
        ((3,), 200_001, 1024),
        ((128,), 8192, 512),
        ((70, 100), 2047, 512),
        ((3,), 5000, 4096),
    ],
)
def test_selection_is_torchs_to_the_last_tie(size, levels, seed):
    shape, entries, k = size
    draw = Draw(seed)
    scores = (draw.below(2 * levels, *shape, entries) - levels) / 3
    available = draw.below(entries + 1, *shape)
    # Few, all, and more than there are.
    available.view(-1)[:3] = torch.tensor([min(2, entries), entries, entries + 5])[
        : available.numel()
    ]
    beyond = torch.arange(entries, device=DEVICE) >= available.unsqueeze(-1)
    scores.masked_fill_(beyond, torch.nan)
    got, want = (
        resolve_from(provider, "indexer_topk")(scores.clone(), available, k)
        for provider in ("triton", "torch")
    )
    assert got.dtype == want.dtype
    assert torch.equal(got, want)


@runs
def test_long_rows_are_shortened_in_rounds(monkeypatch):
    from atom_vllm_bridge.models.ops.triton import indexer_topk as module

    monkeypatch.setattr(module, "FEW", 16)
    monkeypatch.setattr(module, "MANY", 16)
    draw = Draw(0)
    scores = (draw.below(20, 2, 50) - 10) / 3
    available = torch.tensor([29, 50], device=DEVICE)
    want = resolve_from("torch", "indexer_topk")(scores, available, 6)
    assert torch.equal(module.indexer_topk(scores, available, 6), want)


@runs
def test_selection_orders_infinities_and_zeros_as_floats():
    values = [-0.0, 0.0, float("-inf"), 1.0, -1e-30, float("inf"), -0.0, 1e-40]
    scores = torch.tensor([values], device=DEVICE)
    got = resolve_from("triton", "indexer_topk")(
        scores, torch.tensor([8], device=DEVICE), 8
    )
    assert got.tolist() == [[5, 3, 7, 0, 1, 6, 4, 2]]


@runs
@gpu_only
def test_all_three_replay_from_a_graph():
    draw, codec, index = Draw(0), fp8_ds_mla(512, 64), fp8_row(128)
    _, window = draw.keys(codec, 4, 1, 128, 0)
    _, compressed = draw.keys(codec, 4, 1, 512, 0)
    query, sink = draw(4, 1, 64, 512), draw(64)
    query2, weight = draw(4, 1, 64, 128), draw(4, 1, 64)
    rows, ids = draw.rows(index, 9, 16, 0), draw.below(100, 4, 9000)
    available = draw.below(9000, 4, 1)

    def step():
        scores = resolve_from("triton", "indexer_logits")(
            query2, weight, rows, ids, index, available
        )
        chosen = resolve_from("triton", "indexer_topk")(scores, available, 512)
        beyond = torch.arange(9000, device=DEVICE) >= available.unsqueeze(-1)
        scores = scores.masked_fill(beyond, 0)
        out = resolve_from("triton", "sparse_attention")(
            query, sink, 0.04, window, compressed, codec
        )
        return scores, chosen, out

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = step()
    for tensor in (query, query2):
        tensor.copy_(draw(*tensor.shape))
    graph.replay()
    for got, want in zip(held, step(), strict=True):
        assert torch.equal(got, want)
