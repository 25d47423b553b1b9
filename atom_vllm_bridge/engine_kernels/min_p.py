"""min-p (vllm.v1.worker.gpu.sample.min_p).

Drops the tokens less likely than min_p times the likeliest:
l < max(l) + log(min_p) becomes −inf.
"""

from typing import Any

import numpy as np
import torch

from atom_vllm_bridge.engine_kernels.float_rows import edited, row_groups, widened

MODULE = "vllm.v1.worker.gpu.sample.min_p"


def _min_p(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    min_p_ptr: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
    *,
    grid: tuple[int, ...],
    **options: Any,
) -> None:
    """Mask the rows of requests whose min_p is not 0.

    Args:
        logits_ptr: [T, V'], V' ≥ vocab_size, any float type.
        expanded_idx_mapping_ptr: [T], request of each row.
        min_p_ptr: [requests] float32, in [0, 1].
    """
    requests = expanded_idx_mapping_ptr.numpy()[: grid[0]]
    min_p = widened(min_p_ptr)[requests]
    rows = np.flatnonzero(min_p)
    if not len(rows):
        return
    with edited(logits_ptr) as logits:
        for group in row_groups(rows, vocab_size):
            scores = logits[group, :vocab_size]
            likeliest = np.fmax.reduce(scores, axis=1)
            threshold = likeliest + np.log(min_p[group])
            scores[scores < threshold[:, np.newaxis]] = -np.inf
            logits[group, :vocab_size] = scores


OVERRIDES = {f"{MODULE}._min_p_kernel": _min_p}
