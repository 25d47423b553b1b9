"""The raw keys of a draft's blocks: a window of context before the block, and all of the block, for all of its queries."""

import torch

from atom_vllm_bridge.models.ops.blocks import Blocks


def block_rows(
    blocks: Blocks,
    request: torch.Tensor,
    start: torch.Tensor,
    seq_lens: torch.Tensor,
    queries: int,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of E = window + Q positions for each block.

    Args:
        blocks: of the window's cache.
        request: [N] int64, whose each block is.
        start: [N] int64, position of its first query.
        seq_lens: [R] int32, tokens of a request, its block included.
        queries: Q.
        window: positions seen before the block.

    Returns:
        ids [N, E] int64, and hidden [N, Q, E] bool. Positions before the sequence, or at and beyond its end, are hidden, and
        read as the nearest that is not.
    """
    step = torch.arange(window + queries, device=start.device)
    position = start.unsqueeze(1) + (step - window)
    end = seq_lens.long()[request].unsqueeze(1)
    outside = (position < 0) | (position >= end)
    hidden = outside.unsqueeze(1).expand(-1, queries, -1).contiguous()
    position = torch.minimum(position.clamp_(min=0), (end - 1).clamp_(min=0))
    return blocks.ids(request, position), hidden
