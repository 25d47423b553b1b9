"""Stand-in for the kernel of vllm.v1.worker.gpu.metrics.logits."""

from typing import Any

import torch


def _num_nans(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    num_nans_ptr: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
    *,
    grid: tuple[int, ...],
    **options: Any,
) -> None:
    """Count the NaNs in each row of logits [B, vocabulary]."""
    rows = logits_ptr[: grid[0], :vocab_size]
    num_nans_ptr[: grid[0]] = rows.isnan().sum(-1)


OVERRIDES = {"vllm.v1.worker.gpu.metrics.logits._num_nans_kernel": _num_nans}
