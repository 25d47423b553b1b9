"""Bad words (vllm.v1.worker.gpu.sample.bad_words)."""

import itertools
from typing import Any

import numpy as np
import torch

from atom_vllm_bridge.engine_kernels.float_rows import edited

MODULE = "vllm.v1.worker.gpu.sample.bad_words"


def _bad_words(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    bad_word_token_ids_ptr: torch.Tensor,
    bad_word_token_ids_stride: int,
    bad_word_offsets_ptr: torch.Tensor,
    bad_word_offsets_stride: int,
    num_bad_words_ptr: torch.Tensor,
    all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int,
    prompt_len_ptr: torch.Tensor,
    total_len_ptr: torch.Tensor,
    input_ids_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    *,
    grid: tuple[int, ...],
    **options: Any,
) -> None:
    """−inf for the last token of a word whose other tokens end the row's output.

    The output is what was generated so far, then the drafts before the row.

    Args:
        logits_ptr: [T, V'], any float type.
        expanded_idx_mapping_ptr: [T], request of each row.
        bad_word_token_ids_ptr: [requests, ·], the words one after another.
        bad_word_offsets_ptr: [requests, words + 1], where each begins.
        num_bad_words_ptr: [requests].
        all_token_ids_ptr: [requests, length], prompt and output.
        prompt_len_ptr, total_len_ptr: [requests].
        input_ids_ptr: [T], token fed at each row; drafts from a request's second row.
        expanded_local_pos_ptr: [T], row number within the request.
    """
    num_tokens, max_words = grid[:2]
    requests = expanded_idx_mapping_ptr.numpy()[:num_tokens]
    num_words = np.minimum(num_bad_words_ptr.numpy()[requests], max_words)
    concerned = np.flatnonzero(num_words > 0)
    if not len(concerned):
        return
    all_token_ids = all_token_ids_ptr.numpy()
    input_ids = input_ids_ptr.numpy()
    with edited(logits_ptr) as logits:
        for row in concerned.tolist():
            request = int(requests[row])
            offsets = bad_word_offsets_ptr[request, : num_words[row] + 1].tolist()
            words = bad_word_token_ids_ptr[request, : offsets[-1]].tolist()
            prompt_len = int(prompt_len_ptr[request])
            total_len = int(total_len_ptr[request])
            num_drafts = int(expanded_local_pos_ptr[row])
            longest = max(map(int.__sub__, offsets[1:], offsets)) - 1
            since = max(prompt_len, total_len - longest)
            output = all_token_ids[request, since:total_len].tolist()
            output += input_ids[row - num_drafts + 1 : row + 1].tolist()
            for start, end in itertools.pairwise(offsets):
                prefix = words[start : end - 1]
                if output[len(output) - len(prefix) :] == prefix:
                    logits[row, words[end - 1]] = -np.inf


OVERRIDES = {f"{MODULE}._bad_words_kernel": _bad_words}
