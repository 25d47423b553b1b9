"""Ids of the rows that tokens write, from the engine's slots."""

import torch


def slot_rows(
    slots: torch.Tensor, block_size: int, tokens_per_row: int, pitch: int
) -> torch.Tensor:
    """The row of each slot.

    Args:
        slots: [T] int64, block · block_size + place in the block; −1: the token writes nothing.
        block_size: tokens a block.
        tokens_per_row: tokens that share a row.
        pitch: ids from one block to the next.

    Returns:
        [T] int64, block · pitch + place // tokens_per_row; −1 for a slot of −1.
    """
    block, row = slots // block_size, slots % block_size // tokens_per_row
    return torch.where(slots >= 0, block * pitch + row, -1)
