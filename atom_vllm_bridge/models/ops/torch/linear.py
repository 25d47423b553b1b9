"""A matrix that reads every row: y = x · w."""

import torch

from atom_vllm_bridge.models.ops import panels
from atom_vllm_bridge.models.quantization.kept import Kept


def linear(x: torch.Tensor, w: torch.Tensor | Kept) -> torch.Tensor:
    """Project.

    Args:
        x: [T, a].
        w: [a, b], input by input, the [P, a, WIDTH] panels of that (ops/panels.py), or as a GPU keeps it
            (quantization/kept.py). A dtype narrower than x's is widened.

    Returns:
        [T, b] in x's dtype; of panels all P · WIDTH columns, the last of which may be filling.
    """
    if isinstance(w, Kept):
        return x @ w.plain(x.dtype)
    plain = w if w.dim() == 2 else panels.join(w)
    return x @ plain.to(x.dtype)
