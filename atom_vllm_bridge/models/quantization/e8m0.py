"""E8M0: a power of two in one byte, value = 2^(byte − 127); byte 255 is NaN.

The OCP Microscaling specification (v1.0, section 5.4.1) defines the format. Both weight
formats of DeepSeek-V4 scale their blocks with it.
"""

import math

import torch

BIAS = 127


def fitting_exponent(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """The smallest k with amax ≤ largest · 2^k, so that nothing saturates.

    Args:
        amax: float32, any shape, ≥ 0: the largest magnitude of each block.
        largest: the largest magnitude of the element format (448 for e4m3, 6 for e2m1).

    Returns:
        int32 in amax's shape, clamped to [−127, 127]; 0 for an empty (all zero) block.
    """
    mantissa, exponent = torch.frexp(amax)
    largest_mantissa, largest_exponent = math.frexp(largest)
    k = exponent - largest_exponent + (mantissa > largest_mantissa)
    return torch.where(amax == 0, 0, k).clamp(-BIAS, BIAS).to(torch.int32)


def encode(exponent: torch.Tensor) -> torch.Tensor:
    """int32 exponents in [−127, 127] → float8_e8m0fnu of the same shape."""
    return (exponent + BIAS).to(torch.uint8).view(torch.float8_e8m0fnu)


def decode(scale: torch.Tensor) -> torch.Tensor:
    """float8_e8m0fnu (or float32) → float32 of the same shape, exactly."""
    return scale.to(torch.float32)
