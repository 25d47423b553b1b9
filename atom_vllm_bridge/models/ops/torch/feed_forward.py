"""A dense feed-forward, as the shared expert is: y = swiglu(x · w13) · w2."""

import torch

from atom_vllm_bridge.models.ops.torch.linear import linear
from atom_vllm_bridge.models.ops.torch.swiglu import swiglu
from atom_vllm_bridge.models.quantization.kept import Kept


def feed_forward(
    x: torch.Tensor, w13: torch.Tensor | Kept, w2: torch.Tensor | Kept, limit: float
) -> torch.Tensor:
    """Run every token through it.

    Args:
        x: [T, d].
        w13: [d, 2 · I], for each input the gate's weights beside up's; or the panels of that (ops/panels.py), or as a GPU keeps
            it (quantization/kept.py).
        w2: [I, d], or the same of that.
        limit: of the clamp in `swiglu`.

    Returns:
        [T, d] in x's dtype.
    """
    hidden = linear(x, w13)[:, : 2 * w2.shape[-2]]
    return linear(swiglu(hidden, limit), w2)[:, : x.shape[1]]
