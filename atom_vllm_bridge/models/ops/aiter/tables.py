"""Angles as aiter takes them: positions, and a table of cosines and one of sines by position.

This project hands ops an angle for each row. A table with a row for each row, and positions 0, 1, 2 …, says the same.
"""

import torch


def tables(
    rotation: torch.Tensor, cos: str = "cos", sin: str = "sin"
) -> dict[str, torch.Tensor]:
    """Arguments for rotations [T, P] complex64: `positions` [T] int64, and the tables [T, P] bfloat16 by the names `cos` and `sin`."""
    return {
        "positions": torch.arange(rotation.shape[0], device=rotation.device),
        cos: rotation.real.to(torch.bfloat16).contiguous(),
        sin: rotation.imag.to(torch.bfloat16).contiguous(),
    }
