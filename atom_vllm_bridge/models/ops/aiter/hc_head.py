"""ops/torch/hc_head.py by aiter's mhc_pre without Sinkhorn, for bfloat16 streams."""

import torch

from atom_vllm_bridge.models.ops import registry
from atom_vllm_bridge.models.ops.aiter.entries import Needs
from atom_vllm_bridge.models.ops.aiter.hc_pre import MHC_PRE, mhc_pre
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
    _, _, y = mhc_pre(streams, fn, base, scale, 0, eps, norm_eps)
    return y
