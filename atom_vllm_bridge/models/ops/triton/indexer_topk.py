"""ops/torch/indexer_topk.py by selection instead of a sort of all entries.

A program holds up to BLOCK scores in registers as integers that sort as the floats do. The k-th largest is found two bits at
a time: three thresholds are counted in one sum, sixteen times. Then what is greater is taken, and what is equal in order of
index until there are k. Rows that are longer are first shortened, in one or two rounds: each program keeps the k best of its
stretch, in order of index, so that ties go on being settled by place. Only the last k are sorted.
"""

import torch
import triton
import triton.language as tl

# Scores that one program holds, and warps to hold them: few, many.
FEW, FEW_WARPS = 2048, 4
MANY, MANY_WARPS = 8192, 16
LEAST = tl.constexpr(-(2**31))


def indexer_topk(scores: torch.Tensor, available: torch.Tensor, k: int) -> torch.Tensor:
    shape, entries = scores.shape[:-1], scores.shape[-1]
    k = min(k, entries)
    out = torch.empty(*shape, k, dtype=torch.int64, device=scores.device)
    if out.numel() == 0:
        return out
    scores = scores.reshape(-1, entries).contiguous()
    available = available.expand(shape).reshape(-1).contiguous()
    rows = scores.shape[0]
    # A round must shorten: a program keeps at most half of what it holds.
    block, warps = (FEW, FEW_WARPS) if entries <= FEW else (MANY, MANY_WARPS)
    block = max(block, 2 * triton.next_power_of_2(k))
    places, count = scores, entries
    first = True
    while True:
        stretches = triton.cdiv(count, block)
        last = stretches == 1
        kept = out if last else scores.new_empty(rows, stretches * k, dtype=torch.int32)
        _keep_best[(stretches, rows)](
            scores,
            available,
            places,
            kept,
            entries,
            count,
            K=k,
            BLOCK_K=triton.next_power_of_2(k),
            BLOCK=block,
            FIRST=first,
            LAST=last,
            num_warps=warps,
        )
        if last:
            return out
        places, count, first = kept, stretches * k, False


@triton.jit(do_not_specialize=["entries", "count"])
def _keep_best(
    scores,
    available,
    places,
    kept,
    entries,
    count,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
):
    """The K best of a stretch: their places, in order, −1 after them; LAST: best first, as int64."""
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if FIRST:
        place = at
        valid = at < tl.minimum(tl.load(available + row), entries)
    else:
        place = tl.load(places + row * count + at, mask=at < count, other=-1)
        valid = place >= 0
    score = tl.load(scores + row * entries + place, mask=valid, other=0.0)
    # Negative zero equals zero.
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    key = tl.where(valid, bits ^ ((bits >> 31) & 0x7FFFFFFF), LEAST)
    threshold = tl.full((), LEAST, tl.int64)
    if tl.sum(valid.to(tl.int32)) > K:
        for step in range(16):
            quarter = tl.full((), 1, tl.int64) << (30 - 2 * step)
            reached = (
                (key >= (threshold + quarter).to(tl.int32)).to(tl.int64)
                + ((key >= (threshold + 2 * quarter).to(tl.int32)).to(tl.int64) << 20)
                + ((key >= (threshold + 3 * quarter).to(tl.int32)).to(tl.int64) << 40)
            )
            reached = tl.sum(reached)
            threshold += quarter * (
                ((reached & 0xFFFFF) >= K).to(tl.int64)
                + (((reached >> 20) & 0xFFFFF) >= K).to(tl.int64)
                + ((reached >> 40) >= K).to(tl.int64)
            )
    greater = key > threshold.to(tl.int32)
    equal = valid & (key == threshold.to(tl.int32))
    room = K - tl.sum(greater.to(tl.int32))
    # Both are counted up to each place in one scan.
    packed = greater.to(tl.int64) + (equal.to(tl.int64) << 32)
    upto = tl.cumsum(packed, 0)
    equals = (upto >> 32).to(tl.int32)
    slot = (upto & 0x7FFFFFFF).to(tl.int32) + tl.minimum(equals, room) - 1
    chosen = greater | (equal & (equals <= room))
    taken = tl.sum(chosen.to(tl.int32))
    order = tl.arange(0, BLOCK_K)
    if LAST:
        kept += row * K
        both = (key.to(tl.int64) << 32) + (0xFFFFFFFF - place.to(tl.int64))
        tl.store(kept + slot, both, mask=chosen)
        # What other threads have written is read back, and must have been before it is overwritten.
        tl.debug_barrier()
        best = tl.load(kept + order, mask=order < taken, other=-(2**63))
        tl.debug_barrier()
        best = tl.sort(best, descending=True)
        best = tl.where(order < taken, 0xFFFFFFFF - (best & 0xFFFFFFFF), -1)
        tl.store(kept + order, best, mask=order < K)
    else:
        kept += (row * tl.num_programs(0) + tl.program_id(0)) * K
        tl.store(kept + slot, place.to(tl.int32), mask=chosen)
        tl.store(kept + order, -1, mask=(order >= taken) & (order < K))
