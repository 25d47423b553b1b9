"""ops/torch/hc_head.py by aiter's mhc_pre without Sinkhorn, for bfloat16 streams."""

import torch

from atom_vllm_bridge.models.ops import registry
from atom_vllm_bridge.models.ops.aiter.entries import Needs
from atom_vllm_bridge.models.ops.aiter.hc_pre import MHC_PRE, POST
from atom_vllm_bridge.models.ops.gradients import trained

NEEDS = Needs((MHC_PRE,))


def hc_head(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
    norm_eps: float,
) -> torch.Tensor:
    """By Triton where streams are not bfloat16."""
    if streams.dtype != torch.bfloat16 or trained(streams, fn, base, scale):
        own = registry.resolve_from("triton", "hc_head")
        return own(streams, fn, base, scale, eps, norm_eps)
    _, _, y = MHC_PRE(
        residual=streams.contiguous(),
        fn=fn,
        hc_scale=scale,
        hc_base=base,
        rms_eps=norm_eps,
        hc_pre_eps=eps,
        hc_sinkhorn_eps=eps,
        hc_post_mult_value=POST,
        sinkhorn_repeat=0,
    )
    return y
