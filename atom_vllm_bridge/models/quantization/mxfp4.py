"""MXFP4: two e2m1 elements a byte, one E8M0 scale for each 32 inputs.

    W[i, j] = value(nibble[i, j]) · 2^(scale[i, j // 32] − 127)

A nibble is sign, two exponent bits, one mantissa bit: ±{0, 0.5, 1, 1.5, 2, 3, 4, 6} (OCP
Microscaling, section 5.3.3). The low nibble of a byte is the even column. DeepSeek-V4
stores its routed experts so, as int8.
"""

import torch
from torch.nn.functional import pad

from . import e8m0

GROUP = 32
LARGEST = 6.0
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def scale_shape(rows: int, columns: int) -> tuple[int, int]:
    """Shape of the scale of a [rows, columns] weight: a ragged end has a group too."""
    return rows, -(-columns // GROUP)


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to the nearest e2m1, ties to the even code.

    Args:
        weight: [out, in] float32, finite, `in` even.

    Returns:
        packed [out, in/2] int8 and scale [out, ⌈in/32⌉] float8_e8m0fnu.
    """
    columns = weight.shape[1]
    groups = _groups(weight.to(torch.float32))
    exponent = e8m0.fitting_exponent(groups.abs().amax(dim=2), LARGEST)
    scaled = groups * e8m0.decode(e8m0.encode(-exponent))[:, :, None]
    codes = _nearest_code(scaled).flatten(1)[:, :columns]
    return pack(codes).view(torch.int8), e8m0.encode(exponent)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Codes [out, in] of any integers → [out, in/2] uint8, the first of two in the low half."""
    return (codes[:, 0::2] | (codes[:, 1::2] << 4)).to(torch.uint8)


def dequantize(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The exact values.

    Args:
        packed: [out, in/2] int8 or uint8.
        scale: [out, ⌈in/32⌉] float8_e8m0fnu or float32.

    Returns:
        [out, in] float32.

    Raises:
        ValueError: the scale has another shape.
    """
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    if tuple(scale.shape) != scale_shape(rows, columns):
        raise ValueError(
            f"scale is {list(scale.shape)}, expected {list(scale_shape(rows, columns))} "
            f"(one scale for {GROUP} inputs of the weight's {[rows, columns]})"
        )
    pairs = _value_pairs(packed.device)
    index = packed.contiguous().view(torch.uint8).flatten().int()
    groups = _groups(pairs.index_select(0, index).view(rows, columns))
    groups *= e8m0.decode(scale)[:, :, None]
    return groups.flatten(1)[:, :columns]


def _nearest_code(scaled: torch.Tensor) -> torch.Tensor:
    """Float values in [−6, 6] → their four-bit codes (uint8).

    The grid has step 0.5 up to 2, step 1 up to 4, step 2 up to 6; codes count its points,
    so rounding half to even within a step is rounding to the even code.
    """
    magnitude = scaled.abs()
    code = torch.where(
        magnitude < 2,
        (magnitude * 2).round(),
        torch.where(magnitude < 4, 2 + magnitude.round(), 4 + (magnitude / 2).round()),
    ).to(torch.uint8)
    return code | (torch.signbit(scaled).to(torch.uint8) << 3)


def _value_pairs(device: torch.device) -> torch.Tensor:
    """[256, 2] float32: the two values that each byte holds."""
    values = torch.tensor(
        [*_MAGNITUDES, *(-m for m in _MAGNITUDES)], dtype=torch.float32, device=device
    )
    byte = torch.arange(256, device=device)
    return torch.stack([values[byte & 15], values[byte >> 4]], dim=1)


def _groups(weight: torch.Tensor) -> torch.Tensor:
    """[out, in] → [out, ⌈in/32⌉, 32], a ragged end filled with zeros."""
    rows, columns = weight.shape
    across = scale_shape(rows, columns)[1]
    if across * GROUP != columns:
        weight = pad(weight, (0, across * GROUP - columns))
    return weight.view(rows, across, GROUP)
