"""Choices of experts for kernels that take every slot for one of an expert that is here."""

import torch


def all_here(
    chosen: torch.Tensor, weights: torch.Tensor, many: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, k] int64 choices, `many` or more for an expert elsewhere, and weights → int32 choices below `many`, and weights.

    Slots of experts elsewhere take the first expert, and weigh nothing.
    """
    missing = chosen >= many
    return chosen.masked_fill(missing, 0).int(), weights.masked_fill(missing, 0.0)
