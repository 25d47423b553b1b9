"""Clamped SwiGLU: silu(min(gate, limit)) · clamp(up, ±limit)."""

import torch
import torch.nn.functional as F


def swiglu(hidden: torch.Tensor, limit: float) -> torch.Tensor:
    """Gate a projection.

    Args:
        hidden: [..., 2 · I], gate beside up.
        limit: of the clamp; infinity: none.

    Returns:
        [..., I] in hidden's dtype; arithmetic in float32.
    """
    gate, up = hidden.float().chunk(2, -1)
    gated = F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    return gated.to(hidden.dtype)
