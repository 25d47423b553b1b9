"""A matrix that reads every row: y = x · w."""

import torch

from atom_vllm_bridge.models.ops import panels


def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Project.

    Args:
        x: [T, a].
        w: [a, b], input by input, or the [P, a, WIDTH] panels of that (ops/panels.py). A dtype narrower than x's is
            widened.

    Returns:
        [T, b] in x's dtype; of panels all P · WIDTH columns, the last of which may be filling.
    """
    plain = w if w.dim() == 2 else panels.join(w)
    return x @ plain.to(x.dtype)
