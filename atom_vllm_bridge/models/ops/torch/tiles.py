"""Queries cut into tiles: up to Q consecutive tokens of one request, so that their keys are gathered once."""

import torch


def tiles(
    query_start_loc: torch.Tensor,
    request: torch.Tensor,
    positions: torch.Tensor,
    size: int,
    count: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cut each request's tokens, in their order.

    Args:
        query_start_loc: [R + 1] int32, ascending.
        request: [T] int64, of each token.
        positions: [T] int64, at least 0.
        size: Q.
        count: N, at least as many tiles as there are; those beyond count to the last request.

    Returns:
        request [N] int64; token [N, Q] int64, places of a tile's queries in the batch, beyond its end those of any token;
        start [N] int64, position of its first query; last [N] int64, position of its last query, at least 0; place [T] int64,
        where each token is in the flattened tiles.
    """
    tokens, requests = len(positions), len(query_start_loc) - 1
    token = torch.arange(tokens, device=positions.device)
    first = query_start_loc[:-1].long()
    length = query_start_loc[1:] - first
    end = ((length + size - 1) // size).cumsum(0)
    begin = torch.cat((end.new_zeros(1), end[:-1]))
    tile = torch.arange(count, device=positions.device)
    owner = torch.bucketize(tile, end, right=True).clamp_(max=requests - 1)
    offset = (tile - begin[owner]) * size
    valid = (length[owner] - offset).clamp_(max=size)
    lead = (first[owner] + offset).clamp_(max=tokens - 1)
    start = positions[lead]
    step = torch.arange(size, device=positions.device)
    within = token - first[request]
    place = (begin[request] + within // size) * size + within % size
    return (
        owner,
        (lead.unsqueeze(1) + step).clamp_(max=tokens - 1),
        start,
        (start + valid - 1).clamp_(min=0),
        place.clamp_(max=count * size - 1),
    )
