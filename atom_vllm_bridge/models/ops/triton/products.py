"""Rows times a matrix that is kept as it came (quantization/kept.py): the core of every kernel that multiplies with one.

Weights go from memory to shared memory as they are stored, and are unpacked in the registers from which they are multiplied
(quantization/planes.py says how they lie). A quantised value times its scale is exact in bfloat16.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from atom_vllm_bridge.models.ops.gradients import trained
from atom_vllm_bridge.models.quantization.kept import Band, Kept


class Hint(NamedTuple):
    """How a product of up to `most` rows is launched.

    Attributes:
        most: rows, or slots of an expert.
        rows, outputs: a tile.
        warps, stages: Triton's.
        swap: see `multiply`.
        programs: wanted, where inputs may be split to have as many.
    """

    most: int
    rows: int
    outputs: int
    warps: int
    stages: int
    swap: bool = False
    programs: int = 0


# Inputs that one step of a format's loop takes: where quantised, those of 32 words.
STEPS = {"plain": 128, "fp8": 128, "mxfp4": 256}


def takes(x: torch.Tensor, *matrices: Any) -> bool:
    """Whether kernels multiply rows `x` with these."""
    return (
        all(isinstance(w, Kept) for w in matrices)
        and x.dtype in (torch.bfloat16, torch.float32)
        and not trained(x)
    )


def product_type(kernel: Any, x: torch.Tensor) -> tl.dtype:
    """In what the values of rows are multiplied: float32 where rows are, else bfloat16."""
    # Triton's interpreter multiplies the bits of bfloat16 values as integers.
    if x.dtype == torch.float32 or not isinstance(kernel, triton.JITFunction):
        return tl.float32
    return tl.bfloat16


def words_of(band: Band) -> torch.Tensor:
    """The scales, four a word; of a plain band anything."""
    return band.values if band.scales is None else band.scales.view(torch.int32)


@triton.jit
def halves(q, p: tl.constexpr, FORMAT: tl.constexpr):
    """Of words, group p and, in the high halves, the group half as many groups on: bits of a bfloat16 each."""
    if FORMAT == "fp8":
        if p == 0:
            both = q & -0x780F7810
        else:
            both = ((q << 4) & -0x7F0F7F10) | ((q >> 4) & 0x07000700)
    elif p == 3:
        both = ((q << 1) & -0x7FFF8000) | ((q >> 5) & 0x01000100)
        both = both | ((q >> 4) & 0x00C000C0)
    else:
        both = (q << (3 * p)) & -0x7E3F7E40
    return both


@triton.jit
def _widened(half, factor, SWAP: tl.constexpr, PRODUCT: tl.constexpr):
    """bfloat16 bits in the low 16 of `half`, times a factor an output, of which there is the exponent's byte."""
    if tl.bfloat16 == PRODUCT:
        value = half.to(tl.int16).to(tl.bfloat16, bitcast=True)
        scale = (factor << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        value = (half << 16).to(tl.float32, bitcast=True)
        scale = (factor << 23).to(tl.float32, bitcast=True)
    if SWAP:
        return value * scale[:, None]
    else:
        return value * scale[None, :]


@triton.jit
def _columns(x, live, column, inputs, EVEN: tl.constexpr, SWAP: tl.constexpr):
    """Inputs column [K] of rows x [M], pointers, where live [M]: [M, K], or [K, M] if swapped."""
    if SWAP:
        at, mask = x[None, :] + column[:, None], live[None, :]
        if not EVEN:
            mask = mask & (column < inputs)[:, None]
    else:
        at, mask = x[:, None] + column[None, :], live[:, None]
        if not EVEN:
            mask = mask & (column < inputs)[None, :]
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def _add_product(rows, w, sums, SWAP: tl.constexpr):
    if SWAP:
        return tl.dot(w, rows, sums, input_precision="ieee")
    else:
        return tl.dot(rows, w, sums, input_precision="ieee")


@triton.jit
def multiply(
    x,
    live,
    values,
    scales,
    n,
    first,
    end,
    inputs,
    FORMAT: tl.constexpr,
    STEP: tl.constexpr,
    EVEN: tl.constexpr,
    SWAP: tl.constexpr,
    PRODUCT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Rows, given by pointers x [M] to their first inputs and live [M], times outputs n [N] int64 → [M, N] float32.

    Only inputs first … end − 1 are multiplied; `first` is a multiple of STEP, and EVEN says that all inputs are too. SWAP:
    matrix units take weights as their first factor, which they read from the registers where those were unpacked.
    """
    place, lane = tl.arange(0, 32), tl.arange(0, STEP)
    if SWAP:
        sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        output, word, input = n[:, None], place[None, :], lane[None, :]
    else:
        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        output, word, input = n[None, :], place[:, None], lane[:, None]
    steps = tl.cdiv(inputs, STEP)
    if FORMAT == "mxfp4":
        words = values + output * (steps * 32) + word
        exponents = scales + n * (steps * 2)
        for step in range(first // STEP, tl.cdiv(end, STEP)):
            q = tl.load(words + step * 32)
            low = tl.load(exponents + step * 2)
            high = tl.load(exponents + step * 2 + 1)
            for p in tl.static_range(4):
                both = halves(q, p, FORMAT)
                column = step * STEP + 32 * p + place
                w = _widened(both, (low >> (8 * p)) & 0xFF, SWAP, PRODUCT)
                rows = _columns(x, live, column, inputs, EVEN, SWAP).to(PRODUCT)
                sums = _add_product(rows, w, sums, SWAP)
                w = _widened(both >> 16, (high >> (8 * p)) & 0xFF, SWAP, PRODUCT)
                rows = _columns(x, live, column + 128, inputs, EVEN, SWAP).to(PRODUCT)
                sums = _add_product(rows, w, sums, SWAP)
    elif FORMAT == "fp8":
        words = values + output * (steps * 32) + word
        exponents = scales + n * steps
        for step in range(first // STEP, tl.cdiv(end, STEP)):
            q = tl.load(words + step * 32)
            four = tl.load(exponents + step)
            for p in tl.static_range(2):
                both = halves(q, p, FORMAT)
                column = step * STEP + 32 * p + place
                w = _widened(both, (four >> (8 * p)) & 0xFF, SWAP, PRODUCT)
                rows = _columns(x, live, column, inputs, EVEN, SWAP).to(PRODUCT)
                sums = _add_product(rows, w, sums, SWAP)
                w = _widened(both >> 16, (four >> (8 * p + 16)) & 0xFF, SWAP, PRODUCT)
                rows = _columns(x, live, column + 64, inputs, EVEN, SWAP).to(PRODUCT)
                sums = _add_product(rows, w, sums, SWAP)
    else:
        at = values + output * inputs + input
        for step in range(first // STEP, tl.cdiv(end, STEP)):
            column = step * STEP + lane
            if EVEN:
                w = tl.load(at + step * STEP)
            else:
                inside = input + step * STEP < inputs
                w = tl.load(at + step * STEP, mask=inside, other=0.0)
            rows = _columns(x, live, column, inputs, EVEN, SWAP).to(PRODUCT)
            sums = _add_product(rows, w.to(PRODUCT), sums, SWAP)
    return tl.trans(sums) if SWAP else sums
