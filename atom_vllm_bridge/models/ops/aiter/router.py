"""ops/torch/router.py by aiter's topk_gating, where the choice is by score.

A hash layer's choice is a table's, which aiter does not know. Which of equal scores comes first is not documented by aiter.
"""

import torch
import torch.nn.functional as F

from atom_vllm_bridge.models.ops import registry
from atom_vllm_bridge.models.ops.aiter.entries import Entry, Needs
from atom_vllm_bridge.models.ops.gradients import trained

TOPK_GATING = Entry(
    places=("aiter.ops.topk:topk_gating", "aiter.ops.topk:topk_softplus"),
    takes=(
        "topk_weights",
        "topk_indices",
        "gating_output",
        "correction_bias",
        "need_renorm",
        "routed_scaling_factor",
    ),
    constants={"score_func": "sqrtsoftplus"},
)
NEEDS = Needs((TOPK_GATING,))


def router(
    x: torch.Tensor,
    gate: torch.Tensor,
    route_scale: float,
    k: int,
    bias: torch.Tensor | None = None,
    experts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """By Triton where the choice is given."""
    if experts is not None or bias is None or trained(x, gate, bias):
        own = registry.resolve_from("triton", "router")
        return own(x, gate, route_scale, k, bias, experts)
    logits = F.linear(x.float(), gate)
    shape = (x.shape[0], k)
    weights = torch.empty(shape, dtype=torch.float32, device=x.device)
    chosen = torch.empty(shape, dtype=torch.int32, device=x.device)
    TOPK_GATING(
        topk_weights=weights,
        topk_indices=chosen,
        gating_output=logits,
        correction_bias=bias,
        need_renorm=True,
        routed_scaling_factor=route_scale,
    )
    return chosen.long(), weights
