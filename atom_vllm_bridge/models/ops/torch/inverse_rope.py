"""Undo the rotation of attention's output: keys are also values, so a value brings the rotation of its own position.

Turning the output back by the query's angle leaves the value turned by its distance to the query.
"""

import torch

from atom_vllm_bridge.models.ops.torch.rope import rope


def inverse_rope(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rotate the tail of `x` [T, ..., d] float32 back, in place; `rotation` [T, P] complex64 at the queries' positions."""
    return rope(x, rotation.conj())
