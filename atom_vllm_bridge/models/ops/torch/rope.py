"""Rotary embedding on the tail of the last axis, interleaved: (x₂ᵢ, x₂ᵢ₊₁) is turned by the angle position · θᵢ."""

import torch


def rope(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rotate in place.

    Args:
        x: [T, ..., d] float32; the last 2 · P values of a row are rotated, the others kept.
        rotation: [T, P] complex64, e^(i · angle).

    Returns:
        `x`.
    """
    pairs = rotation.shape[-1]
    tail = x[..., x.shape[-1] - 2 * pairs :].unflatten(-1, (pairs, 2))
    between = (1,) * (x.dim() - 2)
    torch.view_as_complex(tail).mul_(rotation.view(-1, *between, pairs))
    return x
