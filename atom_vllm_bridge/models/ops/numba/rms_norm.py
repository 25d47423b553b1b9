"""ops/torch/rms_norm.py in one call."""

import numpy as np
import torch

from atom_vllm_bridge.models.ops.gradients import trained
from atom_vllm_bridge.models.ops.numba.few import MOST, compiled, few
from atom_vllm_bridge.models.ops.torch import rms_norm as reference


@compiled(fastmath={"contract", "reassoc", "nsz"})
def norm_rows(x, weight, eps, out):
    rows, d = x.shape
    for r in range(rows):
        square = np.float32(0)
        for c in range(d):
            square += x[r, c] * x[r, c]
        inverse = np.float32(1) / np.sqrt(square / np.float32(d) + np.float32(eps))
        if weight.size:
            for c in range(d):
                out[r, c] = x[r, c] * inverse * weight[c]
        else:
            for c in range(d):
                out[r, c] = x[r, c] * inverse


NO_WEIGHT = np.empty(0, np.float32)


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    if x.numel() > MOST or trained(weight) or not few(wide := x.float().contiguous()):
        return reference.rms_norm(x, weight, eps)
    d = wide.shape[-1]
    out = torch.empty_like(wide)
    norm_rows(
        wide.numpy().reshape(-1, d),
        NO_WEIGHT if weight is None else weight.numpy(),
        eps,
        out.numpy().reshape(-1, d),
    )
    return out.to(x.dtype)
