"""ops/torch/grouped_output_projection.py on panels, for few rows."""

import torch

from atom_vllm_bridge.models.ops.numba.linear import by_panels, takes
from atom_vllm_bridge.models.ops.torch import grouped_output_projection as reference


def grouped_output_projection(
    o: torch.Tensor, wo_a: torch.Tensor, wo_b: torch.Tensor
) -> torch.Tensor:
    packed = wo_a.dim() == 4 and wo_b.dim() == 3
    if not packed or not takes(o, wo_a) or not takes(o, wo_b):
        return reference.grouped_output_projection(o, wo_a, wo_b)
    low = by_panels(o.flatten(1), wo_a)
    groups, rank = wo_a.shape[0], wo_b.shape[1] // wo_a.shape[0]
    if low.shape[1] > groups * rank:
        low = low.unflatten(1, (groups, -1))[..., :rank].flatten(1)
    return by_panels(low, wo_b).to(o.dtype)
