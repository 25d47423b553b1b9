"""All compressed entries that tiles of queries may see: entry j of ratio r is seen from position (j + 1) · r − 1 on."""

import torch

from atom_vllm_bridge.models.ops.blocks import Blocks


def entry_rows(
    blocks: Blocks,
    request: torch.Tensor,
    start: torch.Tensor,
    last: torch.Tensor,
    queries: int,
    entries: int,
    ratio: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of entries 0 … E − 1 for each tile.

    Args:
        blocks: of the entries' cache.
        request: [N] int64, of each tile.
        start: [N] int64, position of its first query; the others follow.
        last: [N] int64, position of its last query.
        queries: Q; 0 where only ids are asked for.
        entries: E.
        ratio: tokens an entry.

    Returns:
        ids [N, E] int64, where entries that no query of a tile sees read as the last that one does, or the first; hidden
        [N, Q, E] bool, entries that a query does not see; none [N, 1, 1] bool, tiles that see no entry.
    """
    entry = torch.arange(entries, device=start.device)
    query = torch.arange(queries, device=start.device)
    seen_by = (start.unsqueeze(1) + (query + 1)) // ratio
    seen = (last + 1) // ratio
    nearest = torch.minimum(entry, (seen - 1).clamp_(min=0).unsqueeze(1))
    hidden = entry >= seen_by.unsqueeze(-1)
    return blocks.ids(request, nearest), hidden, (seen < 1).view(-1, 1, 1)
