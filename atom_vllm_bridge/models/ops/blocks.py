"""Where the rows of requests lie in a cache, for ops that derive their ids."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Blocks:
    """The blocks of a batch's requests in one cache.

    Attributes:
        table: [R, W] int32, block ids of each request, in the order of its rows.
        per_block: rows a block.
        pitch: ids from one block to the next (ops/rows.py).
        parts: ids a row.
    """

    table: torch.Tensor
    per_block: int
    pitch: int
    parts: int = 1

    # Whether `ids` is the formula that is given here; kernels know no other.
    plain = True

    def ids(self, request: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        """Of rows, by their order in a request: `table[request, row // per_block] · pitch + row % per_block · parts`.

        Args:
            request: [N] int64.
            row: [N, ...] int64, at least 0; beyond the table: in its last block.

        Returns:
            [N, ...] int64, of the first part of each.
        """
        width = self.table.shape[1]
        column = (row // self.per_block).clamp_(max=width - 1)
        first = (request * width).view(-1, *(1,) * (row.dim() - 1))
        block = torch.take(self.table, column.add_(first)).long()
        return block.mul_(self.pitch).add_(row % self.per_block * self.parts)
