"""Read rows of a block-keyed cache inside a kernel, in whatever format they are stored (models/quantization/kv_codecs.py).

fp8 rows come out as bfloat16, which loses nothing: e4m3 has three fraction bits, its scales are powers of two, and the rotary
tail is bfloat16 already. Lanes that are not asked for read nothing, so that what lies there cannot matter.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from atom_vllm_bridge.models.ops.rows import flat_rows
from atom_vllm_bridge.models.quantization.kv_codecs import TILE, RowCodec

FORMATS = ("float32", "bfloat16", "fp8_ds_mla", "fp8_row")
# Bytes to which a format's rows must be aligned.
_ALIGNED = {"float32": 1, "bfloat16": 1, "fp8_ds_mla": 2, "fp8_row": 4}


def readable(rows: torch.Tensor, codec: RowCodec) -> bool:
    """Whether kernels can read `rows` [B, N, C] of `codec`."""
    if codec.name not in FORMATS or rows.dtype != codec.dtype or rows.stride(2) != 1:
        return False
    unit = _ALIGNED[codec.name]
    places = (rows.data_ptr(), *rows.stride()[:2], codec.dim - codec.rope_dim)
    return all(place % unit == 0 for place in places)


def layout(rows: torch.Tensor) -> dict[str, Any]:
    """How ids of `rows` become addresses: arguments `PER_BLOCK` (0: all rows are one list), `block_stride`, `ROW_STRIDE`."""
    flat = flat_rows(rows) is not None
    return {
        "PER_BLOCK": 0 if flat else rows.shape[1],
        "block_stride": 0 if flat else rows.stride(0),
        "ROW_STRIDE": rows.shape[2] if flat else rows.stride(1),
    }


def format_of(codec: RowCodec) -> dict[str, Any]:
    """What a kernel must know of a codec."""
    padded = max(16, triton.next_power_of_2(codec.dim))
    return {
        "FORMAT": codec.name,
        "DIM": codec.dim,
        "ROPE_DIM": codec.rope_dim,
        "BLOCK_D": max(TILE, padded) if codec.name == "fp8_ds_mla" else padded,
    }


def product_type(kernel: Any, codec: RowCodec) -> tl.dtype:
    """In what the values of rows are multiplied: float32 if stored so, else bfloat16."""
    # Triton's interpreter multiplies the bits of bfloat16 values as integers.
    if codec.name == "float32" or not isinstance(kernel, triton.JITFunction):
        return tl.float32
    return tl.bfloat16


@triton.jit
def _offset(
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
    ids,
    wanted,
    block_stride,
    PER_BLOCK: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    FORMAT: tl.constexpr,
    DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Rows ids [E] int64 as [E, BLOCK_D], float32 if stored so, else bfloat16; zeros where not wanted [E] and beyond DIM."""
    if FORMAT == "fp8_ds_mla":
        return _read_tiles(
            rows,
            ids,
            wanted,
            block_stride,
            PER_BLOCK,
            ROW_STRIDE,
            DIM - ROPE_DIM,
            ROPE_DIM,
            BLOCK_D,
        )
    else:
        column = tl.arange(0, BLOCK_D)[None, :]
        at = _offset(ids, block_stride, PER_BLOCK, ROW_STRIDE, 1)[:, None] + column
        mask = wanted[:, None] & (column < DIM)
        if FORMAT == "fp8_row":
            values = _from_e4m3(tl.load(rows + at, mask=mask, other=0))
            scales = rows.to(tl.pointer_type(tl.float32), bitcast=True)
            to_scale = _offset(ids, block_stride, PER_BLOCK, ROW_STRIDE, 4)
            scale = tl.load(scales + to_scale + DIM // 4, mask=wanted, other=0.0)
            return (values * scale[:, None]).to(tl.bfloat16)
        else:
            return tl.load(rows + at, mask=mask, other=0.0)


@triton.jit
def _read_tiles(
    rows,
    ids,
    wanted,
    block_stride,
    PER_BLOCK: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    tile = tl.arange(0, BLOCK_D // 64)
    column = tile[:, None] * 64 + tl.arange(0, 64)[None, :]
    at = _offset(ids, block_stride, PER_BLOCK, ROW_STRIDE, 1)
    scaled = wanted[:, None, None] & (column < NOPE)[None, :, :]
    codes = tl.load(
        rows + (at[:, None, None] + column[None, :, :]), mask=scaled, other=0
    )
    exponent = tl.load(
        rows + (at[:, None] + (NOPE + 2 * ROPE_DIM) + tile[None, :]),
        mask=wanted[:, None] & (tile * 64 < NOPE)[None, :],
        other=0,
    )
    scale = (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    values = (_from_e4m3(codes) * scale[:, :, None]).to(tl.bfloat16)
    tails = rows.to(tl.pointer_type(tl.bfloat16), bitcast=True)
    to_tail = _offset(ids, block_stride, PER_BLOCK, ROW_STRIDE, 2) + NOPE // 2
    tail = (column >= NOPE) & (column < NOPE + ROPE_DIM)
    values += tl.load(
        tails + (to_tail[:, None, None] + (column - NOPE)[None, :, :]),
        mask=wanted[:, None, None] & tail[None, :, :],
        other=0.0,
    )
    return tl.reshape(values, (ids.shape[0], BLOCK_D))


@triton.jit
def _from_e4m3(codes):
    return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
