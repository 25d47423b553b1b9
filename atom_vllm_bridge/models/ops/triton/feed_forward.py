"""ops/torch/feed_forward.py by the ops of this folder."""

import torch

from atom_vllm_bridge.models.ops.torch import feed_forward as reference
from atom_vllm_bridge.models.ops.triton.linear import linear
from atom_vllm_bridge.models.ops.triton.products import takes
from atom_vllm_bridge.models.ops.triton.swiglu import swiglu
from atom_vllm_bridge.models.quantization.kept import Kept


def feed_forward(
    x: torch.Tensor, w13: torch.Tensor | Kept, w2: torch.Tensor | Kept, limit: float
) -> torch.Tensor:
    if not takes(x, w13, w2):
        return reference.feed_forward(x, w13, w2, limit)
    return linear(swiglu(linear(x, w13), limit), w2)
