"""Online prediction of acceptance (vllm.v1.worker.gpu.spec_decode.acceptance_estimator).

The feature of a draft is f = logit(max q). A logistic model σ(ω · f + βₖ), one slope
for all steps k and one intercept each, is fitted by damped Newton steps on what was
accepted since the last fit: (XᵀWX + λI) Δθ = Xᵀ(y − p), an arrowhead system.
"""

from typing import Any

import numpy as np
import torch

from atom_vllm_bridge.engine_kernels.float_rows import (
    Float32,
    gathered,
    row_groups,
    widened,
)
from atom_vllm_bridge.engine_kernels.vocabulary_blocks import (
    block_stats,
    sum_over_blocks,
)

MODULE = "vllm.v1.worker.gpu.spec_decode.acceptance_estimator"

ONE = np.float32(1.0)


def _accumulate(
    info_ptr: torch.Tensor,
    grad_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    num_sampled_ptr: torch.Tensor,
    num_rejected_ptr: torch.Tensor,
    features_ptr: torch.Tensor,
    features_stride: int,
    pred_ptr: torch.Tensor,
    pred_stride: int,
    counts_ptr: torch.Tensor,
    num_reqs: int,
    BLOCK_R: int,
    *,
    grid: tuple[int, ...],
    **options: Any,
) -> None:
    """Add the drafts just verified: those accepted and the first one rejected.

    Args:
        info_ptr: [steps, 3] float32, added to: Σ w f², Σ w f, Σ w, w = p (1 − p).
        grad_ptr: [steps, 2] float32, added to: Σ (y − p) f, Σ (y − p).
        idx_mapping_ptr, num_sampled_ptr, num_rejected_ptr: [num_reqs].
        features_ptr, pred_ptr: [requests, steps] float32, f and p.
        counts_ptr: [steps] float32, added to: how many were seen.
    """
    steps = grid[0]
    requests = idx_mapping_ptr.numpy()[:num_reqs].astype(np.int64)
    accepted = np.maximum(num_sampled_ptr.numpy()[:num_reqs].astype(np.int64) - 1, 0)
    admitted = accepted + num_rejected_ptr.numpy()[:num_reqs]
    feature = features_ptr.numpy()[requests, :steps].T
    prediction = pred_ptr.numpy()[requests, :steps].T
    step = np.arange(steps)[:, np.newaxis]
    observed = (step <= accepted) & (step < admitted)
    label = (step < accepted).astype(np.float32)
    weight = np.where(observed, prediction * (ONE - prediction), np.float32(0.0))
    residual = np.where(observed, label - prediction, np.float32(0.0))
    terms = np.zeros((6, steps, BLOCK_R), np.float32)
    terms[0, :, :num_reqs] = weight * feature * feature
    terms[1, :, :num_reqs] = weight * feature
    terms[2, :, :num_reqs] = weight
    terms[3, :, :num_reqs] = residual * feature
    terms[4, :, :num_reqs] = residual
    terms[5, :, :num_reqs] = observed
    sums = terms.sum(axis=2)
    info_ptr.numpy()[:steps] += sums[:3].T
    grad_ptr.numpy()[:steps] += sums[3:5].T
    counts_ptr.numpy()[:steps] += sums[5]


def _refit(
    slope_ptr: torch.Tensor,
    intercepts_ptr: torch.Tensor,
    info_ptr: torch.Tensor,
    info_row_stride: int,
    grad_ptr: torch.Tensor,
    grad_row_stride: int,
    counts_ptr: torch.Tensor,
    NUM_SPECULATIVE_STEPS: int,
    L2: float,
    DAMPING: float,
    BLOCK: int,
    *,
    grid: tuple[int, ...],
    **options: Any,
) -> None:
    """One Newton step, each parameter damped by n / (n + DAMPING); clear the sums.

    Args:
        slope_ptr: [1] float32, changed; never below 0.
        intercepts_ptr: [steps] float32, changed.
        info_ptr, grad_ptr, counts_ptr: as in _accumulate, cleared.
    """
    steps = NUM_SPECULATIVE_STEPS
    ridge, damping = np.float32(L2), np.float32(DAMPING)
    columns = np.zeros((7, BLOCK), np.float32)
    columns[0:3, :steps] = info_ptr.numpy()[:steps].T
    columns[3:5, :steps] = grad_ptr.numpy()[:steps].T
    columns[5, :steps] = counts_ptr.numpy()[:steps]
    columns[6, :steps] = intercepts_ptr.numpy()[:steps]
    a_k, b_k, c_k, g0_k, g1_k, seen, intercepts = columns
    c_k += ridge
    slope = slope_ptr.numpy()[0]
    with np.errstate(all="ignore"):
        pivot = (a_k.sum() + ridge) - (b_k * b_k / c_k).sum()
        slope_step = (g0_k.sum() - (b_k * g1_k / c_k).sum()) / pivot
        slope_step *= seen.sum() / (seen.sum() + damping)
        if not slope + slope_step >= 0.0:
            slope_step = np.float32(0.0)
        steps_k = (g1_k - b_k * slope_step) / c_k
        steps_k *= seen / (seen + damping)
    steps_k = np.where(np.isnan(steps_k), np.float32(0.0), steps_k)
    slope_ptr.numpy()[0] = slope + slope_step
    intercepts_ptr.numpy()[:steps] = (intercepts + steps_k)[:steps]
    info_ptr[:steps] = 0.0
    grad_ptr[:steps] = 0.0
    counts_ptr[:steps] = 0.0


def _local_max_sumexp(
    local_max_ptr: torch.Tensor,
    local_max_stride: int,
    local_sumexp_ptr: torch.Tensor,
    local_sumexp_stride: int,
    logits_ptr: torch.Tensor,
    logits_stride: int,
    idx_mapping_ptr: torch.Tensor,
    idx_mapping_stride: int,
    temperature_ptr: torch.Tensor,
    num_tokens: int,
    vocab_size: int,
    BLOCK_SIZE: int,
    *,
    grid: tuple[int, ...],
    **options: Any,
) -> None:
    """Reduce draft logits over blocks of the vocabulary, at the draft's temperature.

    Args:
        local_max_ptr, local_sumexp_ptr: [T, blocks] float32, out; −inf and 0 in
            padding rows.
        logits_ptr: [T, V'], V' ≥ vocab_size, any float type.
        idx_mapping_ptr: [T], request of each row, −1 for padding.
        temperature_ptr: [requests] float32; 0 counts as 1.
    """
    requests = idx_mapping_ptr.numpy()[:num_tokens]
    temperature = widened(temperature_ptr)[requests]
    temperature = np.where(temperature > 0.0, temperature, ONE)
    maxima, sums = local_max_ptr.numpy(), local_sumexp_ptr.numpy()
    padding = np.flatnonzero(requests < 0)
    maxima[padding], sums[padding] = -np.inf, 0.0
    for rows in row_groups(np.flatnonzero(requests >= 0), vocab_size):
        logits = gathered(logits_ptr, rows, width=vocab_size)
        stats = block_stats(logits / temperature[rows, np.newaxis], BLOCK_SIZE)
        maxima[rows], sums[rows] = stats.maxima, stats.sums


def _predict(
    features_ptr: torch.Tensor,
    features_stride: int,
    pred_ptr: torch.Tensor,
    pred_stride: int,
    conf_ptr: torch.Tensor,
    conf_stride: int,
    slope_ptr: torch.Tensor,
    intercepts_ptr: torch.Tensor,
    local_max_ptr: torch.Tensor,
    local_max_stride: int,
    local_sumexp_ptr: torch.Tensor,
    local_sumexp_stride: int,
    idx_mapping_ptr: torch.Tensor,
    idx_mapping_stride: int,
    step_ptr: torch.Tensor,
    num_tokens: int,
    vocab_num_blocks: int,
    per_token_step: bool,
    NUM_SPECULATIVE_STEPS: int,
    MAX_LOG_ODDS: float,
    PADDED_VOCAB_NUM_BLOCKS: int,
    *,
    grid: tuple[int, ...],
    **options: Any,
) -> None:
    """Feature and predicted acceptance of each row's draft.

    Args:
        features_ptr, pred_ptr: [requests, steps] float32, out.
        conf_ptr: [batch, steps] float32, out: the prediction by place in the batch.
        local_max_ptr, local_sumexp_ptr: [T, blocks], as left by _local_max_sumexp.
        idx_mapping_ptr: [T], request of each row; −1 is skipped.
        step_ptr: [T] with per_token_step, NUM_SPECULATIVE_STEPS rows for a request;
            else a scalar, one row for a request.
    """
    mapping = idx_mapping_ptr.numpy()[:num_tokens]
    rows = np.flatnonzero(mapping >= 0)
    requests = mapping[rows]
    step, place = step_ptr.numpy().reshape(-1), rows
    if per_token_step:
        step, place = step[rows], rows // NUM_SPECULATIVE_STEPS
    maxima = local_max_ptr.numpy()[rows, :vocab_num_blocks]
    sums = local_sumexp_ptr.numpy()[rows, :vocab_num_blocks]
    feature = _log_odds(maxima, sums, np.float32(MAX_LOG_ODDS))
    intercept = intercepts_ptr.numpy()[step]
    with np.errstate(over="ignore"):
        odds_against = np.exp(-(slope_ptr.numpy()[0] * feature + intercept))
    probability = ONE / (ONE + odds_against)
    features_ptr.numpy()[requests, step] = feature
    pred_ptr.numpy()[requests, step] = probability
    conf_ptr.numpy()[place, step] = probability


def _log_odds(maxima: Float32, sums: Float32, limit: np.float32) -> Float32:
    """[T] log(q / (1 − q)) of the likeliest token, = −log Σ exp(l − max) without it."""
    largest = np.fmax.reduce(maxima, axis=1)
    with np.errstate(all="ignore"):
        scaled = sums * np.exp(maxima - largest[:, np.newaxis])
        others = np.fmax(sum_over_blocks(scaled) - ONE, np.float32(0.0))
        log_odds = -np.log(others)
    return np.fmin(np.fmax(log_odds, -limit), limit)


OVERRIDES = {
    f"{MODULE}._accumulate_kernel": _accumulate,
    f"{MODULE}._refit_kernel": _refit,
    f"{MODULE}._local_max_sumexp_kernel": _local_max_sumexp,
    f"{MODULE}._predict_kernel": _predict,
}
