"""Allowed tokens, logit bias, minimum length (vllm.v1.worker.gpu.sample.logit_bias)."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from atom_vllm_bridge.engine_kernels.float_rows import Float32, edited

MODULE = "vllm.v1.worker.gpu.sample.logit_bias"


def _bias(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    vocab_size: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    num_allowed_token_ids_ptr: torch.Tensor,
    allowed_token_ids_ptr: torch.Tensor,
    allowed_token_ids_stride: int,
    num_logit_bias_ptr: torch.Tensor,
    bias_token_ids_ptr: torch.Tensor,
    bias_token_ids_stride: int,
    bias_ptr: torch.Tensor,
    bias_stride: int,
    pos_ptr: torch.Tensor,
    min_lens_ptr: torch.Tensor,
    num_stop_token_ids_ptr: torch.Tensor,
    restore_when_all_masked_ptr: torch.Tensor,
    stop_token_ids_ptr: torch.Tensor,
    stop_token_ids_stride: int,
    BLOCK_SIZE: int,
    LOGITS_BLOCK_SIZE: int,
    CHECK_ALL_MASKED_ROWS: bool,
    *,
    grid: tuple[int, ...],
    **options: Any,
) -> None:
    """Three edits of each row, in this order, for the requests that ask for them.

    −inf for all but the allowed tokens; the bias added; −inf for the stop tokens
    while the sequence is shorter than its minimum. Where a grammar leaves nothing but
    stop tokens, CHECK_ALL_MASKED_ROWS puts back those that were finite.

    Args:
        logits_ptr: [T, V'], V' ≥ vocab_size, any float type.
        expanded_idx_mapping_ptr: [T], request of each row.
        num_allowed_token_ids_ptr, num_logit_bias_ptr, num_stop_token_ids_ptr:
            [requests], how many entries of the lists count.
        allowed_token_ids_ptr, bias_token_ids_ptr, stop_token_ids_ptr: [requests, ·].
        bias_ptr: [requests, ·] float32.
        pos_ptr: [T], position of each row in its sequence.
        min_lens_ptr: [requests], prompt and output together.
        restore_when_all_masked_ptr: [requests], whether a grammar is in force.
    """
    requests = expanded_idx_mapping_ptr.numpy()[: grid[0]]
    num_allowed = num_allowed_token_ids_ptr.numpy()[requests]
    num_biased = num_logit_bias_ptr.numpy()[requests]
    num_stop = num_stop_token_ids_ptr.numpy()[requests]
    too_short = pos_ptr.numpy()[: grid[0]] + 1 < min_lens_ptr.numpy()[requests]
    num_stop = np.where(too_short, num_stop, 0)
    concerned = np.flatnonzero((num_allowed > 0) | (num_biased > 0) | (num_stop > 0))
    if not len(concerned):
        return
    allowed_ids = allowed_token_ids_ptr.numpy()
    biased_ids = bias_token_ids_ptr.numpy()
    stop_ids = stop_token_ids_ptr.numpy()
    bias = bias_ptr.numpy()
    restore = restore_when_all_masked_ptr.numpy()
    with edited(logits_ptr) as logits:
        for index in concerned.tolist():
            row, request = logits[index, :vocab_size], requests[index]
            if num_allowed[index] > 0:
                allowed = allowed_ids[request, : num_allowed[index]]
                kept = row[allowed]
                row.fill(-np.inf)
                row[allowed] = kept
            if num_biased[index] > 0:
                biased = biased_ids[request, : num_biased[index]]
                row[biased] = row[biased] + bias[request, : num_biased[index]]
            if num_stop[index] > 0:
                stop = stop_ids[request, : num_stop[index]]
                _forbid(row, stop, bool(CHECK_ALL_MASKED_ROWS and restore[request]))


def _forbid(row: Float32, tokens: NDArray[np.integer], unless_all: bool) -> None:
    """−inf for the tokens; unless_all: not if nothing else is left."""
    before = row[tokens]
    row[tokens] = -np.inf
    if unless_all and not (row > -np.inf).any():
        finite = np.isfinite(before)
        row[tokens[finite]] = before[finite]


OVERRIDES = {f"{MODULE}._bias_kernel": _bias}
