"""ops/torch/query_heads.py in one call."""

import numpy as np
import torch

from atom_vllm_bridge.models.ops.numba.few import compiled, few
from atom_vllm_bridge.models.ops.numba.rms_norm import NO_WEIGHT, norm_rows
from atom_vllm_bridge.models.ops.numba.rope import turn
from atom_vllm_bridge.models.ops.torch import query_heads as reference


@compiled()
def _query_heads(x, eps, rotation, out):
    tokens, heads, d = out.shape
    norm_rows(x.reshape(tokens * heads, d), NO_WEIGHT, eps, out.reshape(tokens * heads, d))
    turn(out, rotation, np.float32(1))


def query_heads(
    x: torch.Tensor, heads: int, eps: float, rotation: torch.Tensor | None
) -> torch.Tensor:
    wide = x.float().contiguous()
    if rotation is None or not few(wide):
        return reference.query_heads(x, heads, eps, rotation)
    out = wide.new_empty(x.shape[0], heads, x.shape[1] // heads)
    _query_heads(wide.numpy(), eps, rotation.numpy(), out.numpy())
    return out
