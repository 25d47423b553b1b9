"""Stand-ins for the kernels of vllm.v1.worker.gpu.input_batch.

B is the grid: the requests of the batch. `slots` are their rows in the runner's
per-request state, starts and ends their tokens in the flat batch. Each kernel works
request by request; here one pass covers all of them.
"""

from typing import Any

import numpy as np
import torch


def _prepare_prefill_inputs(
    input_ids_ptr: torch.Tensor,
    next_prefill_tokens_ptr: torch.Tensor,
    next_prefill_tokens_stride: int,
    num_lookahead: int,
    idx_mapping_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int,
    prefill_lens_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
    BLOCK_SIZE: int,
    LOOKAHEAD_BLOCK: int,
    *,
    grid: tuple[int, ...],
    **options: Any,
) -> None:
    """Copy the prompt's next chunk into input_ids, and the tokens after it.

    Args:
        input_ids_ptr: [tokens], written where a request still prefills.
        next_prefill_tokens_ptr: [num_lookahead, slots], the tokens after the chunk,
            0 past the end of the prompt.
    """
    slots = idx_mapping_ptr.numpy()[: grid[0]]
    computed = num_computed_tokens_ptr.numpy()[slots]
    prefill = prefill_lens_ptr.numpy()[slots]
    prefilling = (computed < prefill).nonzero()[0]
    if not prefilling.size:
        return
    input_ids = input_ids_ptr.numpy()
    lookahead = next_prefill_tokens_ptr.numpy()
    all_token_ids = all_token_ids_ptr.numpy()
    loc = query_start_loc_ptr.numpy()
    for request in prefilling.tolist():
        start, end = loc[request : request + 2].tolist()
        slot, first = int(slots[request]), int(computed[request])
        after = first + end - start
        tokens = all_token_ids[slot]
        input_ids[start:end] = tokens[first:after]
        known = min(max(int(prefill[request]) - after, 0), num_lookahead)
        lookahead[:known, slot] = tokens[after : after + known]
        lookahead[known:num_lookahead, slot] = 0


def _prepare_pos_seq_lens(
    pos_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
    max_num_reqs: int,
    BLOCK_SIZE: int,
    *,
    grid: tuple[int, ...],
    **options: Any,
) -> None:
    """Positions of the batch's tokens, and sequence lengths, 0 for unused requests.

    The grid is B + 1: the last program pads.
    """
    count = grid[0] - 1
    loc = query_start_loc_ptr.numpy()[: count + 1]
    lengths = np.diff(loc)
    computed = num_computed_tokens_ptr.numpy()[idx_mapping_ptr.numpy()[:count]]
    seq_lens = seq_lens_ptr.numpy()
    seq_lens[:count] = computed + lengths
    seq_lens[count:max_num_reqs] = 0
    first, last = int(loc[0]), int(loc[-1])
    positions = pos_ptr.numpy()[first:last]
    np.add((computed - loc[:-1]).repeat(lengths), np.arange(first, last), out=positions)


def _combine_sampled_and_draft_tokens(
    input_ids_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    last_sampled_tokens_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    prefill_len_ptr: torch.Tensor,
    draft_tokens_ptr: torch.Tensor,
    draft_tokens_stride: int,
    cu_num_logits_ptr: torch.Tensor,
    logits_indices_ptr: torch.Tensor,
    BLOCK_SIZE: int,
    NUM_NEW_SAMPLED_TOKENS: int = 1,
    *,
    grid: tuple[int, ...],
    **options: Any,
) -> None:
    """Write the last sampled token and the drafts into input_ids; index the logits.

    A request's logits stand at its last tokens. Of those, the ones that belong to
    the prompt keep their token.

    Args:
        last_sampled_tokens_ptr: [slots, 1].
        draft_tokens_ptr: [slots, K].
        logits_indices_ptr: [logits], token index of each logit, written.
    """
    count = grid[0]
    slots = idx_mapping_ptr.numpy()[:count]
    cu_logits = cu_num_logits_ptr.numpy()[: count + 1]
    num_logits = np.diff(cu_logits)
    ends = query_start_loc_ptr.numpy()[1 : count + 1]
    first_logit, last_logit = int(cu_logits[0]), int(cu_logits[-1])
    starts = ends - num_logits
    np.add(
        (starts - cu_logits[:-1]).repeat(num_logits),
        np.arange(first_logit, last_logit),
        out=logits_indices_ptr.numpy()[first_logit:last_logit],
    )

    seq_lens = seq_lens_ptr.numpy()[:count]
    prefill = prefill_len_ptr.numpy()[slots]
    decoding = seq_lens > prefill
    if not decoding.any():
        return
    input_ids = input_ids_ptr.numpy()
    if NUM_NEW_SAMPLED_TOKENS > 0:
        generated = decoding & (seq_lens - num_logits >= prefill)
        last_sampled = last_sampled_tokens_ptr.numpy().reshape(-1)
        input_ids[starts[generated]] = last_sampled[slots[generated]]
    # A row of padding has no logits, hence no drafts.
    drafts = np.maximum(num_logits - NUM_NEW_SAMPLED_TOKENS, 0) * decoding
    total = int(drafts.sum())
    if total:
        column = np.arange(total) - (drafts.cumsum() - drafts).repeat(drafts)
        input_ids[(ends - drafts).repeat(drafts) + column] = draft_tokens_ptr.numpy()[
            slots.repeat(drafts), column
        ]


def _get_num_sampled_and_rejected(
    num_sampled_ptr: torch.Tensor,
    num_rejected_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    prefill_len_ptr: torch.Tensor,
    *,
    grid: tuple[int, ...],
    **options: Any,
) -> None:
    """Drop what was sampled amid a prompt; the other logits were rejected."""
    count = grid[0]
    prefill = prefill_len_ptr.numpy()[idx_mapping_ptr.numpy()[:count]]
    complete = seq_lens_ptr.numpy()[:count] >= prefill
    num_sampled = num_sampled_ptr.numpy()[:count]
    num_sampled *= complete
    num_logits = np.diff(cu_num_logits_ptr.numpy()[: count + 1])
    num_rejected_ptr.numpy()[:count] = (num_logits - num_sampled) * complete


def _post_update(
    idx_mapping_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
    last_sampled_tokens_ptr: torch.Tensor,
    output_bin_counts_ptr: torch.Tensor | None,
    output_bin_counts_stride: int,
    sampled_tokens_ptr: torch.Tensor,
    sampled_tokens_stride: int,
    num_sampled_ptr: torch.Tensor,
    num_rejected_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor | None,
    all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int,
    total_len_ptr: torch.Tensor,
    *,
    grid: tuple[int, ...],
    **options: Any,
) -> None:
    """Append the sampled tokens to the requests' state. A negative slot is skipped.

    Args:
        output_bin_counts_ptr: [slots, vocabulary] int32 or None.
        sampled_tokens_ptr: [B, K + 1].
        query_start_loc_ptr: [B + 1], or None for a batch without queries.
        total_len_ptr: [slots], grows by the sampled tokens.
    """
    count = grid[0]
    slots = idx_mapping_ptr.numpy()[:count]
    num_sampled = num_sampled_ptr.numpy()[:count]
    computed_delta = -num_rejected_ptr.numpy()[:count]
    if query_start_loc_ptr is not None:
        computed_delta += np.diff(query_start_loc_ptr.numpy()[: count + 1])
    sampled = sampled_tokens_ptr.numpy()
    rows = np.arange(count)
    # A slot times a row of a million tokens may pass 2³¹.
    slots = slots.astype(np.int64)
    real = slots >= 0
    if not real.all():
        slots, num_sampled, computed_delta, rows = (
            array[real] for array in (slots, num_sampled, computed_delta, rows)
        )
    num_computed_tokens_ptr.numpy()[slots] += computed_delta
    total = int(num_sampled.sum())
    if not total:
        return
    total_len = total_len_ptr.numpy()
    lengths = total_len[slots]
    total_len[slots] = lengths + num_sampled
    if total == len(slots) == int(np.count_nonzero(num_sampled)):
        # One token each, as without speculation.
        token_slots, token_places, tokens = slots, lengths, sampled[rows, 0]
        last_slots, last_tokens = slots, tokens
    else:
        last = num_sampled.cumsum()
        column = np.arange(total) - (last - num_sampled).repeat(num_sampled)
        token_slots = slots.repeat(num_sampled)
        token_places = lengths.repeat(num_sampled) + column
        tokens = sampled[rows.repeat(num_sampled), column]
        some = num_sampled > 0
        last_slots, last_tokens = slots[some], tokens[last[some] - 1]
    last_sampled_tokens_ptr.numpy().reshape(-1)[last_slots] = last_tokens
    all_token_ids = all_token_ids_ptr.view(-1).numpy()
    all_token_ids[token_slots * all_token_ids_stride + token_places] = tokens
    if output_bin_counts_ptr is not None:
        np.add.at(output_bin_counts_ptr.numpy(), (token_slots, tokens), 1)


def _post_update_num_computed_tokens(
    idx_mapping_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    *,
    grid: tuple[int, ...],
    **options: Any,
) -> None:
    """Count the batch's tokens as computed."""
    slots = idx_mapping_ptr.numpy()[: grid[0]]
    lengths = np.diff(query_start_loc_ptr.numpy()[: grid[0] + 1])
    num_computed_tokens_ptr.numpy()[slots] += lengths


def _expand_idx_mapping(
    idx_mapping_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
    BLOCK_SIZE: int,
    *,
    grid: tuple[int, ...],
    **options: Any,
) -> None:
    """Slot of each logit, and which of its request's logits it is."""
    cu_logits = cu_num_logits_ptr.numpy()[: grid[0] + 1]
    num_logits = np.diff(cu_logits)
    first, last = int(cu_logits[0]), int(cu_logits[-1])
    slots = idx_mapping_ptr.numpy()[: grid[0]]
    expanded_idx_mapping_ptr.numpy()[first:last] = slots.repeat(num_logits)
    np.subtract(
        np.arange(first, last),
        cu_logits[:-1].repeat(num_logits),
        out=expanded_local_pos_ptr.numpy()[first:last],
        casting="same_kind",
    )


_MODULE = "vllm.v1.worker.gpu.input_batch"

OVERRIDES = {
    f"{_MODULE}._prepare_prefill_inputs_kernel": _prepare_prefill_inputs,
    f"{_MODULE}._prepare_pos_seq_lens_kernel": _prepare_pos_seq_lens,
    f"{_MODULE}._combine_sampled_and_draft_tokens_kernel": (
        _combine_sampled_and_draft_tokens
    ),
    f"{_MODULE}._get_num_sampled_and_rejected_kernel": _get_num_sampled_and_rejected,
    f"{_MODULE}._post_update_kernel": _post_update,
    f"{_MODULE}._post_update_num_computed_tokens_kernel": (
        _post_update_num_computed_tokens
    ),
    f"{_MODULE}._expand_idx_mapping_kernel": _expand_idx_mapping,
}
