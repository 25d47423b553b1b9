"""ops/torch/hc_post.py by aiter's mhc_post, for bfloat16 streams."""

import torch

from atom_vllm_bridge.models.ops import registry
from atom_vllm_bridge.models.ops.aiter.entries import Entry, Needs
from atom_vllm_bridge.models.ops.gradients import trained

MHC_POST = Entry(
    places=("aiter.ops.mhc:mhc_post",),
    takes=("out", "x", "residual", "post_layer_mix", "comb_res_mix"),
)
NEEDS = Needs((MHC_POST,))


def hc_post(
    x: torch.Tensor, residual: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """By Triton where x and streams are not bfloat16."""
    both = x.dtype == residual.dtype == torch.bfloat16
    if not both or trained(x, residual, post, comb):
        return registry.resolve_from("triton", "hc_post")(x, residual, post, comb)
    out = torch.empty_like(residual, memory_format=torch.contiguous_format)
    MHC_POST(
        out=out,
        x=x.contiguous(),
        residual=residual.contiguous(),
        post_layer_mix=post.contiguous().unsqueeze(-1),
        comb_res_mix=comb.contiguous(),
    )
    return out
