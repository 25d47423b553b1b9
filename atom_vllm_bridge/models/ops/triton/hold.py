"""ops/torch/hold.py: kept as it comes."""

from collections.abc import Sequence

import torch

from atom_vllm_bridge.models.quantization.kept import Kept


def hold(
    outputs: Sequence[int],
    inputs: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    count: int | None = None,
    by_output: bool = False,
) -> Kept:
    return Kept(outputs, inputs, count, dtype, device)
