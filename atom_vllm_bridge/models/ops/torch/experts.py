"""Routed experts: y[t] = Σ_k weight[t, k] · w2_e · swiglu(w13_e · x[t]),  e = experts[t, k]."""

import torch
import torch.nn.functional as F

from atom_vllm_bridge.models.ops.torch.swiglu import swiglu

# Up to so many bytes of weights, copying the chosen experts' beats visiting every expert.
COPIED_BYTES = 16 << 20


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
        w13: [E, 2 · I, d], gate above up.
        w2: [E, d, I].
        limit: of the clamp in `swiglu`.

    Returns:
        [T, d] float32.
    """
    tokens, k = chosen.shape
    expert = chosen.flatten()
    if expert.numel() * w13[0].numel() * w13.element_size() <= COPIED_BYTES:
        rows = x.unsqueeze(1).expand(-1, k, -1).reshape(tokens * k, 1, -1)
        hidden = torch.bmm(rows, w13.index_select(0, expert).transpose(1, 2))
        hidden = swiglu(hidden, limit)
        y = torch.bmm(hidden, w2.index_select(0, expert).transpose(1, 2))
    else:
        order = expert.argsort(stable=True)
        count = torch.zeros(w13.shape[0], dtype=torch.int32, device=x.device)
        count.scatter_add_(0, expert, torch.ones_like(expert, dtype=torch.int32))
        end = count.cumsum(0, dtype=torch.int32)
        hidden = F.grouped_mm(x[order // k], w13.transpose(1, 2), offs=end)
        hidden = swiglu(hidden, limit)
        grouped = F.grouped_mm(hidden, w2.transpose(1, 2), offs=end)
        y = torch.empty_like(grouped).index_copy_(0, order, grouped)
    return torch.bmm(weights.unsqueeze(1), y.view(tokens, k, -1).float()).squeeze(1)
