"""Stand-in for the kernel of vllm.v1.worker.gpu.structured_outputs."""

import functools
from typing import Any

import numpy as np
import torch


def _apply_grammar_bitmask(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    logits_indices_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
    bitmask_ptr: torch.Tensor,
    bitmask_stride: int,
    vocab_size: int,
    MASK_STRIDE: int,
    BLOCK_SIZE: int,
    *,
    grid: tuple[int, ...],
    **options: Any,
) -> None:
    """Set the logits of tokens that the grammar forbids to −∞.

    Mask m is for position p of request b, where logits_indices[m] = b · MASK_STRIDE
    + p; one past the request's logits is dropped.

    Args:
        logits_ptr: [logits, vocabulary].
        bitmask_ptr: [M, ⌈vocabulary / 32⌉] int32, bit 0 of word 0 for token 0; a
            clear bit forbids.
    """
    count = grid[0]
    requests, positions = np.divmod(logits_indices_ptr.numpy()[:count], MASK_STRIDE)
    cu_logits = cu_num_logits_ptr.numpy()
    rows = cu_logits[requests] + positions
    active = rows < cu_logits[requests + 1]
    width = min(vocab_size, grid[1] * BLOCK_SIZE)
    forbidden = np.unpackbits(
        (~bitmask_ptr.numpy()[:count]).astype("<i4", copy=False).view(np.uint8),
        axis=1,
        count=width,
        bitorder="little",
    ).view(np.bool_)
    # As integers of the same width, for numpy knows no bfloat16.
    integer, minus_infinity = _minus_infinity(logits_ptr.dtype)
    logits = logits_ptr.view(integer).numpy()
    for row, mask in zip(rows[active].tolist(), forbidden[active], strict=True):
        np.copyto(logits[row, :width], minus_infinity, where=mask)


@functools.cache
def _minus_infinity(dtype: torch.dtype) -> tuple[torch.dtype, int]:
    integer = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    return integer, int(torch.tensor(float("-inf"), dtype=dtype).view(integer))


OVERRIDES = {
    "vllm.v1.worker.gpu.structured_outputs._apply_grammar_bitmask_kernel": (
        _apply_grammar_bitmask
    ),
}
