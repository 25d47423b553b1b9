"""Stand-ins for vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator.

MTP drafts one token after another: a pass over the target's tokens, each shifted to
the next one, and then K − 1 passes of one token a request.
"""

from typing import Any

import numpy as np
import torch


def _prepare_prefill_inputs(
    last_token_indices_ptr: torch.Tensor,
    draft_current_step_ptr: torch.Tensor,
    draft_input_ids_ptr: torch.Tensor,
    draft_positions_ptr: torch.Tensor,
    draft_query_start_loc_ptr: torch.Tensor,
    draft_seq_lens_ptr: torch.Tensor,
    target_input_ids_ptr: torch.Tensor,
    target_positions_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    last_sampled_ptr: torch.Tensor,
    next_prefill_tokens_ptr: torch.Tensor,
    num_sampled_ptr: torch.Tensor,
    num_rejected_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    max_num_reqs: int,
    BLOCK_SIZE: int,
    *,
    grid: tuple[int, ...],
    **options: Any,
) -> None:
    """The first pass: the target's accepted tokens moved by one, then the next token.

    Rejected tokens stay in the batch with what stood there before.

    Args:
        last_token_indices_ptr: [max_num_reqs], written; 0 for unused requests.
        draft_current_step_ptr: scalar, set to 0.
    """
    count = grid[0]
    if not count:
        return
    slots = idx_mapping_ptr.numpy()[:count]
    loc = query_start_loc_ptr.numpy()[: count + 1]
    rejected = num_rejected_ptr.numpy()[:count]
    ends = loc[1:] - rejected
    first, last = int(loc[0]), int(loc[-1])
    tokens, positions = target_input_ids_ptr.numpy(), target_positions_ptr.numpy()
    draft_tokens, draft_positions = (
        draft_input_ids_ptr.numpy(),
        draft_positions_ptr.numpy(),
    )
    if rejected.any():
        place = np.arange(first, last)
        end = ends.repeat(np.diff(loc))
        kept = place[place < end]
        moved = place[place < end - 1]
        draft_positions[kept] = positions[kept]
        draft_tokens[moved] = tokens[moved + 1]
    else:
        draft_positions[first:last] = positions[first:last]
        # Each request's last place gets its next token below.
        draft_tokens[first : last - 1] = tokens[first + 1 : last]
    draft_tokens[ends - 1] = np.where(
        num_sampled_ptr.numpy()[:count] > 0,
        last_sampled_ptr.numpy().reshape(-1)[slots].astype(np.int32),
        next_prefill_tokens_ptr.numpy().reshape(-1)[slots],
    )
    last_token_indices = last_token_indices_ptr.numpy()
    last_token_indices[:count] = ends - 1
    last_token_indices[count:max_num_reqs] = 0
    draft_loc = draft_query_start_loc_ptr.numpy()
    draft_loc[:count] = loc[:-1]
    draft_loc[count : max_num_reqs + 1] = last
    draft_seq_lens = draft_seq_lens_ptr.numpy()
    draft_seq_lens[:count] = seq_lens_ptr.numpy()[:count]
    draft_seq_lens[count:max_num_reqs] = 0
    draft_current_step_ptr.zero_()


def _prepare_decode_inputs(
    draft_tokens_ptr: torch.Tensor,
    draft_tokens_stride: int,
    target_seq_lens_ptr: torch.Tensor,
    num_rejected_ptr: torch.Tensor,
    input_ids_ptr: torch.Tensor,
    positions_ptr: torch.Tensor,
    sample_src_positions_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    max_model_len: int,
    max_num_reqs: int,
    BLOCK_SIZE: int,
    ADVANCE_DRAFT_POSITIONS: bool,
    *,
    grid: tuple[int, ...],
    **options: Any,
) -> None:
    """The second pass: the first drafted token of each request, one token a request.

    The grid is B + 1: the last program pads. Positions and lengths stop at
    max_model_len.

    Args:
        draft_tokens_ptr: [B] or [B, K].
    """
    count = grid[0] - 1
    query_start_loc_ptr.numpy()[: max_num_reqs + 1] = np.minimum(
        np.arange(max_num_reqs + 1), count
    )
    seq_lens = seq_lens_ptr.numpy()
    seq_lens[count:max_num_reqs] = 0
    drafts = draft_tokens_ptr.numpy()
    input_ids_ptr.numpy()[:count] = (drafts if drafts.ndim == 1 else drafts[:, 0])[
        :count
    ]
    sample_src_positions_ptr.numpy()[:count] += 1
    accepted = target_seq_lens_ptr.numpy()[:count] - num_rejected_ptr.numpy()[:count]
    if ADVANCE_DRAFT_POSITIONS:
        positions = positions_ptr.numpy()[:count]
        np.minimum(positions + 1, max_model_len - 1, out=positions)
        accepted = np.minimum(accepted + 1, max_model_len)
    seq_lens[:count] = accepted


def _update_draft_inputs(
    output_draft_tokens_ptr: torch.Tensor,
    output_draft_tokens_stride: int,
    next_input_hidden_states_ptr: torch.Tensor,
    next_input_hidden_states_stride: int,
    input_ids_ptr: torch.Tensor,
    positions_ptr: torch.Tensor,
    sample_src_positions_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    draft_tokens_ptr: torch.Tensor,
    current_draft_step_ptr: torch.Tensor,
    hidden_states_ptr: torch.Tensor,
    hidden_states_stride: int,
    hidden_size: int,
    max_model_len: int,
    num_speculative_steps: int,
    BLOCK_SIZE: int,
    ADVANCE_DRAFT_POSITIONS: bool,
    *,
    grid: tuple[int, ...],
    **options: Any,
) -> None:
    """Keep the drafted tokens of this step, and make them the next step's inputs.

    Args:
        output_draft_tokens_ptr: [B, K], column `step` written.
        next_input_hidden_states_ptr, hidden_states_ptr: [B, hidden_size].
        current_draft_step_ptr: scalar; after the last step nothing else is written.
    """
    count = grid[0]
    step = int(current_draft_step_ptr)
    drafts = draft_tokens_ptr.numpy()[:count]
    output_draft_tokens_ptr.numpy()[:count, step] = drafts
    if step >= num_speculative_steps - 1:
        return
    sample_src_positions_ptr.numpy()[:count] += 1
    input_ids_ptr.numpy()[:count] = drafts
    next_input_hidden_states_ptr[:count, :hidden_size] = hidden_states_ptr[
        :count, :hidden_size
    ]
    if ADVANCE_DRAFT_POSITIONS:
        positions = positions_ptr.numpy()[:count]
        np.minimum(positions + 1, max_model_len - 1, out=positions)
        seq_lens = seq_lens_ptr.numpy()[:count]
        np.minimum(seq_lens + 1, max_model_len, out=seq_lens)


_MODULE = "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator"

OVERRIDES = {
    f"{_MODULE}._prepare_prefill_inputs_kernel": _prepare_prefill_inputs,
    f"{_MODULE}._prepare_decode_inputs_kernel": _prepare_decode_inputs,
    f"{_MODULE}._update_draft_inputs_kernel": _update_draft_inputs,
}
