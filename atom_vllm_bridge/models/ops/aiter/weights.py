"""Matrices that came quantised, as aiter's products read them: put into its order in their own memory, when first multiplied.

Nothing is held twice, so that no other provider's product can read such a matrix afterwards (`Band.repacked`). The first step,
which no graph captures, does it.

    fp8    codes [R, a] of what the device multiplies, and a scale for 128 × 128 of them
    mxfp4  two codes a byte [R, a/2] and E8M0 bytes [R, a/32], both in tiles as CDNA 4's matrix instructions take them
"""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from atom_vllm_bridge.models.quantization import mxfp4
from atom_vllm_bridge.models.quantization.block_fp8 import BLOCK
from atom_vllm_bridge.models.quantization.fnuz import halved
from atom_vllm_bridge.models.quantization.kept import Band
from atom_vllm_bridge.models.quantization.planes import FP8, MXFP4, WORDS

# Rows that are put into order at once.
ROWS = 1024
# Rows and bytes of a tile of weights, and rows and columns of one of scales.
WEIGHT_TILE, SCALE_TILE = (16, 32), (32, 8)


@dataclass(frozen=True)
class Fp8:
    """Matrices of fp8.

    Attributes:
        codes: [R, a] in the device's type.
        exponents: [R/128, a/128] E8M0 bytes of what a code is to be multiplied with.
    """

    codes: torch.Tensor
    exponents: torch.Tensor

    @property
    def scales(self) -> torch.Tensor:
        """[R/128, a/128] float32."""
        return self.exponents.view(torch.float8_e8m0fnu).float()


# Exponents of whole bands; None: not in blocks of 128 × 128.
_exponents: WeakKeyDictionary[Band, torch.Tensor | None] = WeakKeyDictionary()


def fp8(band: Band, kind: torch.dtype) -> Fp8 | None:
    """A band's matrix, or None where it does not consist of blocks with a scale each; then nothing has been changed."""
    if band.format != "fp8" or band.inputs % BLOCK or band.rows % BLOCK:
        return None
    whole = band.whole
    if not whole.repacked:
        _exponents[whole] = _blocks(whole, kind)
        if _exponents[whole] is not None:
            _order_fp8(whole, kind)
    exponents = _exponents.get(whole)
    if exponents is None or band.start % BLOCK:
        return None
    codes, _ = band.memory
    first = band.start // BLOCK
    return Fp8(codes.view(kind), exponents[first : first + band.rows // BLOCK])


def _blocks(band: Band, kind: torch.dtype) -> torch.Tensor | None:
    _, scales = band.memory
    if band.rows % BLOCK:
        return None
    each = scales[:, : band.inputs // WORDS]
    blocks = each.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK // WORDS))
    first = blocks[:, :1, :, :1]
    if not bool((blocks == first).all()):
        return None
    exponents = first.flatten(1) - FP8.offset
    # The same bits mean half there.
    return exponents + 1 if kind == torch.float8_e4m3fnuz else exponents


def _order_fp8(band: Band, kind: torch.dtype) -> None:
    words, _ = band.memory
    for rows in words.split(ROWS):
        codes = FP8.unpack(rows).to(torch.uint8)
        if kind == torch.float8_e4m3fnuz:
            codes = halved(codes).view(torch.uint8)
        rows.copy_(codes.view(torch.int32))
    band.repacked = True


def tiled(weights: torch.Tensor) -> torch.Tensor:
    """Bytes [R, C] in tiles of 16 rows and 32 bytes, one tile after another; in a tile, 16 bytes of each row, then the other 16."""
    rows, columns = WEIGHT_TILE
    half = columns // 2
    count, width = weights.shape
    tiles = weights.view(count // rows, rows, width // columns, 2, half)
    return tiles.permute(0, 2, 3, 1, 4).reshape(count, width)


def tiled_scales(scales: torch.Tensor) -> torch.Tensor:
    """Bytes [R, C] in tiles of 32 rows and 8 columns; in a tile, of column c and row r: 4 columns, 16 rows, 2 columns, 2 rows outwards in."""
    rows, columns = SCALE_TILE
    count, width = scales.shape
    tiles = scales.view(count // rows, 2, rows // 2, width // columns, 2, columns // 2)
    return tiles.permute(0, 3, 5, 2, 4, 1).reshape(count, width)


def fits_mxfp4(band: Band) -> bool:
    """Whether rows and columns are whole tiles, so that the order fits into the memory."""
    rows = 8 * SCALE_TILE[0]
    return (
        band.format == "mxfp4"
        and band.rows % rows == 0
        and band.inputs % MXFP4.step == 0
        and band.whole is band
    )


def mxfp4_tiles(band: Band) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [R, a/2] uint8 and scales [R, a/32] uint8 of a band that `fits_mxfp4`, in tiles."""
    words, scales = band.memory
    if not band.repacked:
        for part in range(0, band.rows, ROWS):
            rows = words[part : part + ROWS]
            packed = mxfp4.pack(MXFP4.unpack(rows))
            rows.copy_(tiled(packed).view(torch.int32))
        scales.copy_(tiled_scales(scales - MXFP4.offset))
        band.repacked = True
    return words.view(torch.uint8), scales
