"""How rows of a block-keyed cache are addressed by one number.

A cache is [B, N, C] with any stride between blocks: other caches may lie between two blocks. Where that stride is a whole
number of rows, the memory is one long list of rows, `pitch` rows a block, and row r of block b is number b · pitch + r.
"""

import torch


def pitch(rows: torch.Tensor) -> int:
    """Rows from one block to the next, for ids of `rows` [B, N, C]; N where the stride is not a whole number of rows."""
    return _list_pitch(rows) or rows.shape[1]


def flat_rows(rows: torch.Tensor) -> torch.Tensor | None:
    """`rows` [B, N, C] as a list [(B − 1) · pitch + N, C] over the same memory, or None where the stride forbids it."""
    step = _list_pitch(rows)
    if step is None:
        return None
    blocks, count, width = rows.shape
    return rows.as_strided(
        ((blocks - 1) * step + count, width), (width, 1), rows.storage_offset()
    )


def _list_pitch(rows: torch.Tensor) -> int | None:
    """`pitch`, or None where blocks do not lie in one list of rows."""
    blocks, count, width = rows.shape
    to_block, to_row, to_value = rows.stride()
    if to_value != 1 or (to_row != width and count != 1):
        return None
    if blocks == 1:
        return count
    return None if to_block % width else to_block // width
