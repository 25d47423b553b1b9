"""Rotations of positions: e^(i · position · θ)."""

import torch


def rotations(positions: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
    """The rotations of all pairs at each position.

    Args:
        positions: int64 of any shape.
        theta: [P] float32, radians a token.

    Returns:
        [*positions.shape, P] complex64; the angles are float32 products.
    """
    angle = positions.unsqueeze(-1).float() * theta
    return torch.polar(torch.ones_like(angle), angle)
