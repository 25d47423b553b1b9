"""Moving tokens to and from rows (vllm.v1.worker.gpu.spec_decode.rejection_sampler)."""

from typing import Any

import numpy as np
import torch

MODULE = "vllm.v1.worker.gpu.spec_decode.rejection_sampler"


def _flatten_sampled(
    flat_sampled_ptr: torch.Tensor,
    sampled_ptr: torch.Tensor,
    sampled_stride: int,
    num_sampled_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
    *,
    grid: tuple[int, ...],
    **options: Any,
) -> None:
    """Place each request's sampled tokens at its first rows.

    Args:
        flat_sampled_ptr: [T], out; the other rows are left.
        sampled_ptr: [requests, steps + 1].
        num_sampled_ptr: [requests].
        cu_num_logits_ptr: [requests + 1], first row of each request.
    """
    sampled = sampled_ptr.numpy()[: grid[0]]
    num_sampled = num_sampled_ptr.numpy()[: grid[0], np.newaxis]
    first = cu_num_logits_ptr.numpy()[: grid[0], np.newaxis]
    step = np.arange(sampled.shape[1])
    taken = step < num_sampled
    flat_sampled_ptr.numpy()[(first + step)[taken]] = sampled[taken]


def _gather_draft_sampled(
    draft_sampled_ptr: torch.Tensor,
    pos_ptr: torch.Tensor,
    input_ids_ptr: torch.Tensor,
    positions_ptr: torch.Tensor,
    logits_indices_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    prefill_len_ptr: torch.Tensor,
    num_logits: int,
    BLOCK_SIZE: int,
    *,
    grid: tuple[int, ...],
    **options: Any,
) -> None:
    """Token and position of each row of logits.

    A draft slot in a step that began within the prefill holds no draft yet: −1, which
    verification rejects.

    Args:
        draft_sampled_ptr, pos_ptr: [num_logits], out.
        input_ids_ptr, positions_ptr: [tokens of the batch].
        logits_indices_ptr: [num_logits], token of each row.
        expanded_idx_mapping_ptr: [num_logits], request of each row.
        expanded_local_pos_ptr: [num_logits], row number within the request.
        prefill_len_ptr: [requests].
    """
    tokens = logits_indices_ptr.numpy()[:num_logits]
    pos = positions_ptr.numpy()[tokens]
    local_pos = expanded_local_pos_ptr.numpy()[:num_logits]
    requests = expanded_idx_mapping_ptr.numpy()[:num_logits]
    unsampled = (local_pos > 0) & (pos - local_pos < prefill_len_ptr.numpy()[requests])
    draft_sampled_ptr.numpy()[:num_logits] = np.where(
        unsampled, -1, input_ids_ptr.numpy()[tokens]
    )
    pos_ptr.numpy()[:num_logits] = pos


OVERRIDES = {
    f"{MODULE}._flatten_sampled_kernel": _flatten_sampled,
    f"{MODULE}._gather_draft_sampled_kernel": _gather_draft_sampled,
}
