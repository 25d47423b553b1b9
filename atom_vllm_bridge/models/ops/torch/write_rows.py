"""Write rows of a block-keyed cache, where a negative id writes nothing."""

import torch

from atom_vllm_bridge.models.ops.rows import flat_rows


def write_rows(rows: torch.Tensor, ids: torch.Tensor, values: torch.Tensor) -> None:
    """Scatter `values` into the cache.

    Row 0 of block 0, which no request owns, takes the place of a negative id and gets back what it held: the shapes do
    not depend on how many rows are written.

    Args:
        rows: [B, N, C], changed in place; the stride between blocks is free.
        ids: [M] int64, `block · pitch(rows) + row`, or −1; those that are not negative are distinct.
        values: [M, C] in the storage dtype.
    """
    skipped = (ids < 0).unsqueeze(-1)
    safe = ids.clamp(min=0)
    flat = flat_rows(rows)
    if flat is None:
        place = (safe // rows.shape[1], safe % rows.shape[1])
        rows.index_put_(place, torch.where(skipped, rows[place], values))
    else:
        kept = torch.where(skipped, flat.index_select(0, safe), values)
        flat.index_copy_(0, safe, kept)
