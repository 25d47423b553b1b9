"""ops/torch/rope.py in one kernel, which touches nothing but the tails.

A program turns the tails of ROWS rows of one token, so that its cosines and sines are read once for them.
"""

import torch
import triton
import triton.language as tl

from atom_vllm_bridge.models.ops.gradients import trained
from atom_vllm_bridge.models.ops.torch import rope as reference
from atom_vllm_bridge.models.ops.triton.rotary import angles

ROWS = 16


@triton.jit
def _rope(
    x,
    rotation,
    inner,
    pairs,
    to_token,
    to_row,
    tail,
    SIGN: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, 2 * PAIRS)
    at = x + token * to_token + tail
    at += row[:, None].to(tl.int64) * to_row + column[None, :]
    mask = (row[:, None] < inner) & (column[None, :] < 2 * pairs)
    values = tl.load(at, mask=mask, other=0.0)
    even, odd = tl.split(tl.reshape(values, (ROWS, PAIRS, 2)))
    pair = tl.arange(0, PAIRS)
    angle = rotation + token * 2 * pairs + 2 * pair
    cos = tl.load(angle, mask=pair < pairs, other=1.0)[None, :]
    sin = tl.load(angle + 1, mask=pair < pairs, other=0.0)[None, :] * SIGN
    turned = tl.join(even * cos - odd * sin, even * sin + odd * cos)
    tl.store(at, tl.reshape(turned, (ROWS, 2 * PAIRS)), mask=mask)


def turn(x: torch.Tensor, rotation: torch.Tensor, sign: int) -> bool:
    """Turn the tails of `x` [T, ..., d] in place by `sign` times the angles; False where strides or gradients forbid it."""
    pairs, dim = rotation.shape[-1], x.shape[-1]
    if trained(x):
        return False
    if x.numel() == 0 or pairs == 0:
        return True
    if x.dim() == 3:
        rows = x
    elif x.is_contiguous():
        rows = x.view(x.shape[0], -1, dim)
    else:
        return False
    if rows.stride(2) != 1:
        return False
    tokens, inner, _ = rows.shape
    _rope[(tokens, triton.cdiv(inner, ROWS))](
        rows,
        angles(rotation),
        inner,
        pairs,
        rows.stride(0),
        rows.stride(1),
        dim - 2 * pairs,
        SIGN=sign,
        ROWS=ROWS,
        PAIRS=triton.next_power_of_2(pairs),
        num_warps=4,
    )
    return True


def rope(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    return x if turn(x, rotation, 1) else reference.rope(x, rotation)
