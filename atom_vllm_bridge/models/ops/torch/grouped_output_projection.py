"""Output projection in groups of heads: y_g = o_g · Aᵍᵀ for each group, then all groups together through B."""

import torch

from atom_vllm_bridge.models.ops import panels
from atom_vllm_bridge.models.ops.torch.linear import linear
from atom_vllm_bridge.models.quantization.kept import Kept


def grouped_output_projection(
    o: torch.Tensor, wo_a: torch.Tensor | Kept, wo_b: torch.Tensor | Kept
) -> torch.Tensor:
    """Project attention's output.

    Args:
        o: [T, H, D].
        wo_a: [G, rank, H · D / G], or the [G, P, H · D / G, WIDTH] panels of its transpose (ops/panels.py), or that as a GPU
            keeps it (quantization/kept.py).
        wo_b: [G · rank, d], input by input, or the panels of that, or as a GPU keeps it.

    Returns:
        [T, d] in o's dtype; of panels all their columns, the last of which may be filling.
    """
    groups, inputs = wo_a.shape[0], wo_b.shape[-2]
    if isinstance(wo_a, Kept):
        wo_a = wo_a.plain(o.dtype).mT
    elif wo_a.dim() == 4:
        wo_a = panels.join(wo_a)[..., : inputs // groups].transpose(1, 2).to(o.dtype)
    grouped = o.reshape(o.shape[0], groups, -1).transpose(0, 1)
    low = torch.bmm(grouped, wo_a.transpose(1, 2)).transpose(0, 1)
    return linear(low.flatten(1), wo_b)
