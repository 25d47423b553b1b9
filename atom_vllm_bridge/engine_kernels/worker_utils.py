"""Stand-in for the kernel of vllm.v1.worker.utils."""

import ctypes
from typing import Any

import torch


def _zero_kv_blocks(
    seg_addrs_ptr: torch.Tensor,
    seg_block_strides_ptr: torch.Tensor,
    seg_page_sizes_ptr: torch.Tensor,
    block_ids_ptr: torch.Tensor,
    BLOCK_SIZE: int,
    *,
    grid: tuple[int, ...],
    **options: Any,
) -> None:
    """Zero blocks of the cache in every segment.

    The grid is (blocks, S segments, chunks of BLOCK_SIZE that cover a page). Strides
    and pages count elements of 4 bytes.

    Args:
        seg_addrs_ptr: [S] uint64, address of block 0.
        seg_block_strides_ptr, seg_page_sizes_ptr: [S] int64.
        block_ids_ptr: [blocks] int64.
    """
    num_blocks, num_segments, chunks = grid
    blocks = block_ids_ptr.tolist()[:num_blocks]
    for address, stride, page in zip(
        seg_addrs_ptr.tolist()[:num_segments],
        seg_block_strides_ptr.tolist()[:num_segments],
        seg_page_sizes_ptr.tolist()[:num_segments],
        strict=True,
    ):
        size = 4 * min(page, chunks * BLOCK_SIZE)
        for block in blocks:
            ctypes.memset(address + 4 * block * stride, 0, size)


OVERRIDES = {"vllm.v1.worker.utils._zero_kv_blocks_kernel": _zero_kv_blocks}
