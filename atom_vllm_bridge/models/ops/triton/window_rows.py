"""ops/torch/window_rows.py in one kernel: a program has a stretch of a tile's keys, and says of each which queries do not see it."""

import torch
import triton
import triton.language as tl

from atom_vllm_bridge.models.ops.blocks import Blocks
from atom_vllm_bridge.models.ops.torch import window_rows as reference
from atom_vllm_bridge.models.ops.triton.block_table import known, row_id

MOST = 256


@triton.jit(do_not_specialize=["width", "queries"])
def _window_rows(
    table,
    request,
    start,
    last,
    visible_from,
    ids,
    hidden,
    to_request,
    width,
    pitch,
    queries,
    window,
    PER_BLOCK: tl.constexpr,
    REPLAYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    keys = queries + window - 1
    step = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = step < keys
    owner = tl.load(request + tile)
    first = tl.full((), 0, tl.int64)
    if REPLAYS:
        first = tl.load(visible_from + owner)
    position = tl.load(start + tile) + step - (window - 1)
    row = tl.minimum(tl.maximum(position, first), tl.load(last + tile))
    id = row_id(table, to_request, width, owner, row, inside, PER_BLOCK, pitch, 1)
    tl.store(ids + tile * keys + step, id, mask=inside)
    to = hidden + tile * queries * keys + step
    for query in range(queries):
        outside = (step < query) | (step > query + window - 1) | (position < first)
        tl.store(to + query * keys, outside.to(tl.uint8), mask=inside)


def window_rows(
    blocks: Blocks,
    request: torch.Tensor,
    start: torch.Tensor,
    last: torch.Tensor,
    visible_from: torch.Tensor | None,
    queries: int,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    if not known(blocks):
        return reference.window_rows(
            blocks, request, start, last, visible_from, queries, window
        )
    tiles, keys = len(start), queries + window - 1
    ids = start.new_empty(tiles, keys)
    hidden = start.new_empty(tiles, queries, keys, dtype=torch.bool)
    if ids.numel():
        block = min(MOST, triton.next_power_of_2(keys))
        _window_rows[(tiles, triton.cdiv(keys, block))](
            blocks.table,
            request.contiguous(),
            start.contiguous(),
            last.contiguous(),
            start if visible_from is None else visible_from.contiguous(),
            ids,
            hidden.view(torch.uint8),
            blocks.table.stride(0),
            blocks.table.shape[1],
            blocks.pitch,
            queries,
            window,
            PER_BLOCK=blocks.per_block,
            REPLAYS=visible_from is not None,
            BLOCK=block,
            num_warps=4,
        )
    return ids, hidden
