"""ops/torch/write_keys.py in one kernel: a key is read once, normed, turned and encoded in registers, and stored where it belongs.

A program, which is one warp, takes one key. Bytes of two and more are stored one by one, since rows of bytes need not be
aligned to them.
"""

import torch
import triton
import triton.language as tl

from atom_vllm_bridge.models.ops.gradients import trained
from atom_vllm_bridge.models.ops.rows import pitch
from atom_vllm_bridge.models.ops.torch import write_keys as reference
from atom_vllm_bridge.models.ops.triton.rotary import angles, turn_tail
from atom_vllm_bridge.models.ops.triton.write_rows import row_offset
from atom_vllm_bridge.models.quantization import kv_codecs
from atom_vllm_bridge.models.quantization.kv_codecs import RowCodec

FORMATS = ("float32", "bfloat16", "fp8_ds_mla", "fp8_row")
AMAX_FLOOR = tl.constexpr(kv_codecs.AMAX_FLOOR)
E4M3_MAX = tl.constexpr(kv_codecs.E4M3_MAX)


@triton.jit
def scale_exponent(amax):
    """⌈log2(max(amax, floor) / 448)⌉ as int32, exactly; amax is a tensor of float32."""
    # Plain division may be off by a bit, which matters at powers of two.
    largest = tl.full(amax.shape, E4M3_MAX, tl.float32)
    bits = tl.div_rn(tl.maximum(amax, AMAX_FLOOR), largest).to(tl.int32, bitcast=True)
    return ((bits >> 23) & 255) - 127 + ((bits & 0x7FFFFF) != 0).to(tl.int32)


@triton.jit
def e4m3_bits(x):
    """Bits of the nearest e4m3 of float32 x, ties to even; NaN beyond the largest. Arithmetic that every GPU has."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x7F800000)
    normal = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    normal = tl.minimum(normal - (120 << 3), 0x7F)
    # Below 2^-6 values are 2^-9 apart, as floats from 2^14 on are.
    raised = magnitude.to(tl.float32, bitcast=True) + 16384.0
    small = raised.to(tl.int32, bitcast=True) & 0x7FFFFF
    code = tl.where(magnitude < 0x3C800000, small, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _store_fp8_ds_mla(
    key, row, dim, rope_dim, width, TILE: tl.constexpr, BLOCK: tl.constexpr
):
    column = tl.arange(0, BLOCK)
    nope = dim - rope_dim
    head = tl.reshape(tl.where(column < nope, key, 0.0), (BLOCK // TILE, TILE))
    exponent = scale_exponent(tl.max(tl.abs(head), 1))
    inverse = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    code = tl.reshape(e4m3_bits(head * inverse[:, None]), (BLOCK,))
    tl.store(row + column, code, mask=column < nope)
    tail = key.to(tl.bfloat16).to(tl.uint16, bitcast=True)
    at = row + nope + 2 * (column - nope)
    in_tail = (column >= nope) & (column < dim)
    tl.store(at, (tail & 255).to(tl.uint8), mask=in_tail)
    tl.store(at + 1, (tail >> 8).to(tl.uint8), mask=in_tail)
    tiles = tl.cdiv(nope, TILE)
    tile = tl.arange(0, BLOCK // TILE)
    scales = row + nope + 2 * rope_dim
    tl.store(scales + tile, (exponent + 127).to(tl.uint8), mask=tile < tiles)
    fill = tiles + tl.arange(0, 8)
    zero = tl.zeros((8,), tl.uint8)
    tl.store(scales + fill, zero, mask=nope + 2 * rope_dim + fill < width)


@triton.jit
def _store_fp8_row(key, row, dim, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    group = tl.reshape(key, (1, BLOCK))
    exponent = scale_exponent(tl.max(tl.abs(group), 1))
    inverse = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    code = tl.reshape(e4m3_bits(group * inverse[:, None]), (BLOCK,))
    tl.store(row + column, code, mask=column < dim)
    scale = ((exponent + 127) << 23)[:, None]
    byte = tl.arange(0, 4)[None, :]
    tl.store(row + dim + byte, ((scale >> (8 * byte)) & 255).to(tl.uint8))


@triton.jit
def _write_keys(
    x,
    weight,
    rotation,
    rows,
    ids,
    eps,
    dim,
    pairs,
    rope_dim,
    width,
    to_key,
    per_block,
    to_block,
    to_row,
    FORMAT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    m = tl.program_id(0).to(tl.int64)
    id = tl.load(ids + m)
    if id < 0:
        return
    column = tl.arange(0, BLOCK)
    live = column < dim
    key = tl.load(x + m * to_key + column, mask=live, other=0.0).to(tl.float32)
    gain = tl.load(weight + column, mask=live, other=0.0)
    key = key * tl.rsqrt(tl.sum(key * key, 0) / dim + eps) * gain
    key = turn_tail(key, rotation + m * 2 * pairs, dim, pairs, BLOCK)
    row = rows + row_offset(id, per_block, to_block, to_row)
    if FORMAT == "fp8_ds_mla":
        _store_fp8_ds_mla(key, row, dim, rope_dim, width, TILE, BLOCK)
    elif FORMAT == "fp8_row":
        _store_fp8_row(key, row, dim, BLOCK)
    else:
        tl.store(row + column, key.to(rows.dtype.element_ty), mask=live)


def write_keys(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    rotation: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
    codec: RowCodec,
) -> None:
    dim = x.shape[1]
    if (
        codec.name not in FORMATS
        or dim % 2
        or x.stride(1) != 1
        or rows.stride(2) != 1
        or trained(x, weight)
    ):
        reference.write_keys(x, weight, eps, rotation, rows, ids, codec)
        return
    if not x.numel():
        return
    block = triton.next_power_of_2(dim)
    _write_keys[(len(ids),)](
        x,
        weight,
        angles(rotation),
        rows,
        ids.contiguous(),
        eps,
        dim,
        rotation.shape[1],
        codec.rope_dim,
        codec.width,
        x.stride(0),
        pitch(rows),
        rows.stride(0),
        rows.stride(1),
        FORMAT=codec.name,
        TILE=min(kv_codecs.TILE, block),
        BLOCK=block,
        num_warps=1,
    )
