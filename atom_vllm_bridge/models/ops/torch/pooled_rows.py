"""What a compressor pools in a step, and where the entries go: an entry completes at position p with (p + 1) % ratio = 0."""

import torch

from atom_vllm_bridge.models.ops.blocks import Blocks
from atom_vllm_bridge.models.ops.torch.rotations import rotations
from atom_vllm_bridge.models.ops.torch.slot_rows import slot_rows


def pooled_rows(
    blocks: Blocks,
    entries: Blocks,
    request: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    count: int,
    ratio: int,
    sources: int,
    theta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Plan M entries, those that complete first, in the order of tokens.

    Args:
        blocks: of the compressor's cache, whose rows are cut into parts (`compressor_pool`).
        entries: of the entries' cache.
        request: [T] int64, of each token.
        positions: [T] int64, at least 0.
        slots: [T] int64, of each token in the entries' group, where a block has `entries.per_block · ratio`; −1: its entry is
            not written.
        count: M, at least as many as complete.
        ratio: tokens an entry.
        sources: K, the last tokens that are pooled: `ratio`, or twice that where an entry spans the group before too.
        theta: [P] float32, radians a token.

    Returns:
        ids [M, 2, K] int64, parts to read: kv, then score; what is not pooled reads the token's own row. unseen [M, K] bool,
        sources before the start of the sequence. write [M] int64, rows of the entries; −1: none. rotation [M, P] complex64, at
        the first position of each entry's group.
    """
    write = slot_rows(slots, entries.per_block * ratio, ratio, entries.pitch)
    token = torch.arange(len(positions), device=positions.device)
    completes = (positions % ratio == ratio - 1) & (slots >= 0)
    if count < len(token):
        place = torch.where(completes, completes.cumsum(0) - 1, count)
        packed = token.new_zeros(count + 1).scatter_(0, place, token)[:count]
        completes = token[:count] < completes.sum()
        token = packed
    position = positions[token]
    back = torch.arange(sources, device=positions.device)
    source = position.unsqueeze(1) + (back - (sources - 1))
    unseen = source < 0
    # What is not pooled reads the token's own row, which this step has written.
    read = ~unseen & completes.unsqueeze(1)
    source = torch.where(read, source, position.unsqueeze(1))
    ids = blocks.ids(request[token], source)
    half = blocks.parts // 2
    if sources > ratio:
        ids = ids + (back >= ratio)
    return (
        torch.stack((ids, ids + half), 1),
        unseen,
        torch.where(completes, write[token], -1),
        rotations(position // ratio * ratio, theta),
    )
