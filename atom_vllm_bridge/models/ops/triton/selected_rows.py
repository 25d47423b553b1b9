"""ops/torch/selected_rows.py in one kernel."""

import torch
import triton
import triton.language as tl

from atom_vllm_bridge.models.ops.blocks import Blocks
from atom_vllm_bridge.models.ops.torch import selected_rows as reference
from atom_vllm_bridge.models.ops.triton.block_table import known, row_id

MOST = 1024


@triton.jit(do_not_specialize=["width", "k"])
def _selected_rows(
    table,
    request,
    selected,
    ids,
    hidden,
    to_request,
    width,
    pitch,
    k,
    PER_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    query = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < k
    at = query * k + place
    entry = tl.load(selected + at, mask=inside, other=-1)
    row = tl.maximum(entry, 0).to(tl.int32)
    owner = tl.load(request + query)
    id = row_id(table, to_request, width, owner, row, inside, PER_BLOCK, pitch, 1)
    tl.store(ids + at, id, mask=inside)
    tl.store(hidden + at, (entry < 0).to(tl.uint8), mask=inside)


def selected_rows(
    blocks: Blocks, request: torch.Tensor, selected: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    if not known(blocks):
        return reference.selected_rows(blocks, request, selected)
    selected = selected.contiguous()
    queries, k = selected.shape
    ids = torch.empty_like(selected)
    hidden = selected.new_empty(queries, 1, k, dtype=torch.bool)
    if ids.numel():
        block = min(MOST, triton.next_power_of_2(k))
        _selected_rows[(queries, triton.cdiv(k, block))](
            blocks.table,
            request.contiguous(),
            selected,
            ids,
            hidden.view(torch.uint8),
            blocks.table.stride(0),
            blocks.table.shape[1],
            blocks.pitch,
            k,
            PER_BLOCK=blocks.per_block,
            BLOCK=block,
            num_warps=4,
        )
    return ids, hidden
