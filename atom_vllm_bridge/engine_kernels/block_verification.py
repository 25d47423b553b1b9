"""Block verification of drafts (Sun et al., arXiv:2403.10444, algorithm 2).

The kernels of vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils that only this
method launches. It accepts the longest prefix whose threshold h is at least uniform:
with pᵢ = min(pᵢ₋₁ · p(xᵢ) / q(xᵢ), 1), p₀ = 1, and m = Σₓ max(pᵢ · p(x) − q(x), 0) at
the next step, h = m / (m + 1 − pᵢ).
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from atom_vllm_bridge.engine_kernels.draft_walk import (
    Walk,
    log_ratio,
    scaled_draft_logits,
)
from atom_vllm_bridge.engine_kernels.float_rows import (
    Float32,
    gathered,
    row_groups,
    widened,
)
from atom_vllm_bridge.engine_kernels.vocabulary_blocks import (
    BlockStats,
    in_blocks,
    sum_over_blocks,
)

MODULE = "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils"


def _compute_cumulative_log_p(
    cumulative_log_p_ptr: torch.Tensor,
    target_logits_ptr: torch.Tensor,
    target_logits_stride: int,
    target_local_max_ptr: torch.Tensor,
    target_local_max_stride: int,
    target_local_sumexp_ptr: torch.Tensor,
    target_local_sumexp_stride: int,
    draft_sampled_ptr: torch.Tensor,
    draft_logits_ptr: torch.Tensor | None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_local_max_ptr: torch.Tensor,
    draft_local_max_stride: int,
    draft_local_sumexp_ptr: torch.Tensor,
    draft_local_sumexp_stride: int,
    cu_num_logits_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    vocab_num_blocks: int,
    PADDED_VOCAB_NUM_BLOCKS: int,
    HAS_DRAFT_LOGITS: bool,
    *,
    grid: tuple[int, ...],
    **options: Any,
) -> None:
    """Block verification: log pᵢ = min(log pᵢ₋₁ + log p(xᵢ)/q(xᵢ), 0) at each draft.

    Args:
        cumulative_log_p_ptr: [T] float32, out at the draft rows of sampled requests.
            A placeholder (−1) repeats the value before it.
    """
    walk = Walk.over(grid[0], cu_num_logits_ptr, idx_mapping_ptr, draft_sampled_ptr)
    temperature = widened(temp_ptr)[walk.request]
    sampled = walk.inside & (temperature != 0.0)[:, np.newaxis]
    proposed = sampled & (walk.token >= 0)
    increment: Float32 = np.zeros(walk.row.shape, np.float32)
    log_p, log_q, _, _ = log_ratio(
        walk,
        proposed,
        temperature,
        target_logits_ptr,
        BlockStats(target_local_max_ptr.numpy(), target_local_sumexp_ptr.numpy()),
        draft_logits_ptr if HAS_DRAFT_LOGITS else None,
        BlockStats(draft_local_max_ptr.numpy(), draft_local_sumexp_ptr.numpy()),
    )
    with np.errstate(invalid="ignore"):
        increment[proposed] = log_p - log_q
    cumulative = np.zeros_like(increment)
    running = np.zeros(grid[0], np.float32)
    for step in range(increment.shape[1]):
        raised = np.fmin(running + increment[:, step], np.float32(0.0))
        running = np.where(proposed[:, step], raised, running)
        cumulative[:, step] = running
    cumulative_log_p_ptr.numpy()[walk.row[sampled]] = cumulative[sampled]


def _compute_local_residual_mass(
    local_residual_mass_ptr: torch.Tensor,
    local_residual_mass_stride: int,
    cumulative_log_p_ptr: torch.Tensor,
    target_logits_ptr: torch.Tensor,
    target_logits_stride: int,
    target_local_max_ptr: torch.Tensor,
    target_local_max_stride: int,
    target_local_sumexp_ptr: torch.Tensor,
    target_local_sumexp_stride: int,
    draft_logits_ptr: torch.Tensor,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_local_max_ptr: torch.Tensor,
    draft_local_max_stride: int,
    draft_local_sumexp_ptr: torch.Tensor,
    draft_local_sumexp_stride: int,
    draft_sampled_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    vocab_size: int,
    num_speculative_steps: int,
    vocab_num_blocks: int,
    BLOCK_SIZE: int,
    PADDED_VOCAB_NUM_BLOCKS: int,
    *,
    grid: tuple[int, ...],
    **options: Any,
) -> None:
    """Block verification: Σₓ max(pᵢ · p(x) − q(x), 0) over each block of the vocabulary.

    Args:
        local_residual_mass_ptr: [T, blocks] float32, out at the rows of sampled
            requests that have a draft before and a proposed token.
    """
    num_logits = grid[0]
    step = expanded_local_pos_ptr.numpy()[:num_logits]
    request = expanded_idx_mapping_ptr.numpy()[:num_logits]
    temperature = widened(temp_ptr)[request]
    needed = (step > 0) & (step < num_speculative_steps) & (temperature != 0.0)
    needed[-1] = False
    needed[:-1] &= draft_sampled_ptr.numpy()[1:num_logits] >= 0
    target = BlockStats(target_local_max_ptr.numpy(), target_local_sumexp_ptr.numpy())
    draft = BlockStats(draft_local_max_ptr.numpy(), draft_local_sumexp_ptr.numpy())
    cumulative_log_p = cumulative_log_p_ptr.numpy()
    for rows in row_groups(np.flatnonzero(needed), vocab_size):
        logits = gathered(target_logits_ptr, rows, width=vocab_size)
        log_p = logits - target.logsumexp(rows)[:, np.newaxis]
        logits = scaled_draft_logits(
            draft_logits_ptr, request[rows], step[rows], temperature[rows], vocab_size
        )
        log_q = logits - draft.logsumexp(rows)[:, np.newaxis]
        ratio = np.exp(cumulative_log_p[rows - 1])
        excess = ratio[:, np.newaxis] * np.exp(log_p) - np.exp(log_q)
        positive = np.fmax(excess, np.float32(0.0))
        mass = in_blocks(positive, BLOCK_SIZE, 0.0).sum(axis=2)
        local_residual_mass_ptr.numpy()[rows] = mass


def block_threshold(
    walk: Walk,
    where: NDArray[np.bool_],
    cumulative_log_p: Float32,
    target_logits: torch.Tensor,
    target: BlockStats,
    local_residual_mass: torch.Tensor | None,
) -> Float32:
    """h of arXiv:2403.10444 at the steps in the mask, m / (m + 1 − pᵢ).

    m is the residual mass at the next draft, max(pᵢ · p − q, 0) summed; the last
    draft's threshold is pᵢ itself.
    """
    threshold = np.zeros(where.shape, np.float32)
    threshold[where] = np.exp(cumulative_log_p[walk.row[where]])
    followed = where.copy()
    followed[:, -1] = False
    followed[:, :-1] &= walk.token[:, 1:] >= 0
    next_rows = walk.row[followed] + 1
    ratio = threshold[followed]
    if local_residual_mass is not None:
        mass = sum_over_blocks(local_residual_mass.numpy()[next_rows])
    else:
        next_tokens = np.roll(walk.token, -1, axis=1)[followed]
        picked = gathered(target_logits, next_rows, next_tokens)
        proposed = np.exp(picked - target.logsumexp(next_rows))
        mass = ratio * (np.float32(1.0) - proposed)
    denominator = mass + np.float32(1.0) - ratio
    with np.errstate(divide="ignore", invalid="ignore"):
        quotient = mass / denominator
    threshold[followed] = np.where(denominator > 0.0, quotient, np.float32(1.0))
    return threshold[where]


OVERRIDES = {
    f"{MODULE}._compute_cumulative_log_p_kernel": _compute_cumulative_log_p,
    f"{MODULE}._compute_local_residual_mass_kernel": _compute_local_residual_mass,
}
