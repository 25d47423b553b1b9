"""Stand-ins for the kernels of vllm.v1.worker.gpu.sample.logprob."""

from typing import Any

import numpy as np
import torch

from atom_vllm_bridge.engine_kernels.float_rows import row_groups, widened


def _topk_log_softmax(
    output_ptr: torch.Tensor,
    logits_ptr: torch.Tensor,
    logits_stride: int,
    topk_ids_ptr: torch.Tensor,
    topk_ids_stride: int,
    topk: int,
    vocab_size: int,
    BLOCK_SIZE: int,
    TOPK_BLOCK_SIZE: int,
    *,
    grid: tuple[int, ...],
    **options: Any,
) -> None:
    """Log-probabilities of some tokens: x_t − max x − log Σ exp(x − max x).

    The sum goes over blocks of BLOCK_SIZE, each summed by itself and padded with
    zeros, then block after block: the order that the kernel has.

    Args:
        output_ptr: [B, topk] float32, written.
        logits_ptr: [B, vocabulary].
        topk_ids_ptr: [B, topk] int64.
    """
    count = grid[0]
    output = output_ptr.numpy()
    logits = widened(logits_ptr[:count, :vocab_size])
    ids = topk_ids_ptr.numpy()[:count, :topk]
    blocks = -(-vocab_size // BLOCK_SIZE)
    with np.errstate(invalid="ignore", divide="ignore"):
        for rows in row_groups(np.arange(count), vocab_size):
            part = slice(rows[0], rows[-1] + 1)
            x = logits[part]
            highest = np.fmax.reduce(x, axis=1, initial=-np.inf, keepdims=True)
            e = np.zeros((len(rows), blocks * BLOCK_SIZE), dtype=np.float32)
            shifted = e[:, :vocab_size]
            np.subtract(x, highest, out=shifted)
            np.exp(shifted, out=shifted)
            sums = e.reshape(-1, blocks, BLOCK_SIZE).sum(axis=2)
            # cumsum adds in order, where sum would pair.
            log_sum = np.log(sums.cumsum(axis=1)[:, -1:])
            chosen = np.take_along_axis(x, ids[part], axis=1)
            output[part, :topk] = chosen - highest - log_sum


def _ranks(
    output_ptr: torch.Tensor,
    logits_ptr: torch.Tensor,
    logits_stride: int,
    token_ids_ptr: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
    *,
    grid: tuple[int, ...],
    **options: Any,
) -> None:
    """How many tokens are as likely as the given one, itself included: 1 is best.

    The kernel's last block is padded with −∞, which a token of −∞ counts too.

    Args:
        output_ptr: [B] int64, written.
        logits_ptr: [B, vocabulary].
        token_ids_ptr: [B] int64.
    """
    count = grid[0]
    rows = np.arange(count)
    logits = widened(logits_ptr[:count, :vocab_size])
    x = logits[rows, token_ids_ptr.numpy()[:count]]
    output = output_ptr.numpy()
    for group in row_groups(rows, vocab_size):
        part = slice(group[0], group[-1] + 1)
        output[part] = np.count_nonzero(logits[part] >= x[part, None], axis=1)
    if np.isneginf(x).any():
        output[:count][np.isneginf(x)] += -vocab_size % BLOCK_SIZE


def _fill_logprob_token_ids(
    out_token_ids_ptr: torch.Tensor,
    out_token_ids_stride: int,
    out_valid_mask_ptr: torch.Tensor,
    out_valid_mask_stride: int,
    sampled_token_ids_ptr: torch.Tensor,
    topk_indices_ptr: torch.Tensor,
    topk_indices_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    num_per_req_token_ids_ptr: torch.Tensor,
    per_req_token_ids_ptr: torch.Tensor,
    per_req_token_ids_stride: int,
    NUM_TOPK: int,
    PADDED_COLS: int,
    *,
    grid: tuple[int, ...],
    **options: Any,
) -> None:
    """Which tokens to report: the sampled one, then the request's own or the top k.

    Args:
        out_token_ids_ptr: [B, 1 + columns] int64, written as far as valid.
        out_valid_mask_ptr: [B, 1 + columns] bool, set where written.
        topk_indices_ptr: [B, NUM_TOPK], not read if NUM_TOPK is 0.
        num_per_req_token_ids_ptr: [slots]; 0 for a request that wants the top k.
        per_req_token_ids_ptr: [slots, columns].
    """
    count = grid[0]
    ids = out_token_ids_ptr.numpy()[:count]
    valid = out_valid_mask_ptr.numpy()[:count]
    ids[:, 0] = sampled_token_ids_ptr.numpy()[:count]
    valid[:, 0] = True
    slots = expanded_idx_mapping_ptr.numpy()[:count]
    num_own = num_per_req_token_ids_ptr.numpy()[slots]
    top = (num_own <= 0).nonzero()[0]
    if NUM_TOPK and top.size:
        ids[top, 1 : 1 + NUM_TOPK] = topk_indices_ptr.numpy()[top, :NUM_TOPK]
        valid[top, 1 : 1 + NUM_TOPK] = True
    own_token_ids = per_req_token_ids_ptr.numpy()
    for row in (num_own > 0).nonzero()[0].tolist():
        end = 1 + int(num_own[row])
        ids[row, 1:end] = own_token_ids[slots[row], : end - 1]
        valid[row, 1:end] = True


_MODULE = "vllm.v1.worker.gpu.sample.logprob"

OVERRIDES = {
    f"{_MODULE}._topk_log_softmax_kernel": _topk_log_softmax,
    f"{_MODULE}._ranks_kernel": _ranks,
    f"{_MODULE}._fill_logprob_token_ids_kernel": _fill_logprob_token_ids,
}
