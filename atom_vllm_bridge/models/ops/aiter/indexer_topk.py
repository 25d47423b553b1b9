"""ops/torch/indexer_topk.py by aiter's top_k_per_row_prefill, in its deterministic mode.

That gives the best in ascending order, of equal scores the first; here they are put in the order of scores.
"""

import torch

from atom_vllm_bridge.models.ops import registry
from atom_vllm_bridge.models.ops.aiter.entries import Entry, Needs

# The row end of top_k_per_row_decode counts tokens that follow each other one by one; entries do not.
TOP_K = Entry(
    places=("aiter.ops.topk:top_k_per_row_prefill",),
    takes=(
        "logits",
        "rowStarts",
        "rowEnds",
        "indices",
        "values",
        "numRows",
        "stride0",
        "stride1",
        "k",
    ),
    one_of={"stable": True},
)
NEEDS = Needs((TOP_K,))


def indexer_topk(scores: torch.Tensor, available: torch.Tensor, k: int) -> torch.Tensor:
    """By Triton where there is nothing to select."""
    *shape, entries = scores.shape
    k = min(k, entries)
    if scores.numel() == 0 or k == 0:
        return registry.resolve_from("triton", "indexer_topk")(scores, available, k)
    rows = scores.reshape(-1, entries).contiguous()
    ends = available.expand(shape).reshape(-1).clamp(max=entries).int()
    chosen = torch.full((len(rows), k), -1, dtype=torch.int32, device=rows.device)
    TOP_K(
        logits=rows,
        rowStarts=torch.zeros_like(ends),
        rowEnds=ends,
        indices=chosen,
        values=None,
        numRows=len(rows),
        stride0=rows.stride(0),
        stride1=rows.stride(1),
        k=k,
    )
    found = rows.gather(1, chosen.clamp(min=0).long())
    found.masked_fill_(chosen < 0, -torch.inf)
    # Adding zero turns −0 into +0. Chosen ones of −∞ stand before what was not chosen already, and a stable sort keeps that.
    order = (found + 0.0).sort(dim=1, descending=True, stable=True).indices
    return chosen.gather(1, order).long().view(*shape, k)
