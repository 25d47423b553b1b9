"""ops/torch/rms_norm.py in one kernel: a program a row, which is read once."""

import torch
import triton
import triton.language as tl

from atom_vllm_bridge.models.ops.gradients import trained
from atom_vllm_bridge.models.ops.torch import rms_norm as reference


@triton.jit
def _rms_norm(
    x, weight, out, dim, to_row, eps, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    live = column < dim
    value = tl.load(x + row * to_row + column, mask=live, other=0.0).to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / dim + eps)
    if WEIGHTED:
        value = value * tl.load(weight + column, mask=live, other=0.0)
    tl.store(out + row * dim + column, value.to(out.dtype.element_ty), mask=live)


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    if trained(x, weight):
        return reference.rms_norm(x, weight, eps)
    dim = x.shape[-1]
    # Columns of a projection are a row apart, and need no copy.
    rows = x if x.dim() == 2 and x.stride(1) == 1 else x.contiguous().view(-1, dim)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        block = triton.next_power_of_2(dim)
        _rms_norm[(rows.shape[0],)](
            rows,
            out if weight is None else weight,
            out,
            dim,
            rows.stride(0),
            eps,
            WEIGHTED=weight is not None,
            BLOCK=block,
            num_warps=1 if block <= 512 else 4 if block <= 2048 else 8,
        )
    return out
