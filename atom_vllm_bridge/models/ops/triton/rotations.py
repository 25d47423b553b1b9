"""ops/torch/rotations.py in one kernel: cosine and sine of a product, beside each other in memory."""

import torch
import triton
import triton.language as tl

BLOCK = 256


@triton.jit
def store_rotation(out, at, position, theta, mask):
    """The rotation by float32 angle position · theta → `out`, complex numbers as pairs of float32, at places `at`."""
    angle = position.to(tl.float32) * theta
    tl.store(out + 2 * at, tl.cos(angle), mask=mask)
    tl.store(out + 2 * at + 1, tl.sin(angle), mask=mask)


@triton.jit(do_not_specialize=["total"])
def _rotations(positions, theta, out, total, pairs, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    position = tl.load(positions + at // pairs, mask=inside, other=0)
    angle = tl.load(theta + at % pairs, mask=inside, other=0.0)
    store_rotation(out, at, position, angle, inside)


def rotations(positions: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
    pairs = len(theta)
    out = torch.empty(
        (*positions.shape, pairs), dtype=torch.complex64, device=positions.device
    )
    if out.numel():
        _rotations[(triton.cdiv(out.numel(), BLOCK),)](
            positions.contiguous(),
            theta.contiguous(),
            torch.view_as_real(out),
            out.numel(),
            pairs,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return out
