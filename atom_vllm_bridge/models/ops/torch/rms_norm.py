"""Root-mean-square norm: x / √(mean(x²) + ε) · weight, over the last axis."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Normalise `x`.

    Args:
        x: [..., d].
        weight: [d] float32, or None for a norm without weight (query heads).
        eps: added to the mean square.

    Returns:
        [..., d] in x's dtype; arithmetic in float32.
    """
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y.mul_(weight)
    return y.to(x.dtype)
