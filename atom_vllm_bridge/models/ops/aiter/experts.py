"""ops/torch/experts.py by aiter's fused_moe, for experts of mxfp4 on gfx950.

aiter wants weights and scales in tiles (weights.py), a slot for every choice, and the clamp of the gate. Rows are quantised
inside, to what aiter takes beside fp4 weights: fp4, or fp8 by its own choice.
"""

import importlib
import math

import torch

from atom_vllm_bridge.models.ops import registry
from atom_vllm_bridge.models.ops.aiter.entries import Entry, Needs
from atom_vllm_bridge.models.ops.aiter.linear import usable
from atom_vllm_bridge.models.ops.aiter.weights import fits_mxfp4, mxfp4_tiles
from atom_vllm_bridge.models.ops.slots import all_here
from atom_vllm_bridge.models.quantization.kept import Kept

FUSED_MOE = Entry(
    places=("aiter.fused_moe:fused_moe",),
    takes=(
        "hidden_states",
        "w1",
        "w2",
        "topk_weight",
        "topk_ids",
        "quant_type",
        "w1_scale",
        "w2_scale",
        "swiglu_limit",
    ),
)
NEEDS = Needs(
    (FUSED_MOE,),
    architectures=("gfx950",),
    elsewhere="its matrix units do not take fp4",
    rounds="rounds rows to fp4 or fp8",
)


def experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor | Kept,
    w2: torch.Tensor | Kept,
    limit: float,
) -> torch.Tensor:
    """By Triton where rows are not bfloat16, or experts not mxfp4 of whole tiles."""
    if not usable(x) or not _fits(w13) or not _fits(w2):
        own = registry.resolve_from("triton", "experts")
        return own(x, chosen, weights, w13, w2, limit)
    assert isinstance(w13, Kept)
    assert isinstance(w2, Kept)
    first, first_scale = _tiles(w13)
    second, second_scale = _tiles(w2)
    ids, weights = all_here(chosen, weights, w13.shape[0])
    y = FUSED_MOE(
        hidden_states=x.contiguous(),
        w1=first,
        w2=second,
        topk_weight=weights,
        topk_ids=ids,
        quant_type=importlib.import_module("aiter").QuantType.per_1x32,
        w1_scale=first_scale,
        w2_scale=second_scale,
        swiglu_limit=0.0 if math.isinf(limit) else limit,
    )
    return y.float()


def _fits(w: torch.Tensor | Kept) -> bool:
    return isinstance(w, Kept) and w.count is not None and fits_mxfp4(w.bands[0])


def _tiles(w: Kept) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [E, b, a/2] of two a byte, marked as tiled, and scales [E · b, a/32] E8M0."""
    codes, scales = mxfp4_tiles(w.bands[0])
    packed = codes.view(torch.float4_e2m1fn_x2).view(w.count, -1, codes.shape[1])
    packed.is_shuffled = True  # how aiter tells
    return packed, scales.view(torch.float8_e8m0fnu)
