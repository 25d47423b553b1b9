"""The compressed entries that the indexer selected for each query."""

import torch

from atom_vllm_bridge.models.ops.blocks import Blocks


def selected_rows(
    blocks: Blocks, request: torch.Tensor, selected: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of selected entries.

    Args:
        blocks: of the entries' cache.
        request: [T] int64, of each query.
        selected: [T, k] int64 entries, −1 after the last.

    Returns:
        ids [T, k] int64, the first entry's for −1; hidden [T, 1, k] bool, where nothing was selected.
    """
    return blocks.ids(request, selected.clamp(min=0)), (selected < 0).unsqueeze(1)
