"""ops/torch/query_heads.py in one call, in place: with many tokens torch's copies would cost more than its threads gain."""

import numpy as np
import torch

from atom_vllm_bridge.models.ops.numba.few import compiled
from atom_vllm_bridge.models.ops.numba.rms_norm import NO_WEIGHT, norm_rows
from atom_vllm_bridge.models.ops.numba.rope import turn
from atom_vllm_bridge.models.ops.torch import query_heads as reference


@compiled()
def norm_and_turn(x, eps, rotation):
    for t in range(x.shape[0]):
        norm_rows(x[t], NO_WEIGHT, eps, x[t])
        turn(x[t : t + 1], rotation[t : t + 1], np.float32(1))


def query_heads(
    x: torch.Tensor, heads: int, eps: float, rotation: torch.Tensor | None
) -> torch.Tensor:
    if rotation is None or not x.is_cpu or x.requires_grad:
        return reference.query_heads(x, heads, eps, rotation)
    query = x.float().contiguous().view(x.shape[0], heads, -1)
    norm_and_turn(query.numpy(), eps, rotation.numpy())
    return query
