"""Lists of rows of different lengths, one for each query, in one tensor: what kernels read that take no mask.

Row numbers of query n are indices[indptr[n] : indptr[n + 1]]. How long the lists are, only the device knows: `indices` has room
for all that there might be and a place more, and beyond the last list it holds anything.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Ragged:
    """Lists.

    Attributes:
        indices: [M + 1] int32.
        indptr: [N + 1] int32, a prefix sum.
    """

    indices: torch.Tensor
    indptr: torch.Tensor


def empty(lists: int, most: int, device: torch.device) -> Ragged:
    """Room for `lists` lists of at most `most` rows, all empty; row 0 where no list is."""
    return Ragged(
        torch.zeros(lists * most + 1, dtype=torch.int32, device=device),
        torch.zeros(lists + 1, dtype=torch.int32, device=device),
    )


def ragged(
    ids: torch.Tensor, hidden: torch.Tensor, out: Ragged | None = None
) -> Ragged:
    """The rows that each query sees.

    Args:
        ids: [N, E] int64, rows of each tile's keys.
        hidden: [N, Q, E] bool, those that a query does not see.
        out: written, from its begin on, where given: room for the lists of N · Q queries of E rows, and more lists, which become
            empty.

    Returns:
        `out`, or lists [N · Q] with room for N · Q · E.
    """
    tiles, queries, entries = hidden.shape
    lists = tiles * queries
    if out is None:
        out = empty(lists, entries, ids.device)
    seen = ~hidden.view(lists, entries)
    end = seen.sum(1).cumsum(0)
    out.indptr[1 : lists + 1] = end
    out.indptr[lists + 1 :] = end[-1] if lists else 0
    # What is not seen goes to the place behind all lists.
    place = seen.flatten().cumsum(0) - 1
    place = torch.where(seen.flatten(), place, out.indices.numel() - 1)
    rows = ids.unsqueeze(1).expand(-1, queries, -1).flatten().int()
    out.indices.scatter_(0, place, rows)
    return out
