"""ops/torch/block_rows.py in one kernel: a program has a stretch of a block's keys, the same for all of its queries."""

import torch
import triton
import triton.language as tl

from atom_vllm_bridge.models.ops.blocks import Blocks
from atom_vllm_bridge.models.ops.torch import block_rows as reference
from atom_vllm_bridge.models.ops.triton.block_table import known, row_id

MOST = 256


@triton.jit(do_not_specialize=["width", "queries"])
def _block_rows(
    table,
    request,
    start,
    seq_lens,
    ids,
    hidden,
    to_request,
    width,
    pitch,
    queries,
    window,
    PER_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    draft = tl.program_id(0).to(tl.int64)
    keys = queries + window
    step = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = step < keys
    owner = tl.load(request + draft)
    end = tl.load(seq_lens + owner).to(tl.int64)
    position = tl.load(start + draft) + step - window
    row = tl.minimum(tl.maximum(position, 0), tl.maximum(end - 1, 0))
    id = row_id(table, to_request, width, owner, row, inside, PER_BLOCK, pitch, 1)
    tl.store(ids + draft * keys + step, id, mask=inside)
    outside = ((position < 0) | (position >= end)).to(tl.uint8)
    to = hidden + draft * queries * keys + step
    for query in range(queries):
        tl.store(to + query * keys, outside, mask=inside)


def block_rows(
    blocks: Blocks,
    request: torch.Tensor,
    start: torch.Tensor,
    seq_lens: torch.Tensor,
    queries: int,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    if not known(blocks):
        return reference.block_rows(blocks, request, start, seq_lens, queries, window)
    drafts, keys = len(start), queries + window
    ids = start.new_empty(drafts, keys)
    hidden = start.new_empty(drafts, queries, keys, dtype=torch.bool)
    if ids.numel():
        block = min(MOST, triton.next_power_of_2(keys))
        _block_rows[(drafts, triton.cdiv(keys, block))](
            blocks.table,
            request.contiguous(),
            start.contiguous(),
            seq_lens.contiguous(),
            ids,
            hidden.view(torch.uint8),
            blocks.table.stride(0),
            blocks.table.shape[1],
            blocks.pitch,
            queries,
            window,
            PER_BLOCK=blocks.per_block,
            BLOCK=block,
            num_warps=4,
        )
    return ids, hidden
