"""ops/torch/grouped_output_projection.py by two products with matrices that are kept as they came."""

import torch

from atom_vllm_bridge.models.ops.torch import grouped_output_projection as reference
from atom_vllm_bridge.models.ops.triton.linear import (
    few,
    few_rows,
    linear,
    unpacked,
)
from atom_vllm_bridge.models.ops.triton.products import takes
from atom_vllm_bridge.models.quantization.kept import Kept


def grouped_output_projection(
    o: torch.Tensor, wo_a: torch.Tensor | Kept, wo_b: torch.Tensor | Kept
) -> torch.Tensor:
    if not isinstance(wo_a, Kept) or not takes(o, wo_a, wo_b):
        return reference.grouped_output_projection(o, wo_a, wo_b)
    if few(o):
        low = few_rows(o.flatten(1), wo_a)
    else:
        groups = wo_a.shape[0]
        plain = unpacked(wo_a.bands[0], o.dtype).unflatten(0, (groups, -1))
        grouped = o.reshape(o.shape[0], groups, -1).transpose(0, 1)
        low = torch.bmm(grouped, plain.mT).transpose(0, 1).flatten(1)
    return linear(low, wo_b)
