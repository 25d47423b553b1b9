"""The drafts of a batch as a rectangle, requests by steps, and their probabilities.

Rows of logits lie request by request: one for each draft, then the bonus row.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from atom_vllm_bridge.engine_kernels.float_rows import Float32, gathered
from atom_vllm_bridge.engine_kernels.vocabulary_blocks import BlockStats


class Walk(NamedTuple):
    """A step for each draft of each request, padded to the longest request.

    Attributes:
        row: [requests, steps] row of logits; 0 in the padding.
        inside: [requests, steps], not padding.
        token: [requests, steps] the proposed token; −1: none, or padding.
        request: [requests] its number in the runner's state.
        first, num_drafts: [requests].
    """

    row: NDArray[np.int64]
    inside: NDArray[np.bool_]
    token: NDArray[np.int64]
    request: NDArray[np.int64]
    first: NDArray[np.int64]
    num_drafts: NDArray[np.int64]

    @classmethod
    def over(
        cls,
        num_requests: int,
        cu_num_logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        draft_sampled: torch.Tensor,
    ) -> "Walk":
        bounds = cu_num_logits.numpy()[: num_requests + 1].astype(np.int64)
        first, num_drafts = bounds[:-1], np.diff(bounds) - 1
        step = np.arange(max(0, int(num_drafts.max(initial=0))))
        inside = step < num_drafts[:, np.newaxis]
        row = np.where(inside, first[:, np.newaxis] + step, 0)
        token = np.full(row.shape, -1, np.int64)
        token[inside] = draft_sampled.numpy()[row[inside] + 1]
        request = idx_mapping.numpy()[:num_requests].astype(np.int64)
        return cls(row, inside, token, request, first, num_drafts)

    def spread(
        self, of_request: NDArray[Any], where: NDArray[np.bool_]
    ) -> NDArray[Any]:
        """The values of [requests] at the steps in the mask `where`."""
        return np.broadcast_to(of_request[:, np.newaxis], where.shape)[where]


def log_ratio(
    walk: Walk,
    where: NDArray[np.bool_],
    temperature: Float32,
    target_logits: torch.Tensor,
    target: BlockStats,
    draft_logits: torch.Tensor | None,
    draft: BlockStats,
) -> tuple[Float32, Float32, Float32, Float32]:
    """(log p, log q, and both log-sum-exps) of the proposed tokens in the mask."""
    rows, tokens = walk.row[where], np.maximum(walk.token[where], 0)
    target_lse = target.logsumexp(rows)
    target_log_prob = gathered(target_logits, rows, tokens) - target_lse
    if draft_logits is None:
        nothing = np.zeros_like(target_lse)
        return target_log_prob, nothing, target_lse, nothing
    draft_lse = draft.logsumexp(rows)
    step = np.broadcast_to(np.arange(where.shape[1]), where.shape)[where]
    requests = walk.spread(walk.request, where)
    proposed = gathered(draft_logits, requests, step, tokens)
    draft_log_prob = proposed / walk.spread(temperature, where) - draft_lse
    return target_log_prob, draft_log_prob, target_lse, draft_lse


def scaled_draft_logits(
    draft_logits: torch.Tensor,
    request: NDArray[np.integer],
    step: NDArray[np.integer],
    temperature: Float32,
    vocab_size: int,
) -> Float32:
    """[rows, V] the draft's logits at (request, step), divided by the temperature."""
    logits = gathered(draft_logits, request, step, width=vocab_size)
    return logits / temperature[:, np.newaxis]
