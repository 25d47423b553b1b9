"""ops/torch/compressor_pool.py in one kernel: a program holds all K sources of a slice of an entry's channels, and reads each once.

What lies before the start of the sequence is not read at all.
"""

import torch
import triton
import triton.language as tl

from atom_vllm_bridge.models.ops.gradients import trained
from atom_vllm_bridge.models.ops.rows import pitch
from atom_vllm_bridge.models.ops.torch import compressor_pool as reference
from atom_vllm_bridge.models.ops.triton.write_rows import row_offset

# Values of one kind that a program holds.
HELD = 4096


@triton.jit
def _compressor_pool(
    state,
    ids,
    unseen,
    out,
    sources,
    dim,
    per_block,
    to_block,
    to_row,
    SOURCES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, SOURCES)
    real = k < sources
    seen = real & (tl.load(unseen + entry * sources + k, mask=real, other=1) == 0)
    id = ids + entry * 2 * sources + k
    kv = row_offset(tl.load(id, mask=seen, other=0), per_block, to_block, to_row)
    score = row_offset(
        tl.load(id + sources, mask=seen, other=0), per_block, to_block, to_row
    )
    mask = seen[:, None] & (column < dim)[None, :]
    weight = tl.load(
        state + score[:, None] + column[None, :], mask=mask, other=float("-inf")
    )
    value = tl.load(state + kv[:, None] + column[None, :], mask=mask, other=0.0)
    weight = tl.exp(weight - tl.max(weight, 0)[None, :])
    pooled = tl.sum(weight * value, 0) / tl.sum(weight, 0)
    tl.store(out + entry * dim + column, pooled, mask=column < dim)


def compressor_pool(
    state: torch.Tensor, ids: torch.Tensor, unseen: torch.Tensor
) -> torch.Tensor:
    if trained(state) or state.stride(2) != 1:
        return reference.compressor_pool(state, ids, unseen)
    entries, sources = unseen.shape
    dim = state.shape[2]
    out = torch.empty((entries, dim), dtype=torch.float32, device=state.device)
    if out.numel():
        held = triton.next_power_of_2(sources)
        block = max(16, min(128, HELD // held, triton.next_power_of_2(dim)))
        _compressor_pool[(entries, triton.cdiv(dim, block))](
            state,
            ids.contiguous(),
            unseen.contiguous().view(torch.uint8),
            out,
            sources,
            dim,
            pitch(state),
            state.stride(0),
            state.stride(1),
            SOURCES=held,
            BLOCK=block,
            num_warps=4,
        )
    return out
