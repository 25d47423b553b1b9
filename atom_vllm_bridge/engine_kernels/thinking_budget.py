"""A budget of reasoning tokens (vllm.v1.worker.gpu.sample.thinking_budget).

Reasoning lasts from the last start marker to an end marker after it. When it has used
up the request's budget, the marker that ends it is forced, one token after another.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

MODULE = "vllm.v1.worker.gpu.sample.thinking_budget"

Tokens = NDArray[np.integer]

# Beats any logit: the kernel's own choice.
FORCED = 1.0e9


def _update_committed_marker_cache(
    req_ids_ptr: torch.Tensor,
    thinking_token_budget_ptr: torch.Tensor,
    all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int,
    total_len_ptr: torch.Tensor,
    cached_last_start_ptr: torch.Tensor,
    cached_last_end_ptr: torch.Tensor,
    cached_scan_pos_ptr: torch.Tensor,
    reasoning_start_token_ids_ptr: torch.Tensor,
    natural_reasoning_end_token_ids_ptr: torch.Tensor,
    START_LEN: int,
    NATURAL_END_LEN: int,
    MAX_LEN: int,
    BLOCK: int,
    *,
    grid: tuple[int, ...],
    **options: Any,
) -> None:
    """Remember where the last markers begin in prompt and output.

    The first scan goes backwards by blocks and stops at the first one with a marker:
    what lies before cannot change which of the two came last. Later ones take up
    where a marker could not yet be complete.

    Args:
        req_ids_ptr: [grid[0]], requests.
        thinking_token_budget_ptr: [requests], −1 for none.
        all_token_ids_ptr: [requests, length]; total_len_ptr [requests] of them count.
        cached_last_start_ptr, cached_last_end_ptr: [requests], changed; −1 for none.
        cached_scan_pos_ptr: [requests], changed: where the next scan begins.
        reasoning_start_token_ids_ptr, natural_reasoning_end_token_ids_ptr: markers.
    """
    start_marker = reasoning_start_token_ids_ptr.numpy()
    end_marker = natural_reasoning_end_token_ids_ptr.numpy()
    last_start, last_end = cached_last_start_ptr.numpy(), cached_last_end_ptr.numpy()
    scan_pos = cached_scan_pos_ptr.numpy()
    for request in req_ids_ptr.tolist()[: grid[0]]:
        if thinking_token_budget_ptr[request] < 0:
            continue
        total_len = int(total_len_ptr[request])
        tokens = all_token_ids_ptr[request].numpy()[:total_len]
        begin = int(scan_pos[request])
        start, end = int(last_start[request]), int(last_end[request])
        if begin > total_len:
            begin, start, end = 0, -1, -1
        if begin == 0 and start < 0 and end < 0:
            high = total_len
            while high > 0 and start < 0 and end < 0:
                low = max(0, high - BLOCK)
                start = _last_match(tokens, start_marker, low, high, start)
                end = _last_match(tokens, end_marker, low, high, end)
                high = low
        else:
            start = _last_match(tokens, start_marker, begin, total_len, start)
            end = _last_match(tokens, end_marker, begin, total_len, end)
        last_start[request], last_end[request] = start, end
        scan_pos[request] = max(0, total_len - (MAX_LEN - 1))


def _thinking_budget(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    thinking_token_budget_ptr: torch.Tensor,
    all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int,
    total_len_ptr: torch.Tensor,
    input_ids_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    cached_last_start_ptr: torch.Tensor,
    cached_last_end_ptr: torch.Tensor,
    reasoning_start_token_ids_ptr: torch.Tensor,
    natural_reasoning_end_token_ids_ptr: torch.Tensor,
    reasoning_end_token_ids_ptr: torch.Tensor,
    START_LEN: int,
    NATURAL_END_LEN: int,
    END_LEN: int,
    *,
    grid: tuple[int, ...],
    **options: Any,
) -> None:
    """Force the next token of the end marker in rows whose reasoning is too long.

    Args:
        logits_ptr: [T, V'], any float type.
        expanded_idx_mapping_ptr: [T], request of each row.
        input_ids_ptr: [T], token fed at each row; drafts from a request's second row.
        expanded_local_pos_ptr: [T], row number within the request.
        cached_last_start_ptr, cached_last_end_ptr: [requests], as left by
            _update_committed_marker_cache.
        reasoning_end_token_ids_ptr: [END_LEN] the marker to force, which may be
            longer than natural_reasoning_end_token_ids_ptr, the one to look for.
    """
    requests = expanded_idx_mapping_ptr.numpy()[: grid[0]]
    budgets = thinking_token_budget_ptr.numpy()[requests]
    start_marker = reasoning_start_token_ids_ptr.numpy()
    end_marker = natural_reasoning_end_token_ids_ptr.numpy()
    forced = reasoning_end_token_ids_ptr.tolist()
    input_ids = input_ids_ptr.numpy()
    for row in np.flatnonzero(budgets >= 0).tolist():
        request = int(requests[row])
        num_drafts = int(expanded_local_pos_ptr[row])
        total_len = int(total_len_ptr[request])
        length = total_len + num_drafts
        # Markers begin early enough for one token of them to be a draft, and the
        # forced marker's prefix lies at the end: no more of the past is needed.
        since = max(0, total_len - max(START_LEN, NATURAL_END_LEN, END_LEN))
        tokens = np.concatenate(
            [
                all_token_ids_ptr[request].numpy()[since:total_len],
                input_ids[row - num_drafts + 1 : row + 1],
            ]
        )
        last_start, last_end = (
            _latest(marker, int(cached[request]), tokens, since, total_len)
            for marker, cached in (
                (start_marker, cached_last_start_ptr),
                (end_marker, cached_last_end_ptr),
            )
        )
        if last_start < 0 or last_start <= last_end:
            continue
        if length - (last_start + START_LEN) < budgets[row]:
            continue
        tail = tokens.tolist()
        begun = max(
            size
            for size in range(min(END_LEN - 1, length) + 1)
            if tail[len(tail) - size :] == forced[:size]
        )
        logits_ptr[row, forced[begun]] = FORCED


def _latest(
    marker: Tokens, cached: int, tokens: Tokens, since: int, total_len: int
) -> int:
    """Where the marker last begins: at a draft or just before, or where it was cached.

    Args:
        tokens: those from `since` on, drafts included.
    """
    low = max(0, total_len - len(marker) + 1) - since
    return since + _last_match(tokens, marker, low, len(tokens), cached - since)


def _last_match(tokens: Tokens, marker: Tokens, low: int, high: int, other: int) -> int:
    """The last index in [low, high) at which the whole marker stands, or `other`."""
    high = min(high, len(tokens) - len(marker) + 1)
    if high <= low:
        return other
    found = np.ones(high - low, np.bool_)
    for offset, token in enumerate(marker.tolist()):
        found &= tokens[low + offset : high + offset] == token
    at = np.flatnonzero(found)
    return low + int(at[-1]) if len(at) else other


OVERRIDES = {
    f"{MODULE}._update_committed_marker_cache_kernel": _update_committed_marker_cache,
    f"{MODULE}._thinking_budget_kernel": _thinking_budget,
}
