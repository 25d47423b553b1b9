"""Store a compressor's inputs of tokens: kv as it is, the score with the bias of the token's place in its group."""

import torch

from atom_vllm_bridge.models.ops.torch.write_rows import write_rows


def write_inputs(
    inputs: torch.Tensor,
    ape: torch.Tensor,
    phase: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
) -> None:
    """Store inputs.

    Args:
        inputs: [T, 2 · C], kv beside score; may be changed.
        ape: [ratio, C] float32.
        phase: [T] int64, place of each token in its group.
        rows: [B, N, 2 · C] float32.
        ids: [T] int64, as in `write_rows`.
    """
    inputs = inputs.float()
    inputs[:, ape.shape[1] :].add_(ape.index_select(0, phase))
    write_rows(rows, ids, inputs)
