"""ops/torch/swiglu.py in one call."""

import numpy as np
import torch

from atom_vllm_bridge.models.ops.numba.exponential import exponential
from atom_vllm_bridge.models.ops.numba.few import MOST, compiled, few
from atom_vllm_bridge.models.ops.torch import swiglu as reference


@compiled(fastmath={"contract", "reassoc", "nsz"})
def gate_rows(hidden, limit, out):
    """out [R, I] from hidden [R, 2 · I]; rows of `out` beyond R are left alone."""
    rows, width = hidden.shape[0], out.shape[1]
    one, limit = np.float32(1), np.float32(limit)
    for r in range(rows):
        for c in range(width):
            gate = min(hidden[r, c], limit)
            up = max(min(hidden[r, width + c], limit), -limit)
            out[r, c] = gate / (one + exponential(-gate)) * up


def swiglu(hidden: torch.Tensor, limit: float) -> torch.Tensor:
    if hidden.numel() > MOST or not few(wide := hidden.float()):
        return reference.swiglu(hidden, limit)
    width = wide.shape[-1] // 2
    out = wide.new_empty((*wide.shape[:-1], width))
    gate_rows(
        wide.numpy().reshape(-1, 2 * width), limit, out.numpy().reshape(-1, width)
    )
    return out.to(hidden.dtype)
