"""Norm, rotate and store keys, which are values too: raw ones of tokens, and compressed entries."""

import torch

from atom_vllm_bridge.models.ops.torch.rms_norm import rms_norm
from atom_vllm_bridge.models.ops.torch.rope import rope
from atom_vllm_bridge.models.ops.torch.write_rows import write_rows
from atom_vllm_bridge.models.quantization.kv_codecs import RowCodec


def write_keys(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    rotation: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
    codec: RowCodec,
) -> None:
    """Store keys.

    Args:
        x: [M, D], before the norm.
        weight: [D] float32, of the norm.
        eps: of the norm.
        rotation: [M, P] complex64, of the last 2 · P values.
        rows, ids: where to, as in `write_rows`.
        codec: of the rows.
    """
    key = rope(rms_norm(x.float(), weight, eps), rotation)
    write_rows(rows, ids, codec.encode(key))
