"""How rows of a block-keyed cache are addressed by one number.

A cache is [B, N, C] with any stride between blocks: other caches may lie between two blocks. Where that stride is a whole
number of rows, the memory is one long list of rows, `pitch` rows a block, and row r of block b is number b · pitch + r.
"""

import torch


def pitch(rows: torch.Tensor) -> int:
    """Rows from one block to the next, for ids of `rows` [B, N, C]; N where the stride is not a whole number of rows."""
    blocks, count, width = rows.shape
    stride = rows.stride(0)
    return stride // width if _is_list(rows) and blocks > 1 else count


def flat_rows(rows: torch.Tensor) -> torch.Tensor | None:
    """`rows` [B, N, C] as a list [(B − 1) · pitch + N, C] over the same memory, or None where the stride forbids it."""
    if not _is_list(rows):
        return None
    blocks, count, width = rows.shape
    return rows.as_strided(
        ((blocks - 1) * pitch(rows) + count, width), (width, 1), rows.storage_offset()
    )


def _is_list(rows: torch.Tensor) -> bool:
    width = rows.shape[2]
    return (
        rows.stride(2) == 1
        and (rows.stride(1) == width or rows.shape[1] == 1)
        and (rows.stride(0) % width == 0 or rows.shape[0] == 1)
    )
