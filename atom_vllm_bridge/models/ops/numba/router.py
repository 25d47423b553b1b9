"""ops/torch/router.py, with all that follows the gate's projection in one call."""

import numpy as np
import torch
import torch.nn.functional as F

from atom_vllm_bridge.models.ops.gradients import trained
from atom_vllm_bridge.models.ops.numba.few import MOST, compiled, few
from atom_vllm_bridge.models.ops.torch import router as reference


@compiled()
def route(logits, bias, route_scale, chosen, weights):
    tokens, experts = logits.shape
    k = chosen.shape[1]
    score = np.empty(experts, np.float32)
    taken = np.empty(experts, np.bool_)
    for t in range(tokens):
        for e in range(experts):
            x = logits[t, e]
            score[e] = np.sqrt(x if x > 20 else np.log1p(np.exp(x)))
        if bias.size:
            taken[:] = False
            for i in range(k):
                best = -1
                for e in range(experts):
                    if not taken[e] and (
                        best < 0 or score[e] + bias[e] > score[best] + bias[best]
                    ):
                        best = e
                taken[best] = True
                chosen[t, i] = best
        total = np.float32(0)
        for i in range(k):
            total += score[chosen[t, i]]
        factor = np.float32(route_scale) / (total + np.float32(1e-20))
        for i in range(k):
            weights[t, i] = score[chosen[t, i]] * factor


NO_BIAS = np.empty(0, np.float32)


def router(
    x: torch.Tensor,
    gate: torch.Tensor,
    route_scale: float,
    k: int,
    bias: torch.Tensor | None = None,
    experts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if x.numel() > MOST or trained(gate, bias) or not few(wide := x.float()):
        return reference.router(x, gate, route_scale, k, bias, experts)
    logits = F.linear(wide, gate)
    chosen = torch.empty(len(x), k, dtype=torch.int64) if experts is None else experts
    weights = logits.new_empty(len(x), k)
    bias_ = NO_BIAS if experts is not None or bias is None else bias.numpy()
    route(logits.numpy(), bias_, route_scale, chosen.numpy(), weights.numpy())
    return chosen, weights
