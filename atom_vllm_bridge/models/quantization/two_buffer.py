"""KV rows as ATOM keeps them for aiter's assembly kernels: two buffers, which the same row number addresses.

    nope, D bytes: [D − R] fp8 | for each 64 of those its E8M0 scale, twice | zeros          512 with D = 512, R = 64: 448 + 14 + 50
    rope:          [R] bfloat16                                                              128

scale = 2^⌈log2(max(amax / largest, 10⁻⁴))⌉, where largest is 448 for e4m3fn and 240 for e4m3fnuz. Its floor is the scale's own,
that of fp8_ds_mla (kv_codecs.py) the amax's; what is stored under either is read alike, so that rows of e4m3fn go from one to
the other by moving bytes. Both are exact in bfloat16: e4m3 has three fraction bits.
"""

from dataclasses import dataclass

import torch

from .fnuz import halved
from .kv_codecs import TILE, fp8_ds_mla

SCALE_FLOOR = 1e-4
COPIES = 2


@dataclass(frozen=True)
class Rows:
    """Rows in two buffers.

    Attributes:
        nope: [..., D] float8_e4m3fn or float8_e4m3fnuz; the bytes that are scales and zeros have no meaning in that type.
        rope: [..., R] bfloat16.
    """

    nope: torch.Tensor
    rope: torch.Tensor

    @property
    def dims(self) -> tuple[int, int, int]:
        """D − R, R and how many scales."""
        dim, rope = self.nope.shape[-1], self.rope.shape[-1]
        return dim - rope, rope, _tiles(dim, rope)


def encode(
    values: torch.Tensor, rope_dim: int, fp8: torch.dtype = torch.float8_e4m3fn
) -> Rows:
    """Quantise values [..., D], of which the last `rope_dim` stay bfloat16.

    Raises:
        ValueError: the others are not whole tiles of 64, or two scales for each do not fit behind them.
    """
    values = values.float()
    tiles = _tiles(values.shape[-1], rope_dim)
    nope = tiles * TILE
    head = values[..., :nope].unflatten(-1, (tiles, TILE))
    least = head.abs().amax(-1) / torch.finfo(fp8).max
    mantissa, exponent = torch.frexp(least.clamp(min=SCALE_FLOOR))
    # A float is mantissa · 2^exponent with a mantissa in [½, 1): only a power of two itself has ½.
    exponent = exponent - (mantissa == 0.5).int()
    codes = (head * torch.exp2(-exponent.float()).unsqueeze(-1)).to(fp8)
    return _rows(
        codes.flatten(-2).view(torch.uint8),
        (exponent + 127).to(torch.uint8),
        values[..., nope:].to(torch.bfloat16),
        fp8,
    )


def decode(rows: Rows) -> torch.Tensor:
    """[..., D] float32, which bfloat16 holds exactly."""
    nope, _, tiles = rows.dims
    scale = _scales(rows).view(torch.float8_e8m0fnu).float()
    head = rows.nope[..., :nope].float().unflatten(-1, (tiles, TILE))
    head = (head * scale.unsqueeze(-1)).flatten(-2)
    return torch.cat((head, rows.rope.float()), -1)


def from_ds_mla(
    rows: torch.Tensor,
    dim: int,
    rope_dim: int,
    fp8: torch.dtype = torch.float8_e4m3fn,
) -> Rows:
    """Rows of fp8_ds_mla, [..., width] uint8, in two buffers, exactly; for e4m3fnuz with scales twice as large.

    Raises:
        ValueError: as `encode`.
    """
    tiles = _tiles(dim, rope_dim)
    nope = tiles * TILE
    end = nope + 2 * rope_dim
    codes, scales = rows[..., :nope], rows[..., end : end + tiles]
    if fp8 == torch.float8_e4m3fnuz:
        codes, scales = halved(codes).view(torch.uint8), scales + 1
    rope = rows[..., nope:end].contiguous().view(torch.bfloat16)
    return _rows(codes, scales, rope, fp8)


def to_ds_mla(rows: Rows) -> torch.Tensor:
    """[..., width] uint8 rows of fp8_ds_mla, exactly.

    Raises:
        ValueError: rows of e4m3fnuz, whose largest magnitude has no e4m3fn of the same tile's scale; decode and encode them.
    """
    nope, rope, tiles = rows.dims
    if rows.nope.dtype != torch.float8_e4m3fn:
        raise ValueError(
            f"kv cache: rows of {rows.nope.dtype} have no exact form in fp8_ds_mla, which is e4m3fn; decode and encode them."
        )
    width = fp8_ds_mla(nope + rope, rope).width
    out = rows.rope.new_zeros((*rows.nope.shape[:-1], width), dtype=torch.uint8)
    out[..., :nope] = rows.nope.view(torch.uint8)[..., :nope]
    end = nope + 2 * rope
    out[..., nope:end] = rows.rope.contiguous().view(torch.uint8)
    out[..., end : end + tiles] = _scales(rows)
    return out


def _scales(rows: Rows) -> torch.Tensor:
    """[..., tiles] E8M0 bytes: the first of each two."""
    nope, _, tiles = rows.dims
    bytes_ = rows.nope.view(torch.uint8)
    return bytes_[..., nope : nope + COPIES * tiles : COPIES].contiguous()


def _rows(
    codes: torch.Tensor, scales: torch.Tensor, rope: torch.Tensor, fp8: torch.dtype
) -> Rows:
    twice = scales.repeat_interleave(COPIES, -1)
    zeros = scales.new_zeros((*scales.shape[:-1], rope.shape[-1] - twice.shape[-1]))
    nope = torch.cat((codes, twice, zeros), -1).view(fp8)
    return Rows(nope, rope.contiguous())


def _tiles(dim: int, rope_dim: int) -> int:
    tiles, rest = divmod(dim - rope_dim, TILE)
    if rest or COPIES * tiles > rope_dim:
        raise ValueError(
            f"kv cache: rows of {dim} with {rope_dim} rotated do not fit two buffers, which want whole tiles of {TILE} "
            f"and {COPIES} bytes for each in the place of the rotated values."
        )
    return tiles
