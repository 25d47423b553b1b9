"""The raw keys of tiles of queries: a window up to each query's own."""

import torch

from atom_vllm_bridge.models.ops.blocks import Blocks


def window_rows(
    blocks: Blocks,
    request: torch.Tensor,
    start: torch.Tensor,
    last: torch.Tensor,
    visible_from: torch.Tensor | None,
    queries: int,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of E = Q + window − 1 positions for each tile, of which a query sees `window`, its own the last.

    Args:
        blocks: of the window's cache.
        request: [N] int64, of each tile.
        start: [N] int64, position of its first query; the others follow.
        last: [N] int64, position of its last query.
        visible_from: [R] int64, first position of a request whose raw key is there; None: 0.
        queries: Q.
        window: positions that a query sees.

    Returns:
        ids [N, E] int64, and hidden [N, Q, E] bool, keys that a query does not see. Positions before the first that is there,
        or after the tile's last query, are read as the nearest that is not.
    """
    first: torch.Tensor | int = 0
    if visible_from is not None:
        first = visible_from[request].unsqueeze(1)
    step = torch.arange(queries + window - 1, device=start.device)
    query = step[:queries].unsqueeze(1)
    position = start.unsqueeze(1) + (step - (window - 1))
    outside = (step < query) | (step > query + window - 1)
    hidden = outside | (position < first).unsqueeze(1)
    position = torch.minimum(position.clamp_(min=first), last.unsqueeze(1))
    return blocks.ids(request, position), hidden
