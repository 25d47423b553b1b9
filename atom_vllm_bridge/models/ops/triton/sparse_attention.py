"""ops/torch/sparse_attention.py without copies of keys: online softmax over blocks of keys that are read where they lie.

A program has one key block after another for a tile of (query, head) pairs, normally all heads of one query: keys are shared
by all heads, so they are read once. It skips the keys before the first and after the last that its query sees. Where there
are too few tiles to fill the device, the keys are split among programs, and a second kernel merges their sums.

Where rows are not float32, both products are of bfloat16 with float32 sums.
"""

import torch
import triton
import triton.language as tl

from atom_vllm_bridge.models.ops.gradients import trained
from atom_vllm_bridge.models.ops.torch import sparse_attention as reference
from atom_vllm_bridge.models.ops.torch.sparse_attention import Keys
from atom_vllm_bridge.models.ops.triton.stored_rows import (
    format_of,
    layout,
    product_type,
    read_rows,
    readable,
)
from atom_vllm_bridge.models.quantization.kv_codecs import RowCodec

# Programs to have before keys are no longer split, and splits at most.
PROGRAMS = 132
MOST_SPLITS = 64
# Launch hints by what is multiplied: most (query, head) pairs a tile, keys a block, warps, stages.
HINTS = {tl.float32: (16, 16, 8, 1), tl.bfloat16: (64, 64, 8, 2)}
# The same on AMD's, where larger tiles do not fit into registers (docs/amd-kernels.md).
AMD_HINTS = {tl.float32: (16, 16, 4, 1), tl.bfloat16: (16, 16, 4, 1)}
LOG2_E = tl.constexpr(1.4426950408889634)


def sparse_attention(
    query: torch.Tensor,
    sink: torch.Tensor,
    scale: float,
    window: Keys,
    compressed: Keys | None,
    codec: RowCodec,
) -> torch.Tensor:
    sources = (window,) if compressed is None else (window, compressed)
    if (
        trained(query, sink)
        or query.dtype != torch.float32
        or not all(readable(source.rows, codec) for source in sources)
    ):
        return reference.sparse_attention(query, sink, scale, window, compressed, codec)
    tiles, queries, heads, dim = query.shape
    pairs = queries * heads
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    product = product_type(_attend, codec)
    hints = HINTS if torch.version.hip is None else AMD_HINTS
    most_pairs, block_e, warps, stages = hints[product]
    block_m = min(most_pairs, max(16, triton.next_power_of_2(pairs)))
    programs = tiles * triton.cdiv(pairs, block_m)
    last = compressed if compressed is not None else window
    first_width = window.ids.shape[1]
    last_width = 0 if compressed is None else last.ids.shape[1]
    blocks = triton.cdiv(first_width, block_e) + triton.cdiv(last_width, block_e)
    splits = min(MOST_SPLITS, blocks, triton.cdiv(PROGRAMS, programs))
    per_split = triton.cdiv(blocks, max(splits, 1))
    splits = triton.cdiv(blocks, per_split) if blocks else 1

    query, sink = query.contiguous(), sink.contiguous()
    partial, state = out, out
    if splits > 1:
        partial = query.new_empty(splits, tiles * pairs, dim)
        state = query.new_empty(splits, 2, tiles * pairs)
    ids, hidden = window.ids.contiguous(), _bytes(window.hidden)
    ids2, hidden2 = last.ids.contiguous(), _bytes(last.hidden)
    rows, rows2 = layout(window.rows), layout(last.rows)
    _attend[(programs, splits)](
        query,
        sink,
        scale,
        window.rows,
        ids,
        hidden,
        first_width,
        hidden.stride(0),
        hidden.stride(1),
        rows["block_stride"],
        last.rows,
        ids2,
        hidden2,
        last_width,
        hidden2.stride(0),
        hidden2.stride(1),
        rows2["block_stride"],
        partial,
        state,
        tiles,
        pairs,
        per_split,
        HEADS=heads,
        PRODUCT=product,
        PER_BLOCK=rows["PER_BLOCK"],
        ROW_STRIDE=rows["ROW_STRIDE"],
        PER_BLOCK2=rows2["PER_BLOCK"],
        ROW_STRIDE2=rows2["ROW_STRIDE"],
        ONE_QUERY=queries == 1 or heads % block_m == 0,
        SPLIT=splits > 1,
        BLOCK_M=block_m,
        BLOCK_E=block_e,
        num_warps=warps,
        num_stages=stages,
        **format_of(codec),
    )
    if splits > 1:
        block_c = min(128, triton.next_power_of_2(dim))
        _merge[(tiles * pairs, triton.cdiv(dim, block_c))](
            partial,
            state,
            out,
            tiles * pairs,
            splits,
            DIM=dim,
            MOST_SPLITS=MOST_SPLITS,
            BLOCK_S=16,
            BLOCK_C=block_c,
            num_warps=4,
        )
    return out


def _bytes(hidden: torch.Tensor) -> torch.Tensor:
    if hidden.stride(2) != 1:
        hidden = hidden.contiguous()
    return hidden.view(torch.uint8)


@triton.jit
def _seen_range(hidden, start, stop, BLOCK_E: tl.constexpr):
    """The key block of the first key that a query sees, and the key after the last."""
    first, end = stop, start
    for at in range(start, stop, 256):
        e = at + tl.arange(0, 256)
        seen = tl.load(hidden + e, mask=e < stop, other=1) == 0
        first = tl.minimum(first, tl.min(tl.where(seen, e, stop)))
        end = tl.maximum(end, tl.max(tl.where(seen, e + 1, start)))
    return first // BLOCK_E * BLOCK_E, end


@triton.jit
def _add_keys(
    acc,
    top,
    total,
    q,
    query_of,
    rows,
    ids,
    hidden,
    start,
    stop,
    to_query,
    block_stride,
    PER_BLOCK: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    FORMAT: tl.constexpr,
    DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ONE_QUERY: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Keys start … stop − 1 of one source; q [M, D] has the scale in it. acc [M, D] and total [M] are relative to 2^top [M]."""
    if ONE_QUERY:
        hidden += query_of * to_query
        if stop - start > 4 * BLOCK_E:
            start, stop = _seen_range(hidden, start, stop, BLOCK_E)
    for at in range(start, stop, BLOCK_E):
        e = at + tl.arange(0, BLOCK_E)
        inside = e < stop
        key_ids = tl.load(ids + e, mask=inside, other=0)
        if ONE_QUERY:
            seen = tl.load(hidden + e, mask=inside, other=1) == 0
            visible = seen[None, :]
        else:
            visible = (
                tl.load(
                    hidden + (query_of[:, None] * to_query + e[None, :]),
                    mask=(query_of >= 0)[:, None] & inside[None, :],
                    other=1,
                )
                == 0
            )
            seen = tl.max(visible.to(tl.int32), 0) > 0
        key = read_rows(
            rows,
            key_ids,
            seen,
            block_stride,
            PER_BLOCK,
            ROW_STRIDE,
            FORMAT,
            DIM,
            ROPE_DIM,
            BLOCK_D,
        ).to(q.dtype)
        score = tl.dot(q, tl.trans(key), input_precision="ieee")
        score = tl.where(visible, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        keep = tl.exp2(top - higher)
        weight = tl.exp2(score - higher[:, None])
        total = total * keep + tl.sum(weight, 1)
        acc = tl.dot(
            weight.to(key.dtype), key, acc * keep[:, None], input_precision="ieee"
        )
        top = higher
    return acc, top, total


@triton.jit(
    do_not_specialize=[
        "width",
        "to_tile",
        "to_query",
        "width2",
        "to_tile2",
        "to_query2",
        "tiles",
        "pairs",
        "per_split",
    ]
)
def _attend(
    query,
    sink,
    scale,
    rows,
    ids,
    hidden,
    width,
    to_tile,
    to_query,
    block_stride,
    rows2,
    ids2,
    hidden2,
    width2,
    to_tile2,
    to_query2,
    block_stride2,
    out,
    state,
    tiles,
    pairs,
    per_split,
    HEADS: tl.constexpr,
    PRODUCT: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    PER_BLOCK2: tl.constexpr,
    ROW_STRIDE2: tl.constexpr,
    FORMAT: tl.constexpr,
    DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ONE_QUERY: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    groups = tl.cdiv(pairs, BLOCK_M)
    tile = (tl.program_id(0) // groups).to(tl.int64)
    split = tl.program_id(1)
    first = tl.program_id(0) % groups * BLOCK_M
    pair = first + tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    at = (tile * pairs + pair)[:, None] * DIM + column[None, :]
    mask = (pair < pairs)[:, None] & (column < DIM)[None, :]
    q = tl.load(query + at, mask=mask, other=0.0) * scale * LOG2_E
    q = q.to(PRODUCT)
    # The sink is a key whose value is zero; it also keeps every maximum finite.
    top = tl.load(sink + pair % HEADS) * LOG2_E
    total = tl.zeros((BLOCK_M,), tl.float32) + tl.where(split == 0, 1.0, 0.0)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if ONE_QUERY:
        query_of = (first // HEADS).to(tl.int64)
    else:
        query_of = tl.where(pair < pairs, pair // HEADS, -1).to(tl.int64)

    # Blocks of keys are counted through both sources.
    begin = split * per_split * BLOCK_E
    end = begin + per_split * BLOCK_E
    acc, top, total = _add_keys(
        acc,
        top,
        total,
        q,
        query_of,
        rows,
        ids + tile * width,
        hidden + tile * to_tile,
        begin,
        tl.minimum(end, width),
        to_query,
        block_stride,
        PER_BLOCK,
        ROW_STRIDE,
        FORMAT,
        DIM,
        ROPE_DIM,
        BLOCK_D,
        ONE_QUERY,
        BLOCK_E,
    )
    before = tl.cdiv(width, BLOCK_E) * BLOCK_E
    acc, top, total = _add_keys(
        acc,
        top,
        total,
        q,
        query_of,
        rows2,
        ids2 + tile * width2,
        hidden2 + tile * to_tile2,
        tl.maximum(begin - before, 0),
        tl.minimum(end - before, width2),
        to_query2,
        block_stride2,
        PER_BLOCK2,
        ROW_STRIDE2,
        FORMAT,
        DIM,
        ROPE_DIM,
        BLOCK_D,
        ONE_QUERY,
        BLOCK_E,
    )
    if SPLIT:
        every = tiles.to(tl.int64) * pairs
        to_state = split * 2 * every + tile * pairs + pair
        tl.store(state + to_state, top, mask=pair < pairs)
        tl.store(state + to_state + every, total, mask=pair < pairs)
        out += split * every * DIM
    else:
        acc /= total[:, None]
    tl.store(out + at, acc, mask=mask)


@triton.jit(do_not_specialize=["every", "splits"])
def _merge(
    partial,
    state,
    out,
    every,
    splits,
    DIM: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One (query, head) pair and a stretch of its values."""
    pair = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    split = tl.arange(0, MOST_SPLITS)
    tops = tl.load(
        state + split * 2 * every + pair, mask=split < splits, other=float("-inf")
    )
    top = tl.max(tops)
    totals = tl.load(
        state + (split * 2 + 1) * every + pair, mask=split < splits, other=0.0
    )
    total = tl.sum(totals * tl.exp2(tops - top))
    acc = tl.zeros((BLOCK_C,), tl.float32)
    for at in range(0, splits, BLOCK_S):
        s = at + tl.arange(0, BLOCK_S)
        weight = tl.exp2(
            tl.load(state + s * 2 * every + pair, mask=s < splits, other=float("-inf"))
            - top
        )
        part = tl.load(
            partial + (s[:, None] * every + pair) * DIM + column[None, :],
            mask=(s < splits)[:, None] & (column < DIM)[None, :],
            other=0.0,
        )
        acc += tl.sum(part * weight[:, None], 0)
    tl.store(out + pair * DIM + column, acc / total, mask=column < DIM)
