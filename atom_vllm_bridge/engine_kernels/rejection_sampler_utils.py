"""Verification of drafts (vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils).

The target gives p, the draft q (all its mass on the proposed token if the draft kept
no logits), and u is uniform on (0, 1):

- per token (Leviathan et al., arXiv:2211.17192, algorithm 1): accept x if
  p(x) > u · q(x); after a rejection draw from max(p − q, 0), normalised;
- per block (Sun et al., arXiv:2403.10444, algorithm 2): accept the longest prefix
  whose threshold h is at least u;
- greedy (temperature 0): accept x if it is the target's argmax;
- synthetic: accept step i with a given probability.

Rows of logits lie request by request: one for each draft, then the bonus row. Logits
of the target are already divided by the temperature, those of the draft are not. The
vocabulary is reduced in blocks: [T, blocks] maxima and sums of exp(l − maximum).
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from atom_vllm_bridge.engine_kernels.block_verification import block_threshold
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
from atom_vllm_bridge.engine_kernels.gumbel import noised_block_argmax
from atom_vllm_bridge.engine_kernels.philox import uniform
from atom_vllm_bridge.engine_kernels.vocabulary_blocks import (
    BlockStats,
    block_argmax,
    block_stats,
)
from atom_vllm_bridge.engine_kernels.watermark import watermarked_scores

MODULE = "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils"

# A draw of 0 would make log u infinite: the smallest value of tl.rand above it.
SMALLEST_UNIFORM = np.float32(4.6566127342e-10)


def _compute_local_logits_stats(
    target_local_argmax_ptr: torch.Tensor,
    target_local_argmax_stride: int,
    target_local_max_ptr: torch.Tensor,
    target_local_max_stride: int,
    target_local_sumexp_ptr: torch.Tensor,
    target_local_sumexp_stride: int,
    draft_local_max_ptr: torch.Tensor,
    draft_local_max_stride: int,
    draft_local_sumexp_ptr: torch.Tensor,
    draft_local_sumexp_stride: int,
    target_logits_ptr: torch.Tensor,
    target_logits_stride: int,
    draft_logits_ptr: torch.Tensor | None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    vocab_size: int,
    num_speculative_steps: int,
    BLOCK_SIZE: int,
    HAS_DRAFT_LOGITS: bool,
    *,
    grid: tuple[int, ...],
    **options: Any,
) -> None:
    """Reduce every row but the bonus ones, block by block.

    A greedy row gets argmax and maximum of the target; another one gets maximum and
    sum of exponentials of target and draft. What is not named is left.

    Args:
        target_local_argmax_ptr: [T, blocks] int64, out.
        target_local_max_ptr, target_local_sumexp_ptr, draft_local_max_ptr,
            draft_local_sumexp_ptr: [T, blocks] float32, out.
        target_logits_ptr: [T, V'], V' ≥ vocab_size, any float type.
        draft_logits_ptr: [requests, steps, V'], any float type.
        expanded_idx_mapping_ptr: [T], request of each row.
        expanded_local_pos_ptr: [T], row number within the request.
        temp_ptr: [requests] float32.
    """
    step = expanded_local_pos_ptr.numpy()[: grid[0]]
    request = expanded_idx_mapping_ptr.numpy()[: grid[0]]
    temperature = widened(temp_ptr)[request]
    verified = step < num_speculative_steps
    greedy = np.flatnonzero(verified & (temperature == 0.0))
    sampled = np.flatnonzero(verified & (temperature != 0.0))
    target_max = target_local_max_ptr.numpy()
    for group in row_groups(greedy, vocab_size):
        logits = gathered(target_logits_ptr, group, width=vocab_size)
        maximum, column = block_argmax(logits, BLOCK_SIZE)
        target_max[group] = maximum
        target_local_argmax_ptr.numpy()[group] = column
    for group in row_groups(sampled, vocab_size):
        logits = gathered(target_logits_ptr, group, width=vocab_size)
        stats = block_stats(logits, BLOCK_SIZE)
        target_max[group] = stats.maxima
        target_local_sumexp_ptr.numpy()[group] = stats.sums
        if HAS_DRAFT_LOGITS:
            assert draft_logits_ptr is not None
            logits = scaled_draft_logits(
                draft_logits_ptr,
                request[group],
                step[group],
                temperature[group],
                vocab_size,
            )
            stats = block_stats(logits, BLOCK_SIZE)
            draft_local_max_ptr.numpy()[group] = stats.maxima
            draft_local_sumexp_ptr.numpy()[group] = stats.sums


def _rejection(
    sampled_ptr: torch.Tensor,
    sampled_stride: int,
    rejected_steps_ptr: torch.Tensor,
    target_rejected_logsumexp_ptr: torch.Tensor,
    draft_rejected_logsumexp_ptr: torch.Tensor,
    target_logits_ptr: torch.Tensor,
    target_logits_stride: int,
    target_local_argmax_ptr: torch.Tensor,
    target_local_argmax_stride: int,
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
    seed_ptr: torch.Tensor,
    pos_ptr: torch.Tensor,
    synthetic_conditional_rates_ptr: torch.Tensor | None,
    cumulative_log_p_ptr: torch.Tensor | None,
    local_residual_mass_ptr: torch.Tensor | None,
    local_residual_mass_stride: int,
    vocab_num_blocks: int,
    PADDED_VOCAB_NUM_BLOCKS: int,
    HAS_DRAFT_LOGITS: bool,
    SYNTHETIC_MODE: bool,
    USE_BLOCK_VERIFICATION: bool,
    *,
    grid: tuple[int, ...],
    **options: Any,
) -> None:
    """Walk along each request's drafts to the first rejection.

    A placeholder (−1) ends the walk; a greedy request stores the target's argmax in
    its stead.

    Args:
        sampled_ptr: [requests, steps + 1] int64, out at the steps walked.
        rejected_steps_ptr: [requests] int32, out: how many drafts are accepted.
        target_rejected_logsumexp_ptr, draft_rejected_logsumexp_ptr: [requests]
            float32, out: of the last row walked, or with block verification of the
            first row not accepted; 0 where there is none, and for greedy requests.
        synthetic_conditional_rates_ptr: [steps] float32, or None.
        cumulative_log_p_ptr, local_residual_mass_ptr: as above, or None.
        seed_ptr: [requests] int64.
        pos_ptr: [T], position of each row in its sequence.
    """
    num_requests = grid[0]
    walk = Walk.over(
        num_requests, cu_num_logits_ptr, idx_mapping_ptr, draft_sampled_ptr
    )
    temperature = widened(temp_ptr)[walk.request]
    greedy = (temperature == 0.0)[:, np.newaxis]
    proposed = walk.inside & (walk.token >= 0)
    unbroken = np.logical_and.accumulate(proposed, axis=1)
    by_argmax = walk.inside & greedy
    by_chance = unbroken & ~greedy
    target = BlockStats(target_local_max_ptr.numpy(), target_local_sumexp_ptr.numpy())
    draft = BlockStats(draft_local_max_ptr.numpy(), draft_local_sumexp_ptr.numpy())
    draft_logits = draft_logits_ptr if HAS_DRAFT_LOGITS else None

    accepts: NDArray[np.bool_] = np.zeros(walk.row.shape, np.bool_)
    stored = np.maximum(walk.token, 0)
    target_lse = np.zeros(num_requests, np.float32)
    draft_lse = np.zeros(num_requests, np.float32)

    def draws(where: NDArray[np.bool_]) -> Float32:
        seeds = seed_ptr.numpy()[walk.spread(walk.request, where)]
        drawn = uniform(seeds, pos_ptr.numpy()[walk.row[where]])
        return np.maximum(drawn, SMALLEST_UNIFORM)

    if SYNTHETIC_MODE:
        assert synthetic_conditional_rates_ptr is not None
        rates = synthetic_conditional_rates_ptr.numpy()[: proposed.shape[1]]
        rate = np.broadcast_to(rates, proposed.shape)[proposed]
        accepts[proposed] = draws(proposed) < rate
    if by_argmax.any():
        best = _argmax(target.maxima, target_local_argmax_ptr, walk.row[by_argmax])
        if not SYNTHETIC_MODE:
            accepts[by_argmax] = walk.token[by_argmax] == best
        stored[by_argmax] = np.where(accepts[by_argmax], stored[by_argmax], best)
    if by_chance.any() and not USE_BLOCK_VERIFICATION:
        log_p, log_q, row_target_lse, row_draft_lse = log_ratio(
            walk, by_chance, temperature, target_logits_ptr, target, draft_logits, draft
        )
        if not SYNTHETIC_MODE:
            accepts[by_chance] = log_p > np.log(draws(by_chance)) + log_q
    accepted_so_far = np.logical_and.accumulate(accepts, axis=1)
    walked = by_argmax | by_chance
    walked[:, 1:] &= accepted_so_far[:, :-1]
    accepted = accepted_so_far.sum(axis=1)
    if by_chance.any() and USE_BLOCK_VERIFICATION:
        assert cumulative_log_p_ptr is not None
        threshold = block_threshold(
            walk,
            by_chance,
            cumulative_log_p_ptr.numpy(),
            target_logits_ptr,
            target,
            local_residual_mass_ptr if HAS_DRAFT_LOGITS else None,
        )
        accepts[by_chance] = draws(by_chance) <= threshold
        walked |= by_chance
        last = (accepts * np.arange(1, accepts.shape[1] + 1)).max(axis=1)
        accepted = np.where(greedy[:, 0], accepted, last)
        ended = np.flatnonzero(~greedy[:, 0] & (accepted < walk.num_drafts))
        rejected = walk.first[ended] + accepted[ended]
        target_lse[ended] = target.logsumexp(rejected)
        if HAS_DRAFT_LOGITS:
            draft_lse[ended] = draft.logsumexp(rejected)
    elif by_chance.any():
        # Steps are walked in order, so that a request's last one is what remains.
        seen = walked[by_chance]
        of_request = np.nonzero(by_chance)[0][seen]
        target_lse[of_request] = row_target_lse[seen]
        draft_lse[of_request] = row_draft_lse[seen]
    sampled = sampled_ptr.numpy()[:num_requests]
    sampled[:, : walked.shape[1]][walked] = stored[walked]
    rejected_steps_ptr.numpy()[:num_requests] = accepted
    target_rejected_logsumexp_ptr.numpy()[:num_requests] = target_lse
    draft_rejected_logsumexp_ptr.numpy()[:num_requests] = draft_lse


def _argmax(
    maxima: Float32, local_argmax: torch.Tensor, rows: NDArray[np.integer]
) -> NDArray[np.int64]:
    """[rows] token of the largest block maximum; NaN counts as −inf."""
    blocks = maxima[rows]
    best = np.where(np.isnan(blocks), -np.inf, blocks).argmax(axis=1)
    return local_argmax.numpy()[rows, best]


def _resample(
    resampled_local_argmax_ptr: torch.Tensor,
    resampled_local_argmax_stride: int,
    resampled_local_max_ptr: torch.Tensor,
    resampled_local_max_stride: int,
    target_logits_ptr: torch.Tensor,
    target_logits_stride: int,
    target_rejected_logsumexp_ptr: torch.Tensor,
    draft_logits_ptr: torch.Tensor | None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_rejected_logsumexp_ptr: torch.Tensor,
    rejected_step_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    draft_sampled_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    seed_ptr: torch.Tensor,
    pos_ptr: torch.Tensor,
    cumulative_log_p_ptr: torch.Tensor | None,
    contexts_ptr: torch.Tensor | None,
    contexts_stride: int,
    watermarking_ptr: torch.Tensor | None,
    watermarking_skip_mask_ptr: torch.Tensor | None,
    watermark_key_0: int,
    watermark_key_1: int,
    vocab_size: int,
    BLOCK_SIZE: int,
    HAS_DRAFT_LOGITS: bool,
    USE_FP64: bool,
    USE_BLOCK_VERIFICATION: bool,
    CONTEXT_WIDTH: int,
    WATERMARK: bool,
    DEDUPLICATE_CONTEXTS: bool,
    *,
    grid: tuple[int, ...],
    **options: Any,
) -> None:
    """Draw the token after the accepted drafts, block by block of the vocabulary.

    From the target where all drafts were accepted or a placeholder stopped the walk;
    from the residual max(p − q, 0) after a rejection. A greedy request needs none
    then: the walk stored its token.

    Args:
        resampled_local_argmax_ptr, resampled_local_max_ptr: [requests, blocks], out.
        rejected_step_ptr: [requests], how many drafts are accepted.
        contexts_ptr: [T, CONTEXT_WIDTH], tokens before each row, for a watermark.
            The keyed noise then takes the place of the seeded one.
        watermarking_ptr: [requests] uint8, whether the request is marked.
        watermarking_skip_mask_ptr: [T] uint8, rows that are not, or None.
    """
    step = rejected_step_ptr.numpy()[: grid[0]].astype(np.int64)
    bounds = cu_num_logits_ptr.numpy()[: grid[0] + 1].astype(np.int64)
    row = bounds[:-1] + step
    request = expanded_idx_mapping_ptr.numpy()[row].astype(np.int64)
    temperature = widened(temp_ptr)[request]
    is_bonus = row == bounds[1:] - 1
    draws = np.flatnonzero((temperature != 0.0) | is_bonus)
    if not len(draws):
        return
    step, row, request, is_bonus = (a[draws] for a in (step, row, request, is_bonus))
    temperature = temperature[draws]
    rejected = np.full(len(draws), -1, np.int64)
    rejected[~is_bonus] = draft_sampled_ptr.numpy()[row[~is_bonus] + 1]
    residual = gathered(target_logits_ptr, row, width=vocab_size)
    after = np.flatnonzero(rejected >= 0)
    if not HAS_DRAFT_LOGITS:
        residual[after, rejected[after]] = -np.inf
    elif len(after):
        assert draft_logits_ptr is not None
        lse = target_rejected_logsumexp_ptr.numpy()[draws[after]]
        log_p = residual[after] - lse[:, np.newaxis]
        if USE_BLOCK_VERIFICATION:
            assert cumulative_log_p_ptr is not None
            cumulative = cumulative_log_p_ptr.numpy()[row[after] - 1]
            log_p += np.where(step[after] > 0, cumulative, 0.0)[:, np.newaxis]
        logits = scaled_draft_logits(
            draft_logits_ptr,
            request[after],
            step[after],
            temperature[after],
            vocab_size,
        )
        lse = draft_rejected_logsumexp_ptr.numpy()[draws[after]]
        log_q = logits - lse[:, np.newaxis]
        residual[after] = _log_of_difference(log_p, log_q)
    score, token = noised_block_argmax(
        residual,
        temperature,
        seed_ptr.numpy()[request],
        pos_ptr.numpy()[row],
        BLOCK_SIZE,
        use_fp64=USE_FP64,
    )
    if WATERMARK:
        assert contexts_ptr is not None
        assert watermarking_ptr is not None
        keyed = (watermarking_ptr.numpy()[request] != 0) & (temperature != 0.0)
        if DEDUPLICATE_CONTEXTS:
            assert watermarking_skip_mask_ptr is not None
            keyed &= watermarking_skip_mask_ptr.numpy()[row] == 0
        rows = np.flatnonzero(keyed)
        marked = watermarked_scores(
            residual[rows],
            contexts_ptr[torch.from_numpy(row[rows])],
            (watermark_key_0, watermark_key_1),
        )
        score[rows], token[rows] = block_argmax(marked, BLOCK_SIZE)
    resampled_local_argmax_ptr.numpy()[draws] = token
    resampled_local_max_ptr.numpy()[draws] = score


def _log_of_difference(log_p: Float32, log_q: Float32) -> Float32:
    """log max(p − q, 0) = log p + log(1 − q/p)."""
    with np.errstate(all="ignore"):
        ratio = np.exp(log_q - log_p)
        difference = log_p + np.log1p(-ratio)
    return np.where(ratio < 1.0, difference, np.float32(-np.inf))


def _insert_resampled(
    sampled_ptr: torch.Tensor,
    sampled_stride: int,
    num_sampled_ptr: torch.Tensor,
    resampled_local_argmax_ptr: torch.Tensor,
    resampled_local_argmax_stride: int,
    resampled_local_max_ptr: torch.Tensor,
    resampled_local_max_stride: int,
    resample_num_blocks: int,
    cu_num_logits_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    PADDED_RESAMPLE_NUM_BLOCKS: int,
    *,
    grid: tuple[int, ...],
    **options: Any,
) -> None:
    """Put the drawn token behind the accepted drafts, and count it.

    Args:
        sampled_ptr: [requests, steps + 1] int64, changed.
        num_sampled_ptr: [requests] int32, changed: accepted drafts, then one more.
        resampled_local_argmax_ptr, resampled_local_max_ptr: [requests, blocks].
    """
    num_sampled = num_sampled_ptr.numpy()[: grid[0]]
    bounds = cu_num_logits_ptr.numpy()[: grid[0] + 1]
    row = bounds[:-1] + num_sampled
    temperature = widened(temp_ptr)[expanded_idx_mapping_ptr.numpy()[row]]
    drawn = np.flatnonzero((temperature != 0.0) | (row == bounds[1:] - 1))
    maxima = resampled_local_max_ptr.numpy()[drawn, :resample_num_blocks]
    best = np.where(np.isnan(maxima), -np.inf, maxima).argmax(axis=1)
    token = resampled_local_argmax_ptr.numpy()[drawn, best]
    sampled_ptr.numpy()[drawn, num_sampled[drawn]] = token
    num_sampled += 1


OVERRIDES = {
    f"{MODULE}._compute_local_logits_stats_kernel": _compute_local_logits_stats,
    f"{MODULE}._rejection_kernel": _rejection,
    f"{MODULE}._resample_kernel": _resample,
    f"{MODULE}._insert_resampled_kernel": _insert_resampled,
}
