"""ops/torch/inverse_rope.py in one call."""

import numpy as np
import torch

from atom_vllm_bridge.models.ops.numba.few import few
from atom_vllm_bridge.models.ops.numba.rope import rows, turn
from atom_vllm_bridge.models.ops.torch import inverse_rope as reference


def inverse_rope(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    if not few(x):
        return reference.inverse_rope(x, rotation)
    turn(rows(x), rotation.numpy(), np.float32(-1))
    return x
