"""ops/torch/query_heads.py in one kernel: a head is read once, normed and turned in registers, and written in float32.

A program, which is one warp, takes one head, so that the sum of squares needs no barrier.
"""

import torch
import triton
import triton.language as tl

from atom_vllm_bridge.models.ops.gradients import trained
from atom_vllm_bridge.models.ops.torch import query_heads as reference
from atom_vllm_bridge.models.ops.triton.rotary import angles, turn_tail


@triton.jit
def _query_heads(
    x,
    rotation,
    out,
    heads,
    dim,
    pairs,
    to_token,
    eps,
    TURNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    column = tl.arange(0, BLOCK)
    at = x + token * to_token + head * dim + column
    value = tl.load(at, mask=column < dim, other=0.0).to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / dim + eps)
    if TURNED:
        value = turn_tail(value, rotation + token * 2 * pairs, dim, pairs, BLOCK)
    tl.store(out + (token * heads + head) * dim + column, value, mask=column < dim)


def query_heads(
    x: torch.Tensor, heads: int, eps: float, rotation: torch.Tensor | None
) -> torch.Tensor:
    tokens, width = x.shape
    dim = width // heads
    if dim % 2 or x.stride(1) != 1 or trained(x):
        return reference.query_heads(x, heads, eps, rotation)
    out = torch.empty((tokens, heads, dim), dtype=torch.float32, device=x.device)
    pairs = 0 if rotation is None else rotation.shape[1]
    if out.numel():
        _query_heads[(tokens * heads,)](
            x,
            out if rotation is None else angles(rotation),
            out,
            heads,
            dim,
            pairs,
            x.stride(0),
            eps,
            TURNED=pairs > 0,
            BLOCK=max(2, triton.next_power_of_2(dim)),
            num_warps=1,
        )
    return out
