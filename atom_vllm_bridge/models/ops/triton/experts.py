"""ops/torch/experts.py in four kernels, with experts that are kept as they came (quantization/kept.py).

Slots (a token's k-th expert) are sorted by expert and cut into tiles of one expert each. How many tiles there are, only the
device knows; as many programs as there may be are launched, and those without a tile end at once. The first product makes a
tile's gate and up together, so that what is written is gated; the second goes back to the order of tokens, whose slots are then
weighed and added, in their order.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from atom_vllm_bridge.models.ops.torch import experts as reference
from atom_vllm_bridge.models.ops.triton.products import (
    STEPS,
    Hint,
    multiply,
    product_type,
    takes,
    words_of,
)
from atom_vllm_bridge.models.quantization.kept import Kept

HINTS: tuple[Hint, ...] = (
    Hint(12, 16, 64, 4, 3, swap=True),
    Hint(24, 32, 64, 4, 3, swap=True),
    Hint(96, 64, 128, 4, 2, swap=True),
    Hint(1 << 62, 128, 128, 8, 3, swap=True),
)
# On AMD's, whose local memory is 64 KiB (CDNA 3): two stages, and no larger tiles.
AMD_HINTS: tuple[Hint, ...] = (
    Hint(12, 16, 64, 4, 2),
    Hint(24, 32, 64, 4, 2),
    Hint(1 << 62, 64, 64, 4, 2),
)
# Slots that are sorted at once.
CHUNK = 1024


@triton.jit(do_not_specialize=["slots", "most"])
def _sort(
    chosen,
    order,
    tiles,
    slots,
    most,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One expert's slots, in their order, behind those of the experts before it; and its tiles: expert, first, end."""
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    for first in range(0, slots, CHUNK):
        slot = first + tl.arange(0, CHUNK)
        found = tl.load(chosen + slot, mask=slot < slots, other=EXPERTS)
        counts += tl.histogram(found.to(tl.int32), BINS)
    counts = tl.where(bins < EXPERTS, counts, 0)
    begin = tl.sum(tl.where(bins < expert, counts, 0))
    count = tl.sum(tl.where(bins == expert, counts, 0))
    cut = tl.cdiv(counts, ROWS)
    tile = tl.sum(tl.where(bins < expert, cut, 0))
    at = begin
    for first in range(0, slots, CHUNK):
        slot = first + tl.arange(0, CHUNK)
        found = tl.load(chosen + slot, mask=slot < slots, other=EXPERTS)
        mine = (found == expert).to(tl.int32)
        tl.store(order + at + tl.cumsum(mine, 0) - 1, slot, mask=mine > 0)
        at += tl.sum(mine)
    for number in range(tl.cdiv(count, ROWS)):
        row = tiles + (tile + number) * 3
        tl.store(row, expert)
        tl.store(row + 1, begin + number * ROWS)
        tl.store(row + 2, begin + count)
    if expert == EXPERTS - 1:
        for number in range(tl.sum(cut), most):
            tl.store(tiles + number * 3, -1)


@dataclass(frozen=True)
class Sorted:
    """Slots by expert.

    Attributes:
        order: [S] int32, slots.
        tiles: [N, 3] int32: expert, or −1 for none; place of the first slot in `order`, and of the end of the expert's.
        rows: slots a tile.
    """

    order: torch.Tensor
    tiles: torch.Tensor
    rows: int


def sort(chosen: torch.Tensor, experts: int, rows: int) -> Sorted:
    """Sort slots [T, k] int64, contiguous, into tiles of `rows`; those of expert `experts` into none."""
    slots = chosen.numel()
    most = min(experts, slots) + slots // rows
    kind = {"dtype": torch.int32, "device": chosen.device}
    order, tiles = torch.empty(slots, **kind), torch.empty((most, 3), **kind)
    _sort[(experts,)](
        chosen,
        order,
        tiles,
        slots,
        most,
        EXPERTS=experts,
        BINS=triton.next_power_of_2(experts + 1),
        ROWS=rows,
        CHUNK=CHUNK,
        num_warps=4,
    )
    return Sorted(order, tiles, rows)


@triton.jit(do_not_specialize=["k"])
def _product(
    x,
    values,
    scales,
    order,
    tiles,
    out,
    k,
    inputs,
    outputs,
    limit,
    GATED: tl.constexpr,
    FORMAT: tl.constexpr,
    STEP: tl.constexpr,
    EVEN: tl.constexpr,
    SWAP: tl.constexpr,
    PRODUCT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Tiles of slots times their expert's matrix.

    GATED: rows are tokens', out is [S, outputs / 2] in the order of `order`; else rows are in that order, and out [S, outputs]
    in the order of slots.
    """
    row = tiles + tl.program_id(1) * 3
    expert = tl.load(row).to(tl.int64)
    if expert < 0:
        return
    place = tl.load(row + 1) + tl.arange(0, BLOCK_M)
    live = place < tl.load(row + 2)
    slot = tl.load(order + place, mask=live, other=0)
    column = tl.arange(0, BLOCK_N)
    if GATED:
        # Gate and up lie side by side, so that a thread has both.
        source = (slot // k).to(tl.int64)
        inner = outputs // 2
        half = tl.program_id(0) * (BLOCK_N // 2) + column // 2
        n = tl.minimum(half, inner - 1) + (column % 2) * inner
    else:
        source = place.to(tl.int64)
        n = tl.minimum(tl.program_id(0) * BLOCK_N + column, outputs - 1)
    sums = multiply(
        x + source * inputs,
        live,
        values,
        scales,
        expert * outputs + n,
        0,
        inputs,
        inputs,
        FORMAT,
        STEP,
        EVEN,
        SWAP,
        PRODUCT,
        BLOCK_M,
        BLOCK_N,
    )
    if GATED:
        gate, up = tl.split(tl.reshape(sums, (BLOCK_M, BLOCK_N // 2, 2)))
        # A comparison with NaN is false, so that NaN passes the clamp as it does in torch.
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        sums = gate / (1.0 + tl.exp(-gate)) * up
        width = outputs // 2
        target = place.to(tl.int64)
        to = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    else:
        width = outputs
        target = slot.to(tl.int64)
        to = tl.program_id(0) * BLOCK_N + column
    tl.store(
        out + target[:, None] * width + to[None, :],
        sums.to(out.dtype.element_ty),
        mask=live[:, None] & (to < width)[None, :],
    )


@triton.jit
def _add(y, chosen, weights, out, k, dim, many, BLOCK: tl.constexpr):
    """A token's slots, weighed; those of experts that are not here have no row."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < dim
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in range(k):
        width = tl.where(tl.load(chosen + token * k + slot) < many, dim, 0)
        at = y + (token * k + slot) * dim + column
        value = tl.load(at, mask=column < width, other=0.0).to(tl.float32)
        total += tl.load(weights + token * k + slot) * value
    tl.store(out + token * dim + column, total, mask=live)


def _multiply(
    x: torch.Tensor,
    w: Kept,
    by_expert: Sorted,
    out: torch.Tensor,
    k: int,
    limit: float | None,
    hint: Hint,
) -> None:
    """`_product` of x [·, a] with `w`; gated if there is a limit."""
    (band,) = w.bands
    inputs, step = w.inputs, STEPS[band.format]
    # Tiles of one expert follow each other, so that they find its weights in the cache.
    grid = triton.cdiv(w.outputs, hint.outputs), len(by_expert.tiles)
    _product[grid](
        x,
        band.values,
        words_of(band),
        by_expert.order,
        by_expert.tiles,
        out,
        k,
        inputs,
        w.outputs,
        0.0 if limit is None else limit,
        GATED=limit is not None,
        FORMAT=band.format,
        STEP=step,
        EVEN=inputs % step == 0,
        SWAP=hint.swap,
        PRODUCT=product_type(_product, x),
        BLOCK_M=by_expert.rows,
        BLOCK_N=hint.outputs,
        num_warps=hint.warps,
        num_stages=hint.stages,
    )


def experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor | Kept,
    w2: torch.Tensor | Kept,
    limit: float,
) -> torch.Tensor:
    if not isinstance(w13, Kept) or not isinstance(w2, Kept) or not takes(x):
        return reference.experts(x, chosen, weights, w13, w2, limit)
    tokens, k = chosen.shape
    many, inner, dim = w2.shape
    out = torch.empty((tokens, dim), dtype=torch.float32, device=x.device)
    if not out.numel():
        return out
    slots = tokens * k
    # In float32, which has no matrix units, small tiles are best.
    each = 1 if x.dtype == torch.float32 else triton.cdiv(slots, many)
    hints = HINTS if torch.version.hip is None else AMD_HINTS
    hint = next(h for h in hints if each <= h.most)
    chosen = chosen.contiguous()
    by_expert = sort(chosen, many, hint.rows)
    gated = x.new_empty(slots, inner)
    _multiply(x.contiguous(), w13, by_expert, gated, k, limit, hint)
    y = x.new_empty(slots, dim)
    _multiply(gated, w2, by_expert, y, k, None, hint)
    block = min(1024, triton.next_power_of_2(dim))
    _add[(tokens, triton.cdiv(dim, block))](
        y, chosen, weights.contiguous(), out, k, dim, many, BLOCK=block
    )
    return out
