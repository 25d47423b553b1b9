"""Pooling against a loop over channels."""

import math

import pytest
import torch

from atom_vllm_bridge.models.ops.registry import providers_of, resolve_from


@pytest.mark.parametrize("k", [4, 8, 128])
@pytest.mark.parametrize("provider", providers_of("compressor_pool"))
def test_entries_are_softmax_sums_for_each_channel(provider, k):
    g = torch.Generator().manual_seed(k)
    d, m = 3, 5
    state = torch.randn(9, 40, d, generator=g) * 3
    ids = torch.randint(0, 360, (m, 2, k), generator=g)
    unseen = torch.rand(m, k, generator=g) < 0.3
    unseen[:, -1] = False
    entries = resolve_from(provider, "compressor_pool")(state, ids, unseen)
    flat = state.flatten(0, 1)
    for i in range(m):
        for c in range(d):
            seen = [j for j in range(k) if not unseen[i, j]]
            score = [float(flat[ids[i, 1, j], c]) for j in seen]
            weight = [math.exp(s - max(score)) for s in score]
            kv = [float(flat[ids[i, 0, j], c]) for j in seen]
            want = sum(w * v for w, v in zip(weight, kv, strict=True)) / sum(weight)
            assert entries[i, c] == pytest.approx(want, rel=1e-4, abs=1e-5)


def test_long_prefills_are_pooled_in_batches(monkeypatch):
    from atom_vllm_bridge.models.ops.torch import compressor_pool as module

    g = torch.Generator().manual_seed(0)
    state = torch.randn(4, 8, 6, generator=g)
    ids = torch.randint(0, 32, (11, 2, 8), generator=g)
    unseen = torch.zeros(11, 8, dtype=torch.bool)
    whole = module.compressor_pool(state, ids, unseen)
    monkeypatch.setattr(module, "TEMPORARY_BYTES", 2 * 8 * 6 * 4 * 3)
    assert torch.equal(module.compressor_pool(state, ids, unseen), whole)
