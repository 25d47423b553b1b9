"""Attention's output: rotated back, then projected in groups of heads, and all groups together."""

from typing import Any, Protocol

import torch


class Output(Protocol):
    """The parts of attention that make its output; `Attention` (models/deepseek_v4/attention.py) has them."""

    inverse_rope: Any
    grouped_output_projection: Any
    wo_a: Any
    wo_b: Any


def attention_output(
    attention: Output, o: torch.Tensor, rotation: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Rotate back and project; the parts run the ops that they were built with.

    Args:
        attention: the parts, with their matrices.
        o: [T, H, D] float32, which may be changed.
        rotation: [T, P] complex64, at the queries' positions.
        dtype: of the projection.

    Returns:
        [T, d] in `dtype`, as `grouped_output_projection`.
    """
    o = attention.inverse_rope(o, rotation).to(dtype)
    return attention.grouped_output_projection(o, attention.wo_a, attention.wo_b)
