"""ops/torch/sparse_attention.py without copies of keys: online softmax over blocks of keys that are read where they lie.

A program has one key block after another for a tile of (query, head) pairs, normally all heads of one query: keys are shared
by all heads, so they are read once. One loop takes the blocks of both sources. It skips the keys before the first and after the
last that its query sees. Where there are too few tiles to fill the device, the keys are split among programs, and a second kernel
merges their sums.

Where rows are not float32, both products are of bfloat16 with float32 sums. A rotary tail that is stored in a type of its own
is multiplied apart.
"""

import math

import torch
import triton
import triton.language as tl

from atom_vllm_bridge.models.ops.gradients import trained
from atom_vllm_bridge.models.ops.torch import sparse_attention as reference
from atom_vllm_bridge.models.ops.torch.sparse_attention import Keys
from atom_vllm_bridge.models.ops.triton.stored_rows import (
    begin,
    format_of,
    layout,
    product_type,
    read_rows,
    read_tails,
    readable,
)
from atom_vllm_bridge.models.quantization.kv_codecs import RowCodec

# Programs at once, and splits at most.
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
    tail = 0
    if codec.name == "fp8_ds_mla":
        tail = max(16, triton.next_power_of_2(codec.rope_dim))
    hints = HINTS if torch.version.hip is None else AMD_HINTS
    most_pairs, block_e, warps, stages = hints[product]
    block_m = min(most_pairs, max(16, triton.next_power_of_2(pairs)))
    programs = tiles * triton.cdiv(pairs, block_m)
    last = compressed if compressed is not None else window
    first_width = window.ids.shape[1]
    last_width = 0 if compressed is None else last.ids.shape[1]
    blocks = triton.cdiv(first_width, block_e) + triton.cdiv(last_width, block_e)
    # Merging costs, and programs that do not fit at once wait.
    splits = max(1, min(MOST_SPLITS, blocks, PROGRAMS // programs))
    per_split = triton.cdiv(blocks, splits)
    splits = triton.cdiv(blocks, per_split) if blocks else 1

    # Converted before, so that matrix units take it from shared memory and registers are left for sums.
    query = query.to(torch.float32 if product is tl.float32 else torch.bfloat16)
    query, sink = query.contiguous(), sink.contiguous()
    partial, state = out, out
    if splits > 1:
        partial = out.new_empty(splits, tiles * pairs, dim)
        state = out.new_empty(splits, 2, tiles * pairs)
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
        PER_BLOCK=rows["PER_BLOCK"],
        ROW_STRIDE=rows["ROW_STRIDE"],
        PER_BLOCK2=rows2["PER_BLOCK"],
        ROW_STRIDE2=rows2["ROW_STRIDE"],
        UNIT=math.gcd(rows["UNIT"], rows2["UNIT"]),
        ONE_QUERY=queries == 1 or heads % block_m == 0,
        SPLIT=splits > 1,
        BLOCK_M=block_m,
        BLOCK_E=block_e,
        BLOCK_R=tail,
        # As many values as threads.
        COPIES=max(1, 32 * warps // block_e),
        num_warps=warps,
        num_stages=stages,
        **format_of(codec),
    )
    if splits > 1:
        block_c = min(512, triton.next_power_of_2(dim))
        _merge[(tiles * pairs, triton.cdiv(dim, block_c))](
            partial,
            state,
            out,
            tiles * pairs,
            splits,
            DIM=dim,
            MOST_SPLITS=MOST_SPLITS,
            BLOCK_S=min(8, triton.next_power_of_2(splits)),
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
def _once(value, COPIES: tl.constexpr):
    """The maximum of COPIES equal columns.

    The compiler would rather load a short vector again in each layout that uses it than move it, and the index arithmetic with
    it; not so a maximum.
    """
    return tl.max(value, 1) if COPIES > 1 else tl.reshape(value, (value.shape[0],))


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
    PER_BLOCK: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    PER_BLOCK2: tl.constexpr,
    ROW_STRIDE2: tl.constexpr,
    UNIT: tl.constexpr,
    FORMAT: tl.constexpr,
    DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ONE_QUERY: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    COPIES: tl.constexpr,
):
    groups = tl.cdiv(pairs, BLOCK_M)
    tile = (tl.program_id(0) // groups).to(tl.int64)
    split = tl.program_id(1)
    first = tl.program_id(0) % groups * BLOCK_M
    pair = first + tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    first_of_tail: tl.constexpr = DIM - ROPE_DIM if BLOCK_R else DIM
    # Offsets within a tile, so that 32 bits hold them.
    query += tile * pairs * DIM
    out += tile * pairs * DIM
    to_value = pair[:, None] * DIM + column[None, :]
    mask = (pair < pairs)[:, None] & (column < first_of_tail)[None, :]
    q = tl.load(query + to_value, mask=mask, other=0.0)
    q_tail, acc_tail = 0.0, 0.0
    if BLOCK_R:
        tail = tl.arange(0, BLOCK_R)
        to_tail = pair[:, None] * DIM + first_of_tail + tail[None, :]
        inside = (pair < pairs)[:, None] & (tail < ROPE_DIM)[None, :]
        q_tail = tl.load(query + to_tail, mask=inside, other=0.0)
        acc_tail = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    # The sink is a key whose value is zero; it also keeps every maximum finite.
    top = tl.load(sink + pair % HEADS) * LOG2_E
    total = tl.zeros((BLOCK_M,), tl.float32) + tl.where(split == 0, 1.0, 0.0)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if ONE_QUERY:
        query_of = (first // HEADS).to(tl.int64)
    else:
        query_of = tl.where(pair < pairs, pair // HEADS, -1).to(tl.int64)

    ids, hidden = ids + tile * width, hidden + tile * to_tile
    ids2, hidden2 = ids2 + tile * width2, hidden2 + tile * to_tile2
    # Blocks of keys are counted through both sources.
    start = split * per_split * BLOCK_E
    end = start + per_split * BLOCK_E
    before = tl.cdiv(width, BLOCK_E) * BLOCK_E
    start2 = tl.maximum(start - before, 0)
    end, end2 = tl.minimum(end, width), tl.minimum(end - before, width2)
    if ONE_QUERY:
        hidden += query_of * to_query
        hidden2 += query_of * to_query2
        if end - start > 4 * BLOCK_E:
            start, end = _seen_range(hidden, start, end, BLOCK_E)
        if end2 - start2 > 4 * BLOCK_E:
            start2, end2 = _seen_range(hidden2, start2, end2, BLOCK_E)
    blocks = tl.cdiv(tl.maximum(end - start, 0), BLOCK_E)
    blocks2 = tl.cdiv(tl.maximum(end2 - start2, 0), BLOCK_E)
    scale *= LOG2_E
    # Where products find their operands in shared memory is computed anew for each block: hoisted, it would fill the registers.
    for block in tl.range(blocks + blocks2, disable_licm=True):
        second = block >= blocks
        e = tl.where(second, start2 - blocks * BLOCK_E, start) + block * BLOCK_E
        e += tl.arange(0, BLOCK_E)
        stop = tl.where(second, end2, end)
        copies = e[:, None] + tl.zeros((1, COPIES), tl.int32)
        key_ids = tl.load(
            tl.where(second, ids2, ids) + copies, mask=copies < stop, other=0
        )
        at = tl.where(
            second,
            begin(key_ids, block_stride2, PER_BLOCK2, ROW_STRIDE2, UNIT),
            begin(key_ids, block_stride, PER_BLOCK, ROW_STRIDE, UNIT),
        )
        hidden_ = tl.where(second, hidden2, hidden)
        if ONE_QUERY:
            # Hidden keys read nothing.
            behind = tl.load(hidden_ + copies, mask=copies < stop, other=1)
            at = _once(tl.where(behind == 0, at, -1), COPIES)
            visible = (at >= 0)[None, :]
        else:
            to_query_ = tl.where(second, to_query2, to_query)
            visible = (
                tl.load(
                    hidden_ + (query_of[:, None] * to_query_ + e[None, :]),
                    mask=(query_of >= 0)[:, None] & (e < stop)[None, :],
                    other=1,
                )
                == 0
            )
            seen = tl.max(visible.to(tl.int32), 0) > 0
            at = tl.where(seen, _once(at, COPIES), -1)
        rows_ = tl.where(second, rows2, rows)
        key = read_rows(rows_, at, UNIT, FORMAT, DIM, ROPE_DIM, BLOCK_D).to(q.dtype)
        score = tl.dot(q, tl.trans(key), input_precision="ieee")
        if BLOCK_R:
            rotary = read_tails(rows_, at, UNIT, DIM, ROPE_DIM, BLOCK_R).to(q.dtype)
            score = tl.dot(q_tail, tl.trans(rotary), score, input_precision="ieee")
        score = tl.where(visible, score * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        keep = tl.exp2(top - higher)
        weight = tl.exp2(score - higher[:, None])
        total = total * keep + tl.sum(weight, 1)
        weight = weight.to(key.dtype)
        # The tail comes first: after the other product it would be left running into the next block, and then the assembler has
        # each product wait for the one before.
        if BLOCK_R:
            acc_tail = tl.dot(
                weight, rotary, acc_tail * keep[:, None], input_precision="ieee"
            )
        acc = tl.dot(weight, key, acc * keep[:, None], input_precision="ieee")
        top = higher
    if SPLIT:
        every = tiles.to(tl.int64) * pairs
        to_state = split * 2 * every + tile * pairs + pair
        tl.store(state + to_state, top, mask=pair < pairs)
        tl.store(state + to_state + every, total, mask=pair < pairs)
        out += split * every * DIM
    else:
        acc /= total[:, None]
        if BLOCK_R:
            acc_tail /= total[:, None]
    tl.store(out + to_value, acc, mask=mask)
    if BLOCK_R:
        tl.store(out + to_tail, acc_tail, mask=inside)


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
