"""ops/torch/router.py in two kernels: the gate's products (split_projection), then all the rest of a token in one program.

The choice is made on integers that hold an expert's biased score above its id, so that no two are equal and the order is total.
"""

import torch
import triton
import triton.language as tl

from atom_vllm_bridge.models.ops.gradients import trained
from atom_vllm_bridge.models.ops.torch import router as reference
from atom_vllm_bridge.models.ops.triton.split_projection import split_projection

SPLITS = 32
# Ranges of inputs added at once.
ADDED = 16


@triton.jit
def _softplus(x):
    """log(1 + e^x), as max(x, 0) + log1p(e^-|x|)."""
    small = tl.exp(-tl.abs(x))
    one = 1.0 + small
    # What rounding took from 1 + small is made good by the ratio; where nothing is left, the logarithm is small itself.
    grown = one - 1.0
    log1p = tl.log(one) * (small / tl.where(grown == 0.0, 1.0, grown))
    return tl.maximum(x, 0.0) + tl.where(grown == 0.0, small, log1p)


@triton.jit(do_not_specialize=["splits"])
def _route(
    partials,
    bias,
    table,
    experts,
    weights,
    route_scale,
    count,
    k,
    width,
    splits,
    to_row,
    CHOOSES: tl.constexpr,
    ADDED: tl.constexpr,
    CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    real = expert < count
    product = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, splits, ADDED):
        split = first + tl.arange(0, ADDED)
        part = tl.load(
            partials + (token * splits + split[:, None]) * width + expert[None, :],
            mask=(split < splits)[:, None] & real[None, :],
            other=0.0,
        )
        product += tl.sum(part, 0)
    score = tl.sqrt(_softplus(product))
    place = tl.arange(0, CHOSEN)
    chosen = tl.zeros((CHOSEN,), tl.int64)
    weight = tl.zeros((CHOSEN,), tl.float32)
    if CHOOSES:
        # Adding zero turns −0 into +0. A float's bits, with the magnitude's flipped where it is negative, sort as it does.
        biased = score + tl.load(bias + expert, mask=real, other=0.0) + 0.0
        bits = biased.to(tl.int32, bitcast=True)
        key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32
        key = key + (BLOCK - 1 - expert)
        least = -0x7FFFFFFFFFFFFFFF
        key = tl.where(real, key, least)
    for j in range(k):
        if CHOOSES:
            best = tl.max(key, 0)
            id = BLOCK - 1 - (best & 0xFFFFFFFF)
            key = tl.where(expert == id, least, key)
        else:
            id = tl.load(table + token * to_row + j)
        won = tl.sum(tl.where(expert == id, score, 0.0), 0)
        chosen = tl.where(place == j, id, chosen)
        weight = tl.where(place == j, won, weight)
    weight = weight * (route_scale / (tl.sum(weight, 0) + 1e-20))
    at = token * k + place
    if CHOOSES:
        tl.store(experts + at, chosen, mask=place < k)
    tl.store(weights + at, weight, mask=place < k)


def router(
    x: torch.Tensor,
    gate: torch.Tensor,
    route_scale: float,
    k: int,
    bias: torch.Tensor | None = None,
    experts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if trained(x, gate, bias) or (experts is not None and experts.stride(1) != 1):
        return reference.router(x, gate, route_scale, k, bias, experts)
    x = x if x.stride(1) == 1 else x.contiguous()
    tokens, count = x.shape[0], gate.shape[0]
    weights = torch.empty((tokens, k), dtype=torch.float32, device=x.device)
    table = experts
    if experts is None:
        experts = torch.empty((tokens, k), dtype=torch.int64, device=x.device)
    if tokens:
        partials = split_projection(x, gate, False, SPLITS)
        _route[(tokens,)](
            partials.sums,
            weights if bias is None else bias,
            experts,
            experts,
            weights,
            route_scale,
            count,
            k,
            partials.width,
            partials.splits,
            experts.stride(0),
            CHOOSES=table is None,
            ADDED=ADDED,
            CHOSEN=triton.next_power_of_2(k),
            BLOCK=triton.next_power_of_2(count),
            num_warps=4,
        )
    return experts, weights
