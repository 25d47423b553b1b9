"""ops/torch/feed_forward.py on panels, for few rows; what lies between the products stays float32."""

import torch

from atom_vllm_bridge.models.ops.numba.linear import by_panels, takes
from atom_vllm_bridge.models.ops.numba.swiglu import gate_rows
from atom_vllm_bridge.models.ops.panels import WIDTH
from atom_vllm_bridge.models.ops.torch import feed_forward as reference


def feed_forward(
    x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, limit: float
) -> torch.Tensor:
    inner = w2.shape[-2]
    packed = w13.dim() == w2.dim() == 3 and w13.shape[0] * WIDTH == 2 * inner
    if not packed or not takes(x, w13) or not takes(x, w2):
        return reference.feed_forward(x, w13, w2, limit)
    hidden = by_panels(x, w13)
    gated = hidden.new_empty(x.shape[0], inner)
    gate_rows(hidden.numpy(), limit, gated.numpy())
    return by_panels(gated, w2)[:, : x.shape[1]].to(x.dtype)
