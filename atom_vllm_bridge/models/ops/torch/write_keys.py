"""Norm, rotate and store keys, which are values too: raw ones of tokens, and compressed entries."""

from collections.abc import Callable

import torch

from atom_vllm_bridge.models.ops.torch.rms_norm import rms_norm
from atom_vllm_bridge.models.ops.torch.rope import rope
from atom_vllm_bridge.models.ops.torch.write_rows import write_rows


def write_keys(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    rotation: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
    encode: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Store keys.

    Args:
        x: [M, D], before the norm.
        weight: [D] float32, of the norm.
        eps: of the norm.
        rotation: [M, P] complex64, of the last 2 · P values.
        rows, ids: where to, as in `write_rows`.
        encode: float32 [M, D] → storage rows; for rows of float32 or bfloat16, D wide, rounding to that.
    """
    key = rope(rms_norm(x.float(), weight, eps), rotation)
    write_rows(rows, ids, encode(key))
