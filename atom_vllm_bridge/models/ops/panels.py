"""Matrices cut into panels of columns, each in one piece, so that a product of few rows streams through memory.

A matrix [a, b], input by input, becomes [⌈b / WIDTH⌉, a, WIDTH], its last panel filled up with zeros; stacked matrices
[E, a, b] become [E, ⌈b / WIDTH⌉, a, WIDTH].
"""

import torch
import torch.nn.functional as F

from atom_vllm_bridge.models.quantization.kept import Kept

# Columns of a panel: one cache line of bfloat16.
WIDTH = 32


def cut(w: torch.Tensor) -> torch.Tensor:
    """[..., a, b] → [..., P, a, WIDTH]."""
    w = F.pad(w, (0, -w.shape[-1] % WIDTH))
    return w.unflatten(-1, (-1, WIDTH)).transpose(-2, -3).contiguous()


def join(panels: torch.Tensor) -> torch.Tensor:
    """[..., P, a, WIDTH] → [..., a, P · WIDTH], the filling included."""
    return panels.transpose(-2, -3).flatten(-2)


def columns(w: torch.Tensor | Kept, first: int, end: int) -> torch.Tensor | Kept:
    """Columns `first` … `end` − 1 of a matrix [a, b], plain, kept, or as panels [P, a, WIDTH]; of panels possibly some more after them."""
    if isinstance(w, Kept):
        return w.columns(first, end)
    if w.dim() == 2:
        return w[:, first:end]
    if first % WIDTH:
        return join(w)[:, first:end]
    return w[first // WIDTH : -(-end // WIDTH)]
