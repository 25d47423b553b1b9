"""Repetition, frequency and presence penalties (vllm.v1.worker.gpu.sample.penalties).

For a token seen c times in the output:  l ← l / r if l > 0 else l · r, if it is in
prompt or output; l ← l − f · c; l ← l − p if c > 0. A row that verifies drafts also
counts the drafts before it, without which it would be scored as if they were absent.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from atom_vllm_bridge.engine_kernels.float_rows import edited, row_groups

MODULE = "vllm.v1.worker.gpu.sample.penalties"


def _penalties(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    token_ids_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    repetition_penalty_ptr: torch.Tensor,
    frequency_penalty_ptr: torch.Tensor,
    presence_penalty_ptr: torch.Tensor,
    prompt_bin_mask_ptr: torch.Tensor,
    prompt_bin_mask_stride: int,
    output_bin_counts_ptr: torch.Tensor,
    output_bin_counts_stride: int,
    vocab_size: int,
    BLOCK_SIZE: int,
    *,
    grid: tuple[int, ...],
    **options: Any,
) -> None:
    """Penalise the rows of requests that ask for it.

    Args:
        logits_ptr: [T, V'], V' ≥ vocab_size, any float type.
        expanded_idx_mapping_ptr: [T], request of each row.
        token_ids_ptr: [T], token fed at each row; a draft from the second row of a
            request on, −1 where there is none.
        expanded_local_pos_ptr: [T], row number within the request.
        repetition_penalty_ptr, frequency_penalty_ptr, presence_penalty_ptr:
            [requests] float32; 1, 0 and 0 do nothing.
        prompt_bin_mask_ptr: [requests, ⌈vocab_size / 32⌉] int32, a bit for each token.
        output_bin_counts_ptr: [requests, vocab_size] int32.
    """
    requests = expanded_idx_mapping_ptr.numpy()[: grid[0]]
    repetition = repetition_penalty_ptr.numpy()[requests]
    frequency = frequency_penalty_ptr.numpy()[requests]
    presence = presence_penalty_ptr.numpy()[requests]
    repeats = repetition != 1.0
    rows = np.flatnonzero(repeats | (frequency != 0.0) | (presence != 0.0))
    if not len(rows):
        return
    prompt_mask = prompt_bin_mask_ptr.numpy()
    output_counts = output_bin_counts_ptr.numpy()
    local_pos = expanded_local_pos_ptr.numpy()
    token_ids = token_ids_ptr.numpy()
    with edited(logits_ptr) as logits:
        for group in row_groups(rows, vocab_size):
            counts = output_counts[requests[group], :vocab_size]
            _count_drafts(counts, group, local_pos, token_ids)
            in_output = counts > 0
            scores = logits[group, :vocab_size]
            if repeats[group].any():
                in_prompt = _unpack(prompt_mask[requests[group]], vocab_size)
                scale = np.where(
                    in_prompt | in_output,
                    repetition[group, np.newaxis],
                    np.float32(1.0),
                )
                scores *= np.where(scores > 0.0, np.float32(1.0) / scale, scale)
            scores -= frequency[group, np.newaxis] * counts.astype(np.float32)
            scores -= presence[group, np.newaxis] * in_output.astype(np.float32)
            logits[group, :vocab_size] = scores


def _count_drafts(
    counts: NDArray[np.int32],
    rows: NDArray[np.intp],
    local_pos: NDArray[np.integer],
    token_ids: NDArray[np.integer],
) -> None:
    """Add to counts [rows, V] the drafts between a request's first row and each row."""
    for index, row in enumerate(rows.tolist()):
        before = int(local_pos[row])
        if before:
            drafts = token_ids[row - before + 1 : row + 1]
            known = drafts[(drafts >= 0) & (drafts < counts.shape[1])]
            np.add.at(counts[index], known, 1)


def _unpack(words: NDArray[np.int32], width: int) -> NDArray[np.bool_]:
    """[rows, width] bits of [rows, ⌈width / 32⌉] words, the lowest bit first."""
    octets = words.astype("<i4", copy=False).view(np.uint8)
    return np.unpackbits(octets, axis=1, count=width, bitorder="little").view(np.bool_)


def _bincount(
    expanded_idx_mapping_ptr: torch.Tensor,
    all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int,
    prompt_len_ptr: torch.Tensor,
    prefill_len_ptr: torch.Tensor,
    prompt_bin_mask_ptr: torch.Tensor,
    prompt_bin_mask_stride: int,
    output_bin_counts_ptr: torch.Tensor,
    output_bin_counts_stride: int,
    BLOCK_SIZE: int,
    *,
    grid: tuple[int, ...],
    **options: Any,
) -> None:
    """Add a new request's tokens to its statistics.

    Args:
        expanded_idx_mapping_ptr: [grid[0]], requests.
        all_token_ids_ptr: [requests, length]. The first prompt_len tokens are the
            prompt, those up to prefill_len output of an earlier run of the request.
        prompt_bin_mask_ptr, output_bin_counts_ptr: as in _penalties, added to.
    """
    limit = grid[1] * BLOCK_SIZE
    prompt_mask = prompt_bin_mask_ptr.numpy()
    output_counts = output_bin_counts_ptr.numpy()
    for request in expanded_idx_mapping_ptr.tolist()[: grid[0]]:
        tokens = all_token_ids_ptr[request].numpy()
        prefill_len = min(int(prefill_len_ptr[request]), limit)
        prompt_len = min(int(prompt_len_ptr[request]), prefill_len)
        seen = np.zeros(prompt_mask.shape[1] * 32, np.bool_)
        seen[tokens[:prompt_len]] = True
        words = np.packbits(seen, bitorder="little").view("<i4")
        prompt_mask[request] |= words.astype(np.int32, copy=False)
        np.add.at(output_counts[request], tokens[prompt_len:prefill_len], 1)


OVERRIDES = {
    f"{MODULE}._penalties_kernel": _penalties,
    f"{MODULE}._bincount_kernel": _bincount,
}
