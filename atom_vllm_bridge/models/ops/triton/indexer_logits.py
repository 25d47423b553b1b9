"""ops/torch/indexer_logits.py in one kernel: products of all heads are weighed and summed where they arise.

A program reads a block of a tile's entries once and scores it for the tile's queries, one after another; where tiles and
blocks are too few to fill the device, queries are spread over programs too. How many entries there may be is a limit that the
host knows; blocks that no query of a tile sees are left out, so that a step of a graph captured for more costs what it reads.

Where rows are not float32, the product is of bfloat16 with float32 sums.
"""

import torch
import triton
import triton.language as tl

from atom_vllm_bridge.models.ops.gradients import trained
from atom_vllm_bridge.models.ops.torch import indexer_logits as reference
from atom_vllm_bridge.models.ops.triton.stored_rows import (
    begin,
    format_of,
    layout,
    product_type,
    read_rows,
    readable,
)
from atom_vllm_bridge.models.quantization.kv_codecs import RowCodec

# Programs to have before entries and queries are cut no finer.
PROGRAMS = 264
# Launch hints by what is multiplied: entries a block where there are many and where few, heads a block, warps, stages.
HINTS = {
    tl.float32: (16, 16, 16, 4, 1),
    tl.bfloat16: (128, 32, 64, 4, 2),
}


def indexer_logits(
    query: torch.Tensor,
    weight: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
    codec: RowCodec,
    available: torch.Tensor,
) -> torch.Tensor:
    if (
        trained(query, weight)
        or query.dtype != torch.float32
        or weight.dtype != torch.float32
        or not readable(rows, codec)
    ):
        return reference.indexer_logits(query, weight, rows, ids, codec, available)
    tiles, queries, heads, _ = query.shape
    entries = ids.shape[1]
    out = query.new_empty(tiles, queries, entries)
    if out.numel() == 0:
        return out
    product = product_type(_score, codec)
    many, few, most_heads, warps, stages = HINTS[product]
    block_e = many if tiles * triton.cdiv(entries, many) >= PROGRAMS else few
    programs = tiles * triton.cdiv(entries, block_e)
    per_program = triton.cdiv(queries, triton.cdiv(PROGRAMS, programs))
    where = layout(rows)
    _score[(programs // tiles, tiles, triton.cdiv(queries, per_program))](
        query.contiguous(),
        weight.contiguous(),
        rows,
        ids.contiguous(),
        available.contiguous(),
        out,
        queries,
        entries,
        per_program,
        where["block_stride"],
        HEADS=heads,
        PRODUCT=product,
        PER_BLOCK=where["PER_BLOCK"],
        ROW_STRIDE=where["ROW_STRIDE"],
        UNIT=where["UNIT"],
        BLOCK_E=block_e,
        BLOCK_Q=triton.next_power_of_2(queries),
        BLOCK_H=min(most_heads, max(16, triton.next_power_of_2(heads))),
        num_warps=warps,
        num_stages=stages,
        **format_of(codec),
    )
    return out


@triton.jit(do_not_specialize=["queries", "entries", "per_program"])
def _score(
    query,
    weight,
    rows,
    ids,
    available,
    out,
    queries,
    entries,
    per_program,
    block_stride,
    HEADS: tl.constexpr,
    PRODUCT: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    UNIT: tl.constexpr,
    FORMAT: tl.constexpr,
    DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    tile = tl.program_id(1).to(tl.int64)
    query_of_tile = tl.arange(0, BLOCK_Q)
    seen = tl.load(
        available + tile * queries + query_of_tile,
        mask=query_of_tile < queries,
        other=0,
    )
    if tl.program_id(0) * BLOCK_E >= tl.max(seen):
        return
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    inside = e < entries
    key_ids = tl.load(ids + tile * entries + e, mask=inside, other=0)
    key_at = tl.where(
        inside, begin(key_ids, block_stride, PER_BLOCK, ROW_STRIDE, UNIT), -1
    )
    key = read_rows(rows, key_at, UNIT, FORMAT, DIM, ROPE_DIM, BLOCK_D).to(PRODUCT)
    column = tl.arange(0, BLOCK_D)
    first = tl.program_id(2) * per_program
    for q in range(first, tl.minimum(first + per_program, queries)):
        at = tile * queries + q
        score = tl.zeros((BLOCK_E,), tl.float32)
        for head_ in tl.static_range(0, HEADS, BLOCK_H):
            head = head_ + tl.arange(0, BLOCK_H)
            x = tl.load(
                query + (at * HEADS + head)[:, None] * DIM + column[None, :],
                mask=(head < HEADS)[:, None] & (column < DIM)[None, :],
                other=0.0,
            )
            w = tl.load(weight + at * HEADS + head, mask=head < HEADS, other=0.0)
            part = tl.dot(key, tl.trans(x.to(PRODUCT)), input_precision="ieee")
            score += tl.sum(tl.maximum(part, 0.0) * w[None, :], 1)
        tl.store(out + at * entries + e, score, mask=inside)
