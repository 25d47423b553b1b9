"""Block fp8: e4m3 elements, one power-of-two scale for each 128 × 128 block.

    W[i, j] = q[i, j] · scale[i // 128, j // 128]

DeepSeek-V4 stores its projections so (and Flash-Base its experts too); the scale is E8M0
on Flash and Pro, and the same power of two held in float32 on Flash-Base. An e4m3 value
times a power of two has at most four significant bits: bfloat16 holds it exactly.
"""

import torch
from torch.nn.functional import pad

from . import e8m0

BLOCK = 128
LARGEST = 448.0


def scale_shape(rows: int, columns: int) -> tuple[int, int]:
    """Shape of the scale of a [rows, columns] weight: ragged edges have a block too."""
    return -(-rows // BLOCK), -(-columns // BLOCK)


def quantize(
    weight: torch.Tensor, scale_dtype: torch.dtype = torch.float8_e8m0fnu
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to the nearest e4m3, ties to even.

    Args:
        weight: [out, in] float32, finite.
        scale_dtype: float8_e8m0fnu or float32; the values are the same.

    Returns:
        q [out, in] float8_e4m3fn and scale [⌈out/128⌉, ⌈in/128⌉] in scale_dtype.
    """
    rows, columns = weight.shape
    blocks = _blocks(weight.to(torch.float32))
    exponent = e8m0.fitting_exponent(blocks.abs().amax(dim=(1, 3)), LARGEST)
    scaled = blocks * e8m0.decode(e8m0.encode(-exponent))[:, None, :, None]
    q = scaled.flatten(2).flatten(0, 1)[:rows, :columns].to(torch.float8_e4m3fn)
    scale = e8m0.encode(exponent)
    if scale_dtype != scale.dtype:
        scale = e8m0.decode(scale).to(scale_dtype)
    return q.contiguous(), scale


def dequantize(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The exact values.

    Args:
        q: [out, in] float8_e4m3fn.
        scale: [⌈out/128⌉, ⌈in/128⌉] float8_e8m0fnu or float32.

    Returns:
        [out, in] float32.

    Raises:
        ValueError: the scale has another shape.
    """
    rows, columns = q.shape
    if tuple(scale.shape) != scale_shape(rows, columns):
        raise ValueError(
            f"scale is {list(scale.shape)}, expected {list(scale_shape(rows, columns))} "
            f"(one scale for {BLOCK} × {BLOCK} of the weight's {list(q.shape)})"
        )
    blocks = _blocks(q.to(torch.float32))
    blocks *= e8m0.decode(scale)[:, None, :, None]
    return blocks.flatten(2).flatten(0, 1)[:rows, :columns]


def _blocks(weight: torch.Tensor) -> torch.Tensor:
    """[out, in] → [⌈out/128⌉, 128, ⌈in/128⌉, 128], ragged edges filled with zeros."""
    rows, columns = weight.shape
    down, across = scale_shape(rows, columns)
    if (down * BLOCK, across * BLOCK) != (rows, columns):
        weight = pad(weight, (0, across * BLOCK - columns, 0, down * BLOCK - rows))
    return weight.view(down, BLOCK, across, BLOCK)
