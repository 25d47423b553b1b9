"""Stand-in for the kernel of vllm.v1.worker.gpu.sample.prompt_logprob."""

from typing import Any

import numpy as np
import torch


def _prompt_logprobs_token_ids(
    prompt_logprobs_token_ids_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
    all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int,
    BLOCK_SIZE: int,
    *,
    grid: tuple[int, ...],
    **options: Any,
) -> None:
    """The token after each token of the batch: the one its logits are judged by.

    The token after a request's last row entry is whatever stands next in memory, and
    is never used.

    Args:
        prompt_logprobs_token_ids_ptr: [tokens] int64, written.
        all_token_ids_ptr: [slots, length].
    """
    count = grid[0]
    loc = query_start_loc_ptr.numpy()[: count + 1]
    slots = idx_mapping_ptr.numpy()[:count]
    computed = num_computed_tokens_ptr.numpy()[slots]
    first, last = int(loc[0]), int(loc[-1])
    shift = slots.astype(np.int64) * all_token_ids_stride + computed + 1 - loc[:-1]
    index = shift.repeat(np.diff(loc))
    index += np.arange(first, last)
    tokens = all_token_ids_ptr.view(-1).numpy().take(index, mode="clip")
    prompt_logprobs_token_ids_ptr.numpy()[first:last] = tokens


OVERRIDES = {
    "vllm.v1.worker.gpu.sample.prompt_logprob._prompt_logprobs_token_ids_kernel": (
        _prompt_logprobs_token_ids
    ),
}
