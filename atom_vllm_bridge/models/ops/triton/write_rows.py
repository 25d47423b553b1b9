"""ops/torch/write_rows.py in one kernel, which leaves the rows of negative ids out instead of writing back what they held."""

import torch
import triton
import triton.language as tl

from atom_vllm_bridge.models.ops.rows import pitch
from atom_vllm_bridge.models.ops.torch import write_rows as reference

BLOCK = 512


@triton.jit
def row_offset(id, per_block, to_block, to_row):
    """Elements from the start of a cache to its row `id`, an int64 that is not negative."""
    return id // per_block * to_block + id % per_block * to_row


@triton.jit
def _write_rows(
    rows,
    ids,
    values,
    width,
    to_value,
    per_block,
    to_block,
    to_row,
    BLOCK: tl.constexpr,
):
    m = tl.program_id(0).to(tl.int64)
    id = tl.load(ids + m)
    if id < 0:
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(values + m * to_value + column, mask=column < width)
    at = rows + row_offset(id, per_block, to_block, to_row)
    tl.store(at + column, value, mask=column < width)


def write_rows(rows: torch.Tensor, ids: torch.Tensor, values: torch.Tensor) -> None:
    if rows.stride(2) != 1 or values.stride(-1) != 1:
        reference.write_rows(rows, ids, values)
    elif values.numel():
        width = values.shape[1]
        _write_rows[(len(ids), triton.cdiv(width, BLOCK))](
            rows,
            ids.contiguous(),
            values,
            width,
            values.stride(0),
            pitch(rows),
            rows.stride(0),
            rows.stride(1),
            BLOCK=BLOCK,
            num_warps=4,
        )
