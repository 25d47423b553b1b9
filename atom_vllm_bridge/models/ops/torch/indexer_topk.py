"""The k best entries of each query, the lower index first where scores are equal."""

import torch


def indexer_topk(scores: torch.Tensor, available: torch.Tensor, k: int) -> torch.Tensor:
    """Select entries.

    Score and index are packed into one integer, so that the order is total and the answer does not depend on a sort's
    treatment of ties: a float's bits, with the magnitude's bits flipped where it is negative, sort as the float does.

    Args:
        scores: [..., E] float32; values at or beyond `available` may be anything.
        available: [...] int64, entries that the query may see.
        k: how many to select.

    Returns:
        [..., min(k, E)] int64, best first; −1 after the available ones.
    """
    entries = scores.shape[-1]
    index = torch.arange(entries, device=scores.device)
    hidden = index >= available.unsqueeze(-1)
    # Adding zero turns −0 into +0, which compares equal to it.
    bits = scores.masked_fill(hidden, -torch.inf).add_(0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    packed = (ordered.long() << 32) + (entries - 1 - index)
    best = packed.topk(min(k, entries), dim=-1).values
    chosen = entries - 1 - (best & 0xFFFFFFFF)
    return torch.where(chosen < available.unsqueeze(-1), chosen, -1)
