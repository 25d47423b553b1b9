"""e4m3fnuz, AMD's fp8 before CDNA 4: the bits of e4m3fn mean half the value, there is one zero, and 0x80 is the only NaN."""

import torch

_NEGATIVE_ZERO = 0x80


def halved(codes: torch.Tensor) -> torch.Tensor:
    """e4m3fn → e4m3fnuz of half the value, exactly; so that a scale twice as large gives the value again.

    Args:
        codes: float8_e4m3fn, or its bits as uint8, of any shape; no NaN.

    Returns:
        float8_e4m3fnuz in the same shape.
    """
    bits = codes.view(torch.uint8)
    return bits.masked_fill(bits == _NEGATIVE_ZERO, 0).view(torch.float8_e4m3fnuz)
