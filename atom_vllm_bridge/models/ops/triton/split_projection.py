"""Multiply every row with a small float32 matrix, cut along the inputs so that one token alone fills a GPU.

A program takes a tile of tokens, a tile of outputs and a range of inputs, and writes its partial sums beside those of the
other ranges; the kernel that needs the products adds them, in a fixed order. Rows in bfloat16 are multiplied by the matrix
split into three bfloat16 terms, which hold every bit of a float32, on matrix units; nothing is lost by that.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

# Programs wanted: a few more than a large GPU has processors.
PROGRAMS = 160
# From so many rows on, a library's product of all inputs is faster.
MANY_ROWS = 1024


@triton.jit
def _dot(x, w, sums, TERMS: tl.constexpr):
    """sums + x · w for w in float32, to float32's precision."""
    if TERMS:
        high = w.to(tl.bfloat16)
        rest = w - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        sums = tl.dot(x, low, sums)
        sums = tl.dot(x, middle, sums)
        sums = tl.dot(x, high, sums)
    else:
        sums = tl.dot(x.to(tl.float32), w, sums, input_precision="ieee")
    return sums


@triton.jit(do_not_specialize=["tokens", "splits", "per_split"])
def _partials(
    x,
    w,
    out,
    tokens,
    inputs,
    outputs,
    width,
    to_token,
    splits,
    per_split,
    SQUARES: tl.constexpr,
    TERMS: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    split = tl.program_id(2)
    real = token < tokens
    token = token.to(tl.int64)
    sums = tl.zeros((TOKENS, OUTPUTS), tl.float32)
    square = tl.zeros((TOKENS,), tl.float32)
    first = split * per_split
    for k in range(first, tl.minimum(first + per_split, inputs), INPUTS):
        column = k + tl.arange(0, INPUTS)
        live = column < inputs
        rows = tl.load(
            x + token[:, None] * to_token + column[None, :],
            mask=real[:, None] & live[None, :],
            other=0.0,
        )
        matrix = tl.load(
            w + output[None, :] * inputs + column[:, None],
            mask=live[:, None] & (output < outputs)[None, :],
            other=0.0,
        )
        sums = _dot(rows, matrix, sums, TERMS)
        if SQUARES:
            wide = rows.to(tl.float32)
            square += tl.sum(wide * wide, 1)
    if SQUARES:
        sums = tl.where((output == outputs)[None, :], square[:, None], sums)
    tl.store(
        out + (token[:, None] * splits + split) * width + output[None, :],
        sums,
        mask=real[:, None] & (output < width)[None, :],
    )


@dataclass(frozen=True)
class Partials:
    """Products that are still to be added.

    Attributes:
        sums: [T, splits, width] float32; column `outputs` has the partial sums of squares, if they were asked for.
        splits: ranges of inputs.
        width: outputs, and what fills a tile.
    """

    sums: torch.Tensor
    splits: int
    width: int


def split_projection(
    x: torch.Tensor, w: torch.Tensor, squares: bool, most: int
) -> Partials:
    """Project rows.

    Args:
        x: [T, a], bfloat16 or float32, with columns side by side; T is not 0.
        w: [b, a] float32, contiguous.
        squares: whether to sum the squares of each row too.
        most: ranges of inputs that the caller adds up.
    """
    tokens, inputs = x.shape
    outputs = w.shape[0]
    if tokens >= MANY_ROWS and x.dtype == torch.bfloat16 and x.is_cuda:
        return _whole(x, w, squares)
    columns = max(16, min(64, triton.next_power_of_2(outputs + squares)))
    width = triton.cdiv(outputs + squares, columns) * columns
    many = tokens > 64
    rows, step = (64, 64) if many else (16, 128)
    tiles = triton.cdiv(tokens, rows), width // columns
    steps = triton.cdiv(inputs, step)
    wanted = max(1, min(most, PROGRAMS // (tiles[0] * tiles[1])))
    per_split = triton.cdiv(steps, wanted) * step
    splits = triton.cdiv(inputs, per_split)
    sums = torch.empty((tokens, splits, width), dtype=torch.float32, device=x.device)
    _partials[(*tiles, splits)](
        x,
        w,
        sums,
        tokens,
        inputs,
        outputs,
        width,
        x.stride(0),
        splits,
        per_split,
        SQUARES=squares,
        # The interpreter, which runs on CPUs, cannot multiply bfloat16.
        TERMS=x.dtype == torch.bfloat16 and x.is_cuda,
        TOKENS=rows,
        OUTPUTS=columns,
        INPUTS=step,
        num_warps=4,
        num_stages=2,
    )
    return Partials(sums, splits, width)


def _whole(x: torch.Tensor, w: torch.Tensor, squares: bool) -> Partials:
    """The same of one range: bfloat16 products with the three terms side by side, float32 sums."""
    terms, rest = [], w
    for _ in range(3):
        terms.append(rest.bfloat16())
        rest = rest - terms[-1].float()
    products = torch.mm(x, torch.cat(terms).mT, out_dtype=torch.float32)
    high, middle, low = products.split(w.shape[0], 1)
    sums = low.add_(middle).add_(high)
    if squares:
        norm = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=torch.float32)
        sums = torch.cat((sums, norm.square_()), 1)
    return Partials(sums.contiguous().unsqueeze(1), 1, sums.shape[1])
