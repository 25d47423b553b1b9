"""Make room for a matrix that will be loaded, or for several of one shape."""

from collections.abc import Sequence

import torch
from torch import nn

from atom_vllm_bridge.models.quantization.kept import Kept


def hold(
    outputs: Sequence[int],
    inputs: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    count: int | None = None,
    by_output: bool = False,
) -> nn.Parameter | Kept:
    """Make room.

    Args:
        outputs: of matrices that lie side by side, those together of which a checkpoint stores all in one format.
        inputs: a.
        dtype: of values that are not quantised.
        count: how many; None: one, without a dimension for it.
        by_output: whether a parameter is stored output by output.

    Returns:
        A parameter [a, b], or [count, a, b], of `dtype`, into which values are dequantised; with `by_output`, [.., b, a]. Or
        what keeps them as they come (quantization/kept.py); all ops that multiply with a matrix take both.
    """
    one = (sum(outputs), inputs) if by_output else (inputs, sum(outputs))
    shape = one if count is None else (count, *one)
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
