"""Read rows of a block-keyed cache."""

import torch

from atom_vllm_bridge.models.ops.rows import flat_rows


def gather_rows(rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Copy rows out of a cache.

    Args:
        rows: [B, N, C], blocks of rows; the stride between blocks is free.
        ids: int64 of any shape, `block · pitch(rows) + row`.

    Returns:
        [*ids.shape, C] in the storage dtype.
    """
    flat = flat_rows(rows)
    if flat is None:
        n = rows.shape[1]
        return rows[ids // n, ids % n]
    return flat.index_select(0, ids.flatten()).view(*ids.shape, -1)
