"""Where tokens go that are kept in rings: each to the row of its position, unless a later token of the step goes there too."""

import torch


def ring_slots(
    table: torch.Tensor,
    query_start_loc: torch.Tensor,
    request: torch.Tensor,
    positions: torch.Tensor,
    length: int,
) -> torch.Tensor:
    """Slots in the rings of a step's requests.

    Args:
        table: [R, 1] int32, the block of each request's ring; 0: it has none, as in a run for show.
        query_start_loc: [R + 1] int32; tokens from the last on are padding.
        request: [T] int64, which each token belongs to.
        positions: [T] int64, consecutive for the tokens of a request; of padding, anything.
        length: rows a ring.

    Returns:
        [T] int64, block · length + row; −1: nowhere.
    """
    token = torch.arange(positions.numel(), device=positions.device)
    block = torch.where(token < query_start_loc[-1], table[:, 0].long()[request], 0)
    return slots_in_rings(block, positions, length)


def slots_in_rings(
    block: torch.Tensor, positions: torch.Tensor, length: int
) -> torch.Tensor:
    """The same where each token's block is known: [T] int64, 0 for none."""
    written = block > 0
    if positions.numel() > length:
        apart = positions[length:] - positions[:-length]
        overtaken = (block[length:] == block[:-length]) & (apart == length)
        written[:-length] &= ~overtaken
    return torch.where(written, block * length + positions % length, -1)
