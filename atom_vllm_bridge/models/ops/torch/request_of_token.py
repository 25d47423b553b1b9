"""Which request each token of a step belongs to."""

import torch


def request_of_token(query_start_loc: torch.Tensor, tokens: int) -> torch.Tensor:
    """Look up tokens 0 … T − 1.

    Args:
        query_start_loc: [R + 1] int32, ascending; request r owns tokens query_start_loc[r] … query_start_loc[r + 1] − 1.
        tokens: T.

    Returns:
        [T] int64; tokens past the last request's (padding) count to the last request.
    """
    token = torch.arange(tokens, device=query_start_loc.device)
    ends = query_start_loc[1:].to(token.dtype)
    return torch.bucketize(token, ends, right=True).clamp_(max=ends.numel() - 1)
