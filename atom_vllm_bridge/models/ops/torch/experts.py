"""Routed experts: y[t] = Σ_k weight[t, k] · w2_e · swiglu(w13_e · x[t]),  e = experts[t, k].

A matrix times a vector is a sum of the matrix's columns, weighted by the vector, and columns can be read where they lie: with
the weights stored input by input, an embedding bag is the product of chosen matrices with vectors, and copies none of
them. With more rows, tokens are sorted by expert instead and every expert multiplies its own.
"""

import torch
import torch.nn.functional as F

from atom_vllm_bridge.models.ops.torch.swiglu import swiglu


def experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    limit: float,
) -> torch.Tensor:
    """Run each token through its experts.

    Args:
        x: [T, d].
        chosen: [T, k] int64.
        weights: [T, k] float32.
        w13: [E, d, 2 · I], for each input the gate's weights beside up's.
        w2: [E, I, d].
        limit: of the clamp in `swiglu`.

    Returns:
        [T, d] float32.
    """
    tokens, k = chosen.shape
    expert = chosen.flatten()
    if expert.numel() <= w13.shape[0]:
        hidden = swiglu(_apply(x.repeat_interleave(k, 0), expert, w13), limit)
        y = _apply(hidden, expert, w2)
    else:
        order = expert.argsort(stable=True)
        count = torch.zeros(w13.shape[0], dtype=torch.int32, device=x.device)
        count.scatter_add_(0, expert, torch.ones_like(expert, dtype=torch.int32))
        end = count.cumsum(0, dtype=torch.int32)
        hidden = swiglu(F.grouped_mm(x[order // k], w13, offs=end), limit)
        grouped = F.grouped_mm(hidden, w2, offs=end)
        y = torch.empty_like(grouped).index_copy_(0, order, grouped)
    return torch.bmm(weights.unsqueeze(1), y.view(tokens, k, -1).float()).squeeze(1)


def _apply(
    x: torch.Tensor, expert: torch.Tensor, matrices: torch.Tensor
) -> torch.Tensor:
    """x [M, a], expert [M], matrices [E, a, b] → [M, b]: row m times matrix expert[m]."""
    inputs = matrices.shape[1]
    row = torch.arange(inputs, device=x.device) + (expert * inputs).unsqueeze(1)
    return F.embedding_bag(
        row, matrices.flatten(0, 1), per_sample_weights=x, mode="sum"
    )
