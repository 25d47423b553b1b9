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
    y = y * inverse_rms(y, eps)
    if weight is not None:
        y = y.mul_(weight)
    return y.to(x.dtype)


def inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / √(mean(x²) + ε) over the last axis, which is kept: [..., d] → [..., 1]."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
