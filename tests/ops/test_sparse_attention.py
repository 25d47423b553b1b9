"""Attention against a loop over queries, heads and keys."""

import math

import pytest
import torch

from atom_vllm_bridge.models.ops.registry import providers_of, resolve_from
from atom_vllm_bridge.models.ops.torch import sparse_attention as module
from atom_vllm_bridge.models.ops.torch.sparse_attention import Keys
from atom_vllm_bridge.models.quantization.kv_codecs import raw

N, Q, H, D = 4, 3, 2, 8


def source(g, entries, empty_tile=None):
    rows = torch.randn(6, 5, D, generator=g)
    ids = torch.randint(0, 25, (N, entries), generator=g)
    hidden = torch.rand(N, Q, entries, generator=g) < 0.4
    none = None
    if empty_tile is not None:
        hidden[empty_tile] = True
        rows[5] = torch.nan
        ids[empty_tile] = 26
        none = hidden.all(2).all(1).view(N, 1, 1)
    return Keys(rows, ids, hidden, none)


def case(queries=Q):
    g = torch.Generator().manual_seed(0)
    query = torch.randn(N, Q, H, D, generator=g)[:, :queries]
    sink = torch.randn(H, generator=g)
    window, compressed = source(g, 7), source(g, 5, empty_tile=2)
    if queries < Q:
        window, compressed = (
            Keys(s.rows, s.ids, s.hidden[:, :queries], s.none)
            for s in (window, compressed)
        )
    return query, sink, window, compressed


def plain(query, sink, scale, sources):
    out = torch.zeros_like(query)
    for n, q, h in torch.cartesian_prod(*map(torch.arange, query.shape[:3])).tolist():
        keys = [
            s.rows.flatten(0, 1)[s.ids[n, e]]
            for s in sources
            for e in range(s.ids.shape[1])
            if not s.hidden[n, q, e]
        ]
        weights = [math.exp(scale * float(query[n, q, h] @ key)) for key in keys]
        total = sum(weights) + math.exp(float(sink[h]))
        for w, key in zip(weights, keys, strict=True):
            out[n, q, h] += w / total * key
    return out


@pytest.mark.parametrize("queries", [1, Q])
@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize("provider", providers_of("sparse_attention"))
def test_visible_keys_and_the_sink_share_the_weight(provider, both, queries):
    query, sink, window, compressed = case(queries)
    scale = D**-0.5
    got = resolve_from(provider, "sparse_attention")(
        query, sink, scale, window, compressed if both else None, raw(D, torch.float32)
    )
    sources = (window, compressed) if both else (window,)
    torch.testing.assert_close(
        got, plain(query, sink, scale, sources), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("provider", providers_of("sparse_attention"))
def test_bfloat16_rows_are_read_as_the_codec_reads_them(provider):
    query, sink, window, compressed = case()
    sources = [
        Keys(s.rows.bfloat16(), s.ids, s.hidden, s.none) for s in (window, compressed)
    ]
    got = resolve_from(provider, "sparse_attention")(
        query, sink, 0.3, *sources, raw(D, torch.bfloat16)
    )
    wide = [Keys(s.rows.float(), s.ids, s.hidden, s.none) for s in sources]
    torch.testing.assert_close(got, plain(query, sink, 0.3, wide), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("provider", providers_of("sparse_attention"))
def test_a_query_that_reads_nan_keeps_it_to_itself(provider):
    """Padding tokens may read rows that nobody wrote."""
    query, sink, window, compressed = case()
    window.rows[5] = torch.nan
    window.ids[1], window.hidden[1] = 27, False
    others = [0, 2, 3]
    window.ids[others] %= 25
    window.rows[:5].nan_to_num_(1.0)
    got = resolve_from(provider, "sparse_attention")(
        query.contiguous(), sink, 0.3, window, compressed, raw(D, torch.float32)
    )
    assert got[1].isnan().all()
    want = plain(
        query[others], sink, 0.3, [_at(s, others) for s in (window, compressed)]
    )
    torch.testing.assert_close(got[others], want, rtol=1e-4, atol=1e-5)


def _at(source, tiles):
    return Keys(source.rows, source.ids[tiles], source.hidden[tiles])


def test_result_does_not_depend_on_the_batches_of_tiles(monkeypatch):
    query, sink, window, compressed = case()
    whole = module.sparse_attention(
        query, sink, 0.3, window, compressed, raw(D, torch.float32)
    )
    monkeypatch.setattr(module, "TEMPORARY_BYTES", 1)
    cut = module.sparse_attention(
        query, sink, 0.3, window, compressed, raw(D, torch.float32)
    )
    torch.testing.assert_close(cut, whole)
