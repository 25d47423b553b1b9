"""Read rows of a block-keyed cache inside a kernel, in whatever format they are stored (models/quantization/kv_codecs.py).

fp8 rows come out as bfloat16, which loses nothing: e4m3 has three fraction bits, its scales are powers of two, and the rotary
tail is bfloat16 already. Lanes that are not asked for read nothing, so that what lies there cannot matter.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl

from atom_vllm_bridge.models.ops.rows import flat_rows
from atom_vllm_bridge.models.quantization.kv_codecs import TILE, RowCodec

FORMATS = ("float32", "bfloat16", "fp8_ds_mla", "fp8_row")
# Bytes to which a format's rows must be aligned.
_ALIGNED = {"float32": 1, "bfloat16": 1, "fp8_ds_mla": 8, "fp8_row": 4}


def readable(rows: torch.Tensor, codec: RowCodec) -> bool:
    """Whether kernels can read `rows` [B, N, C] of `codec`."""
    if codec.name not in FORMATS or rows.dtype != codec.dtype or rows.stride(2) != 1:
        return False
    if codec.name == "fp8_ds_mla" and codec.dim - codec.rope_dim > 8 * TILE:
        return False
    unit = _ALIGNED[codec.name]
    parts = codec.dim - codec.rope_dim, 2 * codec.rope_dim
    places = (rows.data_ptr(), *rows.stride()[:2], *parts)
    return all(place % unit == 0 for place in places)


def layout(rows: torch.Tensor) -> dict[str, Any]:
    """How ids of `rows` become addresses: arguments `PER_BLOCK` (0: all rows are one list), `block_stride`, `ROW_STRIDE`.

    And `UNIT`, which divides all, up to 16.
    """
    flat = flat_rows(rows) is not None
    to_block = 0 if flat else rows.stride(0)
    to_row = rows.shape[2] if flat else rows.stride(1)
    return {
        "PER_BLOCK": 0 if flat else rows.shape[1],
        "block_stride": to_block,
        "ROW_STRIDE": to_row,
        "UNIT": math.gcd(to_block, to_row, 16),
    }


def format_of(codec: RowCodec) -> dict[str, Any]:
    """What a kernel must know of a codec."""
    tiles = codec.name == "fp8_ds_mla"
    dim = codec.dim - codec.rope_dim if tiles else codec.dim
    return {
        "FORMAT": codec.name,
        "DIM": codec.dim,
        "ROPE_DIM": codec.rope_dim,
        "BLOCK_D": max(TILE if tiles else 16, triton.next_power_of_2(dim)),
    }


def product_type(kernel: Any, codec: RowCodec) -> tl.dtype:
    """In what the values of rows are multiplied: float32 if stored so, else bfloat16."""
    # Triton's interpreter multiplies the bits of bfloat16 values as integers.
    if codec.name == "float32" or not isinstance(kernel, triton.JITFunction):
        return tl.float32
    return tl.bfloat16


@triton.jit
def begin(
    ids,
    block_stride,
    PER_BLOCK: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Where rows begin, in units of so many storage elements."""
    if PER_BLOCK == 0:
        return ids * (ROW_STRIDE // UNIT)
    else:
        block = ids // PER_BLOCK
        row = ids - block * PER_BLOCK
        return block * (block_stride // UNIT) + row * (ROW_STRIDE // UNIT)


@triton.jit
def read_rows(
    rows,
    at,
    UNIT: tl.constexpr,
    FORMAT: tl.constexpr,
    DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Rows that begin at `at` [E] int64, −1: none, as [E, BLOCK_D], float32 if stored so, else bfloat16; zeros where none and beyond DIM.

    Of fp8_ds_mla, which has a tail of another type, what is before it; see `read_tails`.
    """
    column = tl.arange(0, BLOCK_D)
    place = (at * UNIT)[:, None] + column[None, :]
    if FORMAT == "fp8_ds_mla":
        nope: tl.constexpr = DIM - ROPE_DIM
        mask = (at >= 0)[:, None] & (column < nope)[None, :]
        codes = tl.load(rows + place, mask=mask, other=0)
        # A row's scales, up to eight of them, are one word.
        words = rows.to(tl.pointer_type(tl.int64), bitcast=True)
        words += at * (UNIT // 8) + (nope + 2 * ROPE_DIM) // 8
        word = tl.load(words, mask=at >= 0, other=0)
        tiles: tl.constexpr = (nope + 63) // 64
        if tiles < 8:
            # What fills the word may be anything, infinity too, which times zero is not zero.
            word &= (1 << (8 * tiles)) - 1
        tile = tl.arange(0, BLOCK_D // 64)
        exponent = (word[:, None] >> (8 * tile)[None, :]) & 0xFF
        scale = (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)
        values = tl.reshape(_from_e4m3(codes), (at.shape[0], BLOCK_D // 64, 64))
        values = (values * scale[:, :, None]).to(tl.bfloat16)
        return tl.reshape(values, (at.shape[0], BLOCK_D))
    else:
        mask = (at >= 0)[:, None] & (column < DIM)[None, :]
        values = tl.load(rows + place, mask=mask, other=0)
        if FORMAT == "fp8_row":
            scales = rows.to(tl.pointer_type(tl.float32), bitcast=True)
            scales += at * (UNIT // 4) + DIM // 4
            scale = tl.load(scales, mask=at >= 0, other=0.0)
            values = (_from_e4m3(values) * scale[:, None]).to(tl.bfloat16)
        return values


@triton.jit
def read_tails(
    rows,
    at,
    UNIT: tl.constexpr,
    DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """The rotary tails [E, BLOCK_R] bfloat16 of fp8_ds_mla rows, as `read_rows`."""
    column = tl.arange(0, BLOCK_R)
    tails = rows.to(tl.pointer_type(tl.bfloat16), bitcast=True)
    tails += (DIM - ROPE_DIM) // 2
    return tl.load(
        tails + ((at * (UNIT // 2))[:, None] + column[None, :]),
        mask=(at >= 0)[:, None] & (column < ROPE_DIM)[None, :],
        other=0.0,
    )


@triton.jit
def _from_e4m3(codes):
    return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
