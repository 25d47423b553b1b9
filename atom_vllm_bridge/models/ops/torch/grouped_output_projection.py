"""Output projection in groups of heads: y_g = o_g · Aᵍᵀ for each group, then all groups together through B."""

import torch


def grouped_output_projection(
    o: torch.Tensor, wo_a: torch.Tensor, wo_b: torch.Tensor
) -> torch.Tensor:
    """Project attention's output.

    Args:
        o: [T, H, D].
        wo_a: [G, rank, H · D / G].
        wo_b: [G · rank, d], input by input.

    Returns:
        [T, d].
    """
    groups = wo_a.shape[0]
    grouped = o.reshape(o.shape[0], groups, -1).transpose(0, 1)
    low = torch.bmm(grouped, wo_a.transpose(1, 2)).transpose(0, 1)
    return low.flatten(1) @ wo_b
