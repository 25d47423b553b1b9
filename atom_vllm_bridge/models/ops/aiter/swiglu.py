"""ops/torch/swiglu.py by aiter's fused_clamp_act_mul, for widths that are powers of two from 128 on."""

import math

import torch

from atom_vllm_bridge.models.ops import registry
from atom_vllm_bridge.models.ops.aiter.entries import Entry, Needs
from atom_vllm_bridge.models.ops.gradients import trained

CLAMP_ACT_MUL = Entry(
    places=("aiter.ops.triton.fusions.fused_clamp_act_mul:fused_clamp_act_mul",),
    takes=("inp", "swiglu_limit"),
    constants={"activation": "silu"},
)
NEEDS = Needs((CLAMP_ACT_MUL,))
LEAST = 128


def swiglu(hidden: torch.Tensor, limit: float) -> torch.Tensor:
    """By Triton where the width, dtype or limit is not aiter's, to which a limit of 0 means none."""
    inner = hidden.shape[-1] // 2
    fits = inner >= LEAST and inner & (inner - 1) == 0 and hidden.numel() > 0
    if hidden.dtype != torch.bfloat16 or not fits or limit <= 0 or trained(hidden):
        return registry.resolve_from("triton", "swiglu")(hidden, limit)
    rows = hidden.reshape(-1, 2 * inner).contiguous()
    gated = CLAMP_ACT_MUL(inp=rows, swiglu_limit=0.0 if math.isinf(limit) else limit)
    return gated.view(*hidden.shape[:-1], inner)
