"""ops/torch/write_inputs.py in one kernel: inputs are read once, widened, and stored with the bias where the cache keeps them.

A program takes a slice of one token's columns; a token without a row costs nothing more.
"""

import torch
import triton
import triton.language as tl

from atom_vllm_bridge.models.ops.gradients import trained
from atom_vllm_bridge.models.ops.rows import pitch
from atom_vllm_bridge.models.ops.torch import write_inputs as reference
from atom_vllm_bridge.models.ops.triton.write_rows import row_offset

BLOCK = 512


@triton.jit
def _write_inputs(
    inputs,
    ape,
    phase,
    rows,
    ids,
    half,
    to_token,
    per_block,
    to_block,
    to_row,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    id = tl.load(ids + token)
    if id < 0:
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < 2 * half
    value = tl.load(inputs + token * to_token + column, mask=live, other=0.0)
    bias = tl.load(
        ape + tl.load(phase + token) * half + column - half,
        mask=live & (column >= half),
        other=0.0,
    )
    at = rows + row_offset(id, per_block, to_block, to_row)
    tl.store(at + column, value.to(tl.float32) + bias, mask=live)


def write_inputs(
    inputs: torch.Tensor,
    ape: torch.Tensor,
    phase: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
) -> None:
    if rows.stride(2) != 1 or inputs.stride(1) != 1 or trained(inputs, ape):
        reference.write_inputs(inputs, ape, phase, rows, ids)
    elif inputs.numel():
        tokens, width = inputs.shape
        _write_inputs[(tokens, triton.cdiv(width, BLOCK))](
            inputs,
            ape,
            phase.contiguous(),
            rows,
            ids.contiguous(),
            width // 2,
            inputs.stride(0),
            pitch(rows),
            rows.stride(0),
            rows.stride(1),
            BLOCK=BLOCK,
            num_warps=2,
        )
