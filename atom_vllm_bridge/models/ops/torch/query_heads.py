"""Queries from their projection: each head normed without weight, and rotated."""

import torch

from atom_vllm_bridge.models.ops.torch.rms_norm import rms_norm
from atom_vllm_bridge.models.ops.torch.rope import rope


def query_heads(
    x: torch.Tensor, heads: int, eps: float, rotation: torch.Tensor | None
) -> torch.Tensor:
    """Make queries.

    Args:
        x: [T, H · D]; may be changed.
        heads: H.
        eps: of the norm.
        rotation: [T, P] complex64, of the last 2 · P values of each head; None: not rotated.

    Returns:
        [T, H, D] float32.
    """
    query = rms_norm(x.float().unflatten(-1, (heads, -1)), None, eps)
    return query if rotation is None else rope(query, rotation)
