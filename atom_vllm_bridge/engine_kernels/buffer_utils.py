"""Stand-in for the kernel of vllm.v1.worker.gpu.buffer_utils."""

import ctypes
from typing import Any

import numpy as np
import torch

# Beyond so many elements a write, one slice copy a write is faster than one indexed
# copy for all of them.
LONG_WRITE = 32


def _apply_write(
    output_ptr: torch.Tensor,
    output_stride: int | torch.Tensor,
    write_indices_ptr: torch.Tensor,
    write_starts_ptr: torch.Tensor,
    write_contents_ptr: torch.Tensor,
    write_cu_lens_ptr: torch.Tensor,
    write_group_ids_ptr: torch.Tensor | None,
    BLOCK_SIZE: int,
    MULTI_GROUP: bool,
    *,
    grid: tuple[int, ...],
    **options: Any,
) -> None:
    """Write W staged pieces, each into a row from a start on; a later one wins.

    Args:
        output_ptr: [rows, stride] or [rows]; with MULTI_GROUP the uint64 addresses
            [groups] of int32 tensors.
        output_stride: elements from row to row; with MULTI_GROUP int64 [groups].
        write_indices_ptr, write_starts_ptr: [W], row and first element.
        write_contents_ptr: the pieces, one after another.
        write_cu_lens_ptr: [W], where each piece ends in them.
        write_group_ids_ptr: [W], with MULTI_GROUP.
    """
    count = grid[0]
    ends = write_cu_lens_ptr.numpy()[:count]
    begins = np.zeros_like(ends)
    begins[1:] = ends[:-1]
    rows = write_indices_ptr.numpy()[:count].astype(np.int64)
    starts = write_starts_ptr.numpy()[:count]
    if MULTI_GROUP:
        assert isinstance(output_stride, torch.Tensor)
        assert write_group_ids_ptr is not None
        assert write_contents_ptr.dtype == torch.int32
        groups = write_group_ids_ptr.numpy()[:count]
        places = rows * output_stride.numpy()[groups] + starts
        targets = output_ptr.view(torch.int64).numpy()[groups] + 4 * places
        sources = write_contents_ptr.data_ptr() + 4 * begins.astype(np.int64)
        sizes = 4 * (ends - begins)
        for target, source, size in zip(
            targets.tolist(), sources.tolist(), sizes.tolist(), strict=True
        ):
            ctypes.memmove(target, source, size)
        return
    output = output_ptr.view(-1).numpy()
    contents = write_contents_ptr.numpy()
    places = rows * output_stride + starts
    total = int(ends[-1])
    if total <= LONG_WRITE * count:
        index = (places - begins).repeat(ends - begins)
        index += np.arange(total)
        output[index] = contents[:total]
        return
    for place, begin, end in zip(
        places.tolist(), begins.tolist(), ends.tolist(), strict=True
    ):
        output[place : place + end - begin] = contents[begin:end]


OVERRIDES = {"vllm.v1.worker.gpu.buffer_utils._apply_write_kernel": _apply_write}
