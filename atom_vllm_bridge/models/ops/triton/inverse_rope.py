"""ops/torch/inverse_rope.py in one kernel: `rope` by the negative angles."""

import torch

from atom_vllm_bridge.models.ops.torch import inverse_rope as reference
from atom_vllm_bridge.models.ops.triton.rope import turn


def inverse_rope(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    return x if turn(x, rotation, -1) else reference.inverse_rope(x, rotation)
