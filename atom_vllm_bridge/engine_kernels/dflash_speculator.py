"""Stand-in for the kernel of vllm.v1.worker.gpu.spec_decode.dflash.speculator.

DFlash and DSpark draft a block at once: after a request's accepted tokens (its
context) come Q query tokens, the last sampled one and placeholders.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def _prepare_dflash_inputs(
    out_input_ids_ptr: torch.Tensor,
    out_query_positions_ptr: torch.Tensor,
    out_query_start_loc_ptr: torch.Tensor,
    out_seq_lens_ptr: torch.Tensor,
    out_query_slot_mapping_ptr: torch.Tensor,
    out_context_positions_ptr: torch.Tensor,
    out_context_slot_mapping_ptr: torch.Tensor,
    out_sample_indices_ptr: torch.Tensor,
    out_sample_pos_ptr: torch.Tensor,
    out_sample_idx_mapping_ptr: torch.Tensor,
    out_temperature_ptr: torch.Tensor,
    out_seeds_ptr: torch.Tensor,
    target_positions_ptr: torch.Tensor,
    target_query_start_loc_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    last_sampled_ptr: torch.Tensor,
    next_prefill_tokens_ptr: torch.Tensor,
    num_sampled_ptr: torch.Tensor,
    num_rejected_ptr: torch.Tensor,
    temperature_ptr: torch.Tensor,
    seeds_ptr: torch.Tensor,
    block_table_ptr: torch.Tensor,
    block_table_stride: int,
    parallel_drafting_token_id: int,
    block_size: int,
    num_query_per_req: int,
    num_speculative_steps: int,
    max_num_reqs: int,
    max_num_tokens: int,
    max_model_len: int,
    cp_rank: int,
    SAMPLE_FROM_ANCHOR: bool,
    PAD_SLOT_ID: int,
    CP_SIZE: int,
    CP_INTERLEAVE: int,
    BLOCK_SIZE: int,
    *,
    grid: tuple[int, ...],
    **options: Any,
) -> None:
    """Inputs of one drafting pass for B requests, and padding up to max_num_reqs.

    Rejected tokens are no context: position 0, no cache entry. A position whose block
    is the null block 0 has no cache entry either.

    Args:
        out_input_ids_ptr, out_query_positions_ptr, out_query_slot_mapping_ptr:
            [B · Q ...], request after request.
        out_context_positions_ptr, out_context_slot_mapping_ptr: [tokens], as the
            target's batch.
        out_sample_*_ptr: [max_num_reqs · K], where, for which position and for which
            slot a draft token is sampled; with SAMPLE_FROM_ANCHOR (DSpark) at every
            query token for the position after it, else at the placeholders for their
            own.
        block_table_ptr: [B, blocks] int32, the draft's group.
    """
    count, width = grid[0], num_query_per_req
    if not count:
        return
    slots = idx_mapping_ptr.numpy()[:count]
    positions = target_positions_ptr.numpy()
    loc = target_query_start_loc_ptr.numpy()[: count + 1]
    context_ends = loc[1:] - num_rejected_ptr.numpy()[:count]
    table = block_table_ptr.numpy()
    cache = _Cache(
        table, block_table_stride, block_size, cp_rank, CP_SIZE, CP_INTERLEAVE
    )

    first, last = int(loc[0]), int(loc[-1])
    requests = np.arange(count).repeat(np.diff(loc))
    accepted = np.arange(first, last) < context_ends[requests]
    context = positions[first:last] * accepted
    out_context_positions_ptr.numpy()[first:last] = context
    entries, resident = cache.entries(requests, context)
    out_context_slot_mapping_ptr.numpy()[first:last] = np.where(
        accepted & resident, entries, PAD_SLOT_ID
    )

    starts = positions[context_ends - 1] + 1
    queries = starts[:, None] + np.arange(width)
    entries, resident = cache.entries(np.arange(count)[:, None], queries)
    mapping = out_query_slot_mapping_ptr.numpy()
    mapping[: count * width] = np.where(resident, entries, PAD_SLOT_ID).ravel()
    mapping[count * width : max_num_tokens] = PAD_SLOT_ID
    query_positions = out_query_positions_ptr.numpy()[: count * width]
    np.minimum(queries.ravel(), max_model_len - 1, out=query_positions)
    input_ids = out_input_ids_ptr.numpy()[: count * width].reshape(count, width)
    input_ids[:] = parallel_drafting_token_id
    input_ids[:, 0] = np.where(
        num_sampled_ptr.numpy()[:count] > 0,
        last_sampled_ptr.numpy().reshape(-1)[slots].astype(np.int32),
        next_prefill_tokens_ptr.numpy().reshape(-1)[slots],
    )

    query_start_loc = out_query_start_loc_ptr.numpy()
    query_start_loc[:count] = np.arange(count) * width
    query_start_loc[count : max_num_reqs + 1] = count * width
    seq_lens = out_seq_lens_ptr.numpy()
    seq_lens[:count] = np.minimum(starts + width, max_model_len)
    seq_lens[count:max_num_reqs] = 0
    out_temperature_ptr.numpy()[slots] = temperature_ptr.numpy()[slots]
    out_seeds_ptr.numpy()[slots] = seeds_ptr.numpy()[slots]

    skipped = 0 if SAMPLE_FROM_ANCHOR else 1
    sampled = np.arange(width - skipped)
    steps = np.arange(count)[:, None] * num_speculative_steps + sampled
    padding = slice(count * num_speculative_steps, max_num_reqs * num_speculative_steps)
    for out, values, pad in (
        (
            out_sample_indices_ptr.numpy(),
            np.arange(count)[:, None] * width + sampled + skipped,
            0,
        ),
        (
            out_sample_pos_ptr.numpy(),
            queries[:, skipped:] + (1 if SAMPLE_FROM_ANCHOR else 0),
            0,
        ),
        (out_sample_idx_mapping_ptr.numpy(), slots[:, None], -1),
    ):
        out[steps] = values
        out[padding] = pad


class _Cache:
    """Finds the cache entry of a position through the requests' block tables."""

    def __init__(
        self,
        table: NDArray[np.int32],
        stride: int,
        block_size: int,
        cp_rank: int,
        cp_size: int,
        interleave: int,
    ) -> None:
        self.table = table
        self.last_block = stride - 1
        self.block_size = block_size
        self.cp_rank = cp_rank
        self.cp_size = cp_size
        self.interleave = interleave

    def entries(
        self, requests: NDArray[np.intp], positions: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """block number · block size + offset, and whether this rank holds it.

        Under context parallelism a block of block_size · cp_size positions is dealt
        to the ranks in runs of `interleave`.
        """
        blocks, offsets = np.divmod(positions, self.block_size * self.cp_size)
        np.minimum(blocks, self.last_block, out=blocks)
        numbers = self.table[requests, blocks].astype(np.int64)
        resident = numbers != 0
        if self.cp_size != 1:
            turn = offsets // self.interleave
            resident &= turn % self.cp_size == self.cp_rank
            offsets = turn // self.cp_size * self.interleave + offsets % self.interleave
        return numbers * self.block_size + offsets, resident


OVERRIDES = {
    "vllm.v1.worker.gpu.spec_decode.dflash.speculator._prepare_dflash_inputs_kernel": (
        _prepare_dflash_inputs
    ),
}
