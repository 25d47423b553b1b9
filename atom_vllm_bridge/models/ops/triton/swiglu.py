"""ops/torch/swiglu.py in one kernel: gate and up are read once, the product written once."""

import torch
import triton
import triton.language as tl

from atom_vllm_bridge.models.ops.gradients import trained
from atom_vllm_bridge.models.ops.torch import swiglu as reference

BLOCK = 512


@triton.jit
def _swiglu(hidden, out, inner, to_row, limit, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < inner
    at = hidden + row * to_row + column
    gate = tl.load(at, mask=live, other=0.0).to(tl.float32)
    up = tl.load(at + inner, mask=live, other=0.0).to(tl.float32)
    # A comparison with NaN is false, so that NaN passes the clamp as it does in torch.
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    gated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * inner + column, gated.to(out.dtype.element_ty), mask=live)


def swiglu(hidden: torch.Tensor, limit: float) -> torch.Tensor:
    if trained(hidden):
        return reference.swiglu(hidden, limit)
    width = hidden.shape[-1]
    inner = width // 2
    plain = hidden.dim() == 2 and hidden.stride(1) == 1
    rows = hidden if plain else hidden.contiguous().view(-1, width)
    out = torch.empty(
        (*hidden.shape[:-1], inner), dtype=hidden.dtype, device=hidden.device
    )
    if out.numel():
        _swiglu[(rows.shape[0], triton.cdiv(inner, BLOCK))](
            rows, out, inner, rows.stride(0), limit, BLOCK=BLOCK, num_warps=4
        )
    return out
