"""ops/torch/entry_rows.py in one kernel: a program has a stretch of a tile's entries, and says of each which queries do not see it."""

import torch
import triton
import triton.language as tl

from atom_vllm_bridge.models.ops.blocks import Blocks
from atom_vllm_bridge.models.ops.torch import entry_rows as reference
from atom_vllm_bridge.models.ops.triton.block_table import known, row_id

MOST = 1024


@triton.jit(do_not_specialize=["width", "queries", "entries"])
def _entry_rows(
    table,
    request,
    start,
    last,
    ids,
    hidden,
    none,
    to_request,
    width,
    pitch,
    queries,
    entries,
    RATIO: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < entries
    owner = tl.load(request + tile)
    seen = (tl.load(last + tile) + 1) // RATIO
    if tl.program_id(1) == 0:
        tl.store(none + tile, (seen < 1).to(tl.uint8))
    # Entries are fewer than 2³¹, and division of 32 bits is several times as fast.
    row = tl.minimum(entry, tl.maximum(seen - 1, 0).to(tl.int32))
    id = row_id(table, to_request, width, owner, row, inside, PER_BLOCK, pitch, 1)
    tl.store(ids + tile * entries + entry, id, mask=inside)
    position = tl.load(start + tile)
    to = hidden + tile * queries * entries + entry
    for query in range(queries):
        outside = entry >= (position + query + 1) // RATIO
        tl.store(to, outside.to(tl.uint8), mask=inside)
        to += entries


def entry_rows(
    blocks: Blocks,
    request: torch.Tensor,
    start: torch.Tensor,
    last: torch.Tensor,
    queries: int,
    entries: int,
    ratio: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if not known(blocks):
        return reference.entry_rows(
            blocks, request, start, last, queries, entries, ratio
        )
    tiles = len(start)
    ids = start.new_empty(tiles, entries)
    hidden = start.new_empty(tiles, queries, entries, dtype=torch.bool)
    none = start.new_empty(tiles, 1, 1, dtype=torch.bool)
    if tiles:
        block = min(MOST, triton.next_power_of_2(max(1, entries)))
        _entry_rows[(tiles, max(1, triton.cdiv(entries, block)))](
            blocks.table,
            request.contiguous(),
            start.contiguous(),
            last.contiguous(),
            ids,
            hidden.view(torch.uint8),
            none.view(torch.uint8),
            blocks.table.stride(0),
            blocks.table.shape[1],
            blocks.pitch,
            queries,
            entries,
            RATIO=ratio,
            PER_BLOCK=blocks.per_block,
            BLOCK=block,
            num_warps=4,
        )
    return ids, hidden, none
