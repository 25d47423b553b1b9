"""ops/torch/hc_pre.py by aiter's mhc_pre, for bfloat16 streams."""

import torch

from atom_vllm_bridge.models.ops import registry
from atom_vllm_bridge.models.ops.aiter.entries import Entry, Needs
from atom_vllm_bridge.models.ops.gradients import trained

MHC_PRE = Entry(
    places=("aiter.ops.mhc:mhc_pre",),
    takes=(
        "residual",
        "fn",
        "hc_scale",
        "hc_base",
        "rms_eps",
        "hc_pre_eps",
        "hc_sinkhorn_eps",
        "hc_post_mult_value",
        "sinkhorn_repeat",
    ),
)
NEEDS = Needs((MHC_PRE,))
# post = 2 · σ(…).
POST = 2.0


def mhc_pre(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """aiter's function: post [T, n, 1], comb, y; with no iterations y alone is made, which is the head."""
    return MHC_PRE(
        residual=streams.contiguous(),
        fn=fn,
        hc_scale=scale,
        hc_base=base,
        rms_eps=norm_eps,
        hc_pre_eps=eps,
        hc_sinkhorn_eps=eps,
        hc_post_mult_value=POST,
        sinkhorn_repeat=iterations,
    )


def hc_pre(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    iterations: int,
    eps: float,
    norm_eps: float,
    weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """By Triton where streams are not bfloat16; the norm of y is Triton's, for its weight is float32."""
    if streams.dtype != torch.bfloat16 or trained(streams, fn, base, scale, weight):
        own = registry.resolve_from("triton", "hc_pre")
        return own(streams, fn, base, scale, iterations, eps, norm_eps, weight)
    post, comb, y = mhc_pre(streams, fn, base, scale, iterations, eps, norm_eps)
    if weight is not None:
        y = registry.resolve("rms_norm", y.device)(y, weight, norm_eps)
    return y, post.squeeze(-1), comb
