"""ops/torch/hc_head.py in the two kernels of hc_pre, without what writes back."""

import torch
import triton

from atom_vllm_bridge.models.ops.gradients import trained
from atom_vllm_bridge.models.ops.torch import hc_head as reference
from atom_vllm_bridge.models.ops.triton.hc_pre import SPLITS, collapse, warps
from atom_vllm_bridge.models.ops.triton.split_projection import split_projection


def hc_head(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
    norm_eps: float,
) -> torch.Tensor:
    if trained(streams, fn, base, scale):
        return reference.hc_head(streams, fn, base, scale, eps, norm_eps)
    tokens, n, dim = streams.shape
    streams = streams.contiguous()
    y = torch.empty((tokens, dim), dtype=streams.dtype, device=streams.device)
    if not tokens:
        return y
    partials = split_projection(streams.view(tokens, -1), fn, True, SPLITS)
    block, streams_ = triton.next_power_of_2(dim), triton.next_power_of_2(n)
    collapse[(tokens, 1)](
        streams,
        partials.sums,
        base,
        scale,
        y,
        y,
        y,
        y,
        dim,
        n,
        partials.width,
        partials.splits,
        0,
        eps,
        norm_eps,
        N=n,
        STREAMS=streams_,
        WRITES=False,
        WEIGHTED=False,
        SPLITS=SPLITS,
        BLOCK=block,
        num_warps=warps(streams_ * block),
    )
    return y
