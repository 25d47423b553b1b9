"""Turning pairs of neighbouring values inside a kernel: (a, b) ↦ (a cos − b sin, a sin + b cos)."""

import torch
import triton
import triton.language as tl


@triton.jit
def turn_tail(x, rotation, dim, pairs, BLOCK: tl.constexpr):
    """A vector x [BLOCK] float32, of which `dim` values count, with its last 2 · `pairs` turned.

    `rotation` points at (cos, sin) of the first of its pairs; `dim` is even.
    """
    even, odd = tl.split(tl.reshape(x, (BLOCK // 2, 2)))
    pair = tl.arange(0, BLOCK // 2) - (dim // 2 - pairs)
    turned = (pair >= 0) & (pair < pairs)
    cos = tl.load(rotation + 2 * pair, mask=turned, other=1.0)
    sin = tl.load(rotation + 2 * pair + 1, mask=turned, other=0.0)
    # A pair that is not turned is kept as it is: infinity times a sine of zero would not be.
    first = tl.where(turned, even * cos - odd * sin, even)
    second = tl.where(turned, even * sin + odd * cos, odd)
    return tl.reshape(tl.join(first, second), (BLOCK,))


def angles(rotation: torch.Tensor) -> torch.Tensor:
    """A rotation [T, P] complex64 as [T, P, 2] float32: cosine and sine, beside each other in memory."""
    return torch.view_as_real(rotation.resolve_conj()).contiguous()
