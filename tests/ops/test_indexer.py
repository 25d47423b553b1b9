"""indexer_logits and indexer_topk."""

import pytest
import torch

from atom_vllm_bridge.models.ops.registry import providers_of, resolve_from
from atom_vllm_bridge.models.ops.torch import indexer_logits as logits_module
from atom_vllm_bridge.models.quantization.kv_codecs import raw

FLOAT32 = raw(8, torch.float32)


def logits_case():
    g = torch.Generator().manual_seed(0)
    query = torch.randn(3, 2, 4, 8, generator=g)
    weight = torch.randn(3, 2, 4, generator=g)
    rows = torch.randn(5, 6, 8, generator=g)
    ids = torch.randint(0, 30, (3, 7), generator=g)
    return query, weight, rows, ids


@pytest.mark.parametrize("provider", providers_of("indexer_logits"))
def test_logits_weigh_rectified_products_of_heads(provider):
    query, weight, rows, ids = logits_case()
    scores = resolve_from(provider, "indexer_logits")(
        query, weight, rows, ids, FLOAT32, torch.full((3, 2), 7)
    )
    for n in range(3):
        for q in range(2):
            for e in range(7):
                key = rows.flatten(0, 1)[ids[n, e]]
                want = sum(
                    weight[n, q, h] * max(0.0, float(query[n, q, h] @ key))
                    for h in range(4)
                )
                assert scores[n, q, e] == pytest.approx(float(want), abs=1e-5)


def test_logits_do_not_depend_on_the_batches_of_entries(monkeypatch):
    case = (*logits_case(), FLOAT32, torch.full((3, 2), 7))
    whole = logits_module.indexer_logits(*case)
    monkeypatch.setattr(logits_module, "TEMPORARY_BYTES", 1)
    cut = logits_module.indexer_logits(*case)
    torch.testing.assert_close(cut, whole)


TOPK = pytest.mark.parametrize("provider", providers_of("indexer_topk"))


def plain_topk(scores, available, k):
    """Best first, the lower index first among equals, −1 after the available ones."""
    order = sorted(range(available), key=lambda j: (-float(scores[j]), j))[:k]
    return order + [-1] * (min(k, len(scores)) - len(order))


@TOPK
@pytest.mark.parametrize("levels", [2, 5, 10**6])
@pytest.mark.parametrize("k", [1, 4, 16, 64])
def test_selection_is_total_and_stops_at_the_available(provider, k, levels):
    g = torch.Generator().manual_seed(k)
    scores = torch.randint(-levels, levels, (9, 33), generator=g) / 3
    available = torch.tensor([0, 1, 2, 3, 4, 15, 16, 17, 33])
    got = resolve_from(provider, "indexer_topk")(scores, available, k)
    want = [plain_topk(s, int(a), k) for s, a in zip(scores, available, strict=True)]
    assert got.tolist() == want


@TOPK
def test_what_lies_beyond_the_available_cannot_matter(provider):
    scores = torch.tensor([[1.0, -2.0, torch.nan, torch.inf, 1e38]])
    got = resolve_from(provider, "indexer_topk")(scores, torch.tensor([2]), 3)
    assert got.tolist() == [[0, 1, -1]]


@TOPK
def test_negative_zero_equals_zero(provider):
    scores = torch.tensor([[-0.0, 0.0, -0.0, 1.0, -1e-30]])
    got = resolve_from(provider, "indexer_topk")(scores, torch.tensor([5]), 4)
    assert got.tolist() == [[3, 0, 1, 2]]
