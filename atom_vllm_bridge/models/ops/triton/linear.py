"""ops/torch/linear.py, and products in groups, with matrices that are kept as they came.

A program takes a tile of outputs and, where tiles are too few to fill the device, a range of inputs. Of the programs of one tile
that which is ready last adds the parts of all, in the order of their ranges, so that sums do not depend on who was when ready.
With more than a few rows the matrix is unpacked into memory once, and multiplied as a plain one.
"""

import torch
import triton
import triton.language as tl

from atom_vllm_bridge.models.ops.torch import linear as reference
from atom_vllm_bridge.models.ops.triton.products import (
    STEPS,
    Hint,
    halves,
    multiply,
    product_type,
    takes,
    words_of,
)
from atom_vllm_bridge.models.quantization.kept import PLANES, Band, Kept

# Rows; with more, unpacking a matrix once is cheaper. In float32, which has no matrix units, earlier.
MOST_ROWS = 64
MOST_FLOAT32_ROWS = 16
# Several programs a processor load while others multiply; but the parts of many rows cost more to add than idle processors.
HINTS: tuple[Hint, ...] = (
    Hint(16, 16, 64, 4, 3, programs=528),
    Hint(32, 32, 64, 4, 3, programs=264),
    Hint(MOST_ROWS, 64, 64, 4, 3, swap=True, programs=132),
)
# AMD's local memory is 64 KiB (CDNA 3): two stages; and there are twice as many processors.
AMD_HINTS: tuple[Hint, ...] = (
    Hint(16, 16, 64, 4, 2, programs=608),
    Hint(32, 32, 64, 4, 2, programs=608),
    Hint(MOST_ROWS, 64, 64, 4, 2, programs=304),
)


@triton.jit
def _tile(
    x,
    to_row,
    values,
    scales,
    out,
    parts,
    arrivals,
    tokens,
    inputs,
    outputs,
    width,
    before,
    tile,
    counted,
    splits,
    per_split,
    FORMAT: tl.constexpr,
    STEP: tl.constexpr,
    EVEN: tl.constexpr,
    SWAP: tl.constexpr,
    PRODUCT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One tile of a band of groups of `outputs`, of which `before` outputs of `width` come before; `counted` is its number."""
    tiles = tl.cdiv(outputs, BLOCK_N)
    group = tile // tiles
    within = (tile - group * tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    n = group * outputs + tl.minimum(within, outputs - 1)
    token = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = token < tokens
    token = token.to(tl.int64)
    split = tl.program_id(1)
    sums = multiply(
        x + token * to_row + group * inputs,
        live,
        values,
        scales,
        n.to(tl.int64),
        split * per_split,
        tl.minimum((split + 1) * per_split, inputs),
        inputs,
        FORMAT,
        STEP,
        EVEN,
        SWAP,
        PRODUCT,
        BLOCK_M,
        BLOCK_N,
    )
    at = token[:, None] * width + (before + n)[None, :]
    mask = live[:, None] & (within < outputs)[None, :]
    if splits == 1:
        tl.store(out + at, sums.to(out.dtype.element_ty), mask=mask)
    else:
        size = tokens.to(tl.int64) * width
        tl.store(parts + split * size + at, sums, mask=mask)
        # All of this program's stores come before its arrival, which releases them.
        tl.debug_barrier()
        if tl.atomic_add(arrivals + counted, 1) == splits - 1:
            tl.store(arrivals + counted, 0)
            sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for s in range(splits):
                part = parts + s * size + at
                # Not from a cache that other processors do not write to.
                sums += tl.load(part, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(out + at, sums.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens", "splits", "per_split"])
def _linear(
    x,
    to_row,
    values,
    scales,
    values2,
    scales2,
    out,
    parts,
    arrivals,
    tokens,
    inputs,
    outputs,
    groups,
    outputs2,
    splits,
    per_split,
    FORMAT: tl.constexpr,
    STEP: tl.constexpr,
    FORMAT2: tl.constexpr,
    STEP2: tl.constexpr,
    EVEN: tl.constexpr,
    SWAP: tl.constexpr,
    PRODUCT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tile = tl.program_id(0)
    tiles = groups * tl.cdiv(outputs, BLOCK_N)
    width = groups * outputs + outputs2
    if FORMAT2 != "none" and tile >= tiles:
        _tile(
            x,
            to_row,
            values2,
            scales2,
            out,
            parts,
            arrivals,
            tokens,
            inputs,
            outputs2,
            width,
            outputs,
            tile - tiles,
            tile,
            splits,
            per_split,
            FORMAT2,
            STEP2,
            EVEN,
            SWAP,
            PRODUCT,
            BLOCK_M,
            BLOCK_N,
        )
        return
    _tile(
        x,
        to_row,
        values,
        scales,
        out,
        parts,
        arrivals,
        tokens,
        inputs,
        outputs,
        width,
        0,
        tile,
        tile,
        splits,
        per_split,
        FORMAT,
        STEP,
        EVEN,
        SWAP,
        PRODUCT,
        BLOCK_M,
        BLOCK_N,
    )


def few(x: torch.Tensor) -> bool:
    """Whether `few_rows` is for these."""
    most = MOST_FLOAT32_ROWS if x.dtype == torch.float32 else MOST_ROWS
    return x.shape[0] <= most


def few_rows(x: torch.Tensor, w: Kept) -> torch.Tensor:
    """x [T, a], or [T, G · a] for `w` of G matrices, each of which multiplies its part → [T, b] or [T, G · b]."""
    tokens, groups = x.shape[0], w.count or 1
    inputs, width = w.inputs, groups * w.outputs
    if x.stride(1) != 1:
        x = x.contiguous()
    out = x.new_empty(tokens, width)
    if not out.numel():
        return out
    band, *others = w.bands
    other = others[0] if others else band
    hints = HINTS if torch.version.hip is None else AMD_HINTS
    hint = next(h for h in hints if tokens <= h.most)
    tiles = groups * triton.cdiv(band.rows // groups, hint.outputs)
    if others:
        tiles += triton.cdiv(other.rows, hint.outputs)
    blocks, splits, per_split = triton.cdiv(tokens, hint.rows), 1, inputs
    step = max(STEPS[band.format], STEPS[other.format])
    if blocks == 1 and tiles < hint.programs:
        steps = triton.cdiv(inputs, step)
        per_split = triton.cdiv(steps, hint.programs // tiles) * step
        splits = triton.cdiv(inputs, per_split)
    parts = out
    if splits > 1:
        parts = torch.empty(
            (splits, tokens, width), dtype=torch.float32, device=x.device
        )
    _linear[(tiles, splits, blocks)](
        x,
        x.stride(0),
        band.values,
        words_of(band),
        other.values,
        words_of(other),
        out,
        parts,
        w.arrivals,
        tokens,
        inputs,
        band.rows // groups,
        groups,
        other.rows if others else 0,
        splits,
        per_split,
        FORMAT=band.format,
        STEP=STEPS[band.format],
        FORMAT2=other.format if others else "none",
        STEP2=STEPS[other.format],
        EVEN=inputs % step == 0,
        SWAP=hint.swap,
        PRODUCT=product_type(_linear, x),
        BLOCK_M=hint.rows,
        BLOCK_N=hint.outputs,
        num_warps=hint.warps,
        num_stages=hint.stages,
    )
    return out


@triton.jit
def _unpack(
    words,
    scales,
    out,
    total,
    inputs,
    row_words,
    FORMAT: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK words of all rows' `total`, one row after another."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < total
    q = tl.load(words + at, mask=live, other=0)
    row = at // row_words
    word = (at - row * row_words).to(tl.int32)
    first = word // 32 * (32 * GROUPS) + word % 32
    out += row * inputs
    for p in tl.static_range(GROUPS // 2):
        both = halves(q, p, FORMAT)
        for high in tl.static_range(2):
            group = p + high * (GROUPS // 2)
            factor = tl.load(scales + at // 32 * GROUPS + group, mask=live, other=0)
            bits = both & -0x10000 if high else both << 16
            value = bits.to(tl.float32, bitcast=True)
            value *= (factor.to(tl.int32) << 23).to(tl.float32, bitcast=True)
            column = first + 32 * group
            inside = live & (column < inputs)
            tl.store(out + column, value.to(out.dtype.element_ty), mask=inside)


def unpacked(band: Band, dtype: torch.dtype) -> torch.Tensor:
    """The values of a band, [R, a]."""
    if band.scales is None:
        return band.values.to(dtype)
    out = torch.empty(band.rows, band.inputs, dtype=dtype, device=band.device)
    total, block = band.values.numel(), 1024
    if out.numel():
        _unpack[(triton.cdiv(total, block),)](
            band.values,
            band.scales,
            out,
            total,
            band.inputs,
            band.values.shape[1],
            FORMAT=band.format,
            GROUPS=PLANES[band.format].groups,
            BLOCK=block,
        )
    return out


def linear(x: torch.Tensor, w: torch.Tensor | Kept) -> torch.Tensor:
    if not isinstance(w, Kept) or not takes(x, w) or w.count is not None:
        return reference.linear(x, w)
    formats = {band.format for band in w.bands}
    if len(w.bands) > 2 or formats == {"plain"} or not few(x):
        parts = [x @ unpacked(band, x.dtype).mT for band in w.bands]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    return few_rows(x, w)
