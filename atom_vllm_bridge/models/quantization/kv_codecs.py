"""How one row of a cache is stored: a value vector of floats ↔ a row of the storage dtype.

| codec        | KV row (window, compressed)                                         | indexer row                        |
|--------------|----------------------------------------------------------------------|------------------------------------|
| float32/bf16 | the values                                                           | the values                         |
| fp8_ds_mla   | e4m3 without rotary tail │ bf16 tail │ a scale byte for 64 values │ pad | e4m3 │ one float32 scale            |

Error of fp8_ds_mla: e4m3 has 3 fraction bits, so a value v of a tile with scale s is off by at most max(|v| / 16, s / 1024),
where s is the power of two with amax / 448 ≤ s < amax / 224; the bf16 tail by |v| / 256.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

E4M3_MAX = 448.0
# Below this a tile's scale no longer shrinks, so that a tile of zeros has one.
AMAX_FLOOR = 1e-4
TILE = 64


@dataclass(frozen=True)
class RowCodec:
    """Storage of one kind of row.

    Attributes:
        name: "float32" or "bfloat16" (the values themselves), "fp8_ds_mla" or "fp8_row". A kernel that reads or writes rows
            itself goes by it, and takes `encode` and `decode` for a name that it does not know.
        dim: D, values of a row.
        rope_dim: how many of them, at the end, fp8_ds_mla keeps in bfloat16; 0 for the others.
        width: elements of a stored row.
        dtype: storage dtype.
        encode: float32 [..., D] → storage [..., width].
        decode: storage [..., width] → float32 [..., D].
    """

    name: str
    dim: int
    rope_dim: int
    width: int
    dtype: torch.dtype
    encode: Callable[[torch.Tensor], torch.Tensor]
    decode: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class KVCodec:
    """Storage of a model's rows.

    Attributes:
        name: "float32", "bfloat16" or "fp8_ds_mla".
        kv: rows of window and compressed caches.
        index: rows of the indexer's cache.
    """

    name: str
    kv: RowCodec
    index: RowCodec


class HeadDims(Protocol):
    """The dimensions that decide a row's layout; a model config has them."""

    @property
    def head_dim(self) -> int: ...
    @property
    def qk_rope_head_dim(self) -> int: ...
    @property
    def index_head_dim(self) -> int: ...


_NAMES = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "fp8": "fp8_ds_mla",
    "fp8_e4m3": "fp8_ds_mla",
    "fp8_ds_mla": "fp8_ds_mla",
}


def kv_codec(name: str, dtype: torch.dtype, dims: HeadDims) -> KVCodec:
    """The codec that a cache dtype asks for.

    Args:
        name: "auto" (the model's dtype), "float32", "bfloat16" (or "bf16"), "fp8_ds_mla" (or "fp8", "fp8_e4m3").
        dtype: the model's.
        dims: a model config, for its head sizes.

    Raises:
        ValueError: no such codec.
    """
    if name == "auto":
        name = str(dtype).removeprefix("torch.")
    if name not in _NAMES:
        raise ValueError(
            f"kv cache: dtype {name!r} is not on offer; choose auto or one of {', '.join(_NAMES)}."
        )
    name = _NAMES[name]
    if name == "fp8_ds_mla":
        return KVCodec(
            name,
            fp8_ds_mla(dims.head_dim, dims.qk_rope_head_dim),
            fp8_row(dims.index_head_dim),
        )
    storage = {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
    return KVCodec(name, raw(dims.head_dim, storage), raw(dims.index_head_dim, storage))


def raw(dim: int, dtype: torch.dtype) -> RowCodec:
    """The values themselves, rounded to `dtype`."""
    return RowCodec(
        str(dtype).removeprefix("torch."),
        dim,
        0,
        dim,
        dtype,
        lambda values: values.to(dtype),
        lambda rows: rows.float(),
    )


def fp8_ds_mla(dim: int, rope_dim: int) -> RowCodec:
    """e4m3 values in tiles of 64 with a power-of-two scale each; the rotary tail in bf16.

    Bytes of a row: [dim − rope_dim] e4m3 | [rope_dim] bf16 | one byte a tile, scale = 2^(byte − 127) | zeros up to a multiple
    of 8. With 512 and 64: 448 + 128 + 7 + 1 = 584.
    """
    nope = dim - rope_dim
    tiles = -(-nope // TILE)
    scales = nope + 2 * rope_dim
    width = -(-(scales + tiles) // 8) * 8
    fill = tiles * TILE - nope

    def encode(values: torch.Tensor) -> torch.Tensor:
        values = values.float()
        row = values.new_zeros((*values.shape[:-1], width), dtype=torch.uint8)
        head = torch.nn.functional.pad(values[..., :nope], (0, fill))
        head = head.unflatten(-1, (tiles, TILE))
        exponent = _scale_exponent(head.abs().amax(-1))
        head = head * _power_of_two(-exponent).unsqueeze(-1)
        head = head.to(torch.float8_e4m3fn)
        row[..., :nope] = head.view(torch.uint8).flatten(-2)[..., :nope]
        tail = values[..., nope:].to(torch.bfloat16).contiguous()
        row[..., nope:scales] = tail.view(torch.uint8)
        row[..., scales : scales + tiles] = (exponent + 127).to(torch.uint8)
        return row

    def decode(row: torch.Tensor) -> torch.Tensor:
        values = torch.empty(
            (*row.shape[:-1], dim), dtype=torch.float32, device=row.device
        )
        exponent = row[..., scales : scales + tiles].int() - 127
        scale = _power_of_two(exponent).repeat_interleave(TILE, -1)[..., :nope]
        head = row[..., :nope].view(torch.float8_e4m3fn).float()
        torch.mul(head, scale, out=values[..., :nope])
        tail = row[..., nope:scales].contiguous().view(torch.bfloat16)
        values[..., nope:] = tail
        return values

    return RowCodec("fp8_ds_mla", dim, rope_dim, width, torch.uint8, encode, decode)


def fp8_row(dim: int) -> RowCodec:
    """e4m3 values with one float32 scale, a power of two, in the row's last four bytes. With 128: 132 bytes."""

    def encode(values: torch.Tensor) -> torch.Tensor:
        exponent = _scale_exponent(values.float().abs().amax(-1, keepdim=True))
        codes = (values * _power_of_two(-exponent)).to(torch.float8_e4m3fn)
        scale = _power_of_two(exponent)
        return torch.cat((codes.view(torch.uint8), scale.view(torch.uint8)), -1)

    def decode(row: torch.Tensor) -> torch.Tensor:
        scale = row[..., dim:].contiguous().view(torch.float32)
        return row[..., :dim].view(torch.float8_e4m3fn).float() * scale

    return RowCodec("fp8_row", dim, 0, dim + 4, torch.uint8, encode, decode)


def _scale_exponent(amax: torch.Tensor) -> torch.Tensor:
    """⌈log2(max(amax, floor) / 448)⌉ as int32, exactly."""
    mantissa, exponent = torch.frexp(amax.clamp(min=AMAX_FLOOR) / E4M3_MAX)
    # A float is mantissa · 2^exponent with a mantissa in [½, 1): only a power of two itself has ½.
    return exponent - (mantissa == 0.5).int()


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent as float32, exactly, for int32 exponents of normal numbers."""
    return ((exponent + 127) << 23).view(torch.float32)
