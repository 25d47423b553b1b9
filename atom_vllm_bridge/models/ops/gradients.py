"""When an op has to be one that torch can differentiate."""

import torch


def trained(*weights: torch.Tensor | None) -> bool:
    """Whether any needs a gradient, which only torch's reference can give."""
    return torch.is_grad_enabled() and any(
        weight is not None and weight.requires_grad for weight in weights
    )
