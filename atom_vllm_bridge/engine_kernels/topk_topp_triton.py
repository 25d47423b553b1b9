"""Stand-in for the kernel of vllm.v1.sample.ops.topk_topp_triton.

The kernel searches a pivot in tiles, for the sake of a GPU, and Triton's interpreter
cannot run it. On a CPU vLLM without Triton sorts; that path, which is vLLM's own
reference for the kernel, is used here, so that the same request draws the same tokens
with the plugin as without.
"""

import math
from typing import Any

import torch


def _topk_topp(
    LOGITS: torch.Tensor,
    LOGITS_STRIDE_0: int,
    BUFFER: torch.Tensor,
    PERCENTILE_TO_STD_TABLE: torch.Tensor,
    NORMAL_CDF_TO_SIGMA_TABLE: torch.Tensor,
    K: torch.Tensor,
    P: torch.Tensor,
    BATCH_SIZE: int,
    VOCAB_SIZE: int,
    MASK_VALUE: float,
    BLOCK_SIZE: int,
    BLOCK_SIZE_TRUNC: int,
    TOPK_ENABLED: bool,
    TOPP_ENABLED: bool,
    SPLIT_COVERS_PONLY: bool,
    *,
    grid: tuple[int, ...],
    **options: Any,
) -> None:
    """Mask, in place, all but the k likeliest tokens, then all but the nucleus of p.

    Tokens as likely as the k-th are kept too.

    Args:
        LOGITS: [BATCH_SIZE, VOCAB_SIZE] float32.
        K: [BATCH_SIZE] int32, VOCAB_SIZE for no limit; read if TOPK_ENABLED.
        P: [BATCH_SIZE] float32; read if TOPP_ENABLED.
    """
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    logits = LOGITS[:BATCH_SIZE]
    masked = apply_top_k_top_p_pytorch(
        logits,
        K[:BATCH_SIZE] if TOPK_ENABLED else None,
        P[:BATCH_SIZE] if TOPP_ENABLED else None,
        allow_cpu_sync=True,
    )
    if math.isfinite(MASK_VALUE):
        masked = masked.masked_fill(masked.isneginf(), MASK_VALUE)
    if masked.data_ptr() != logits.data_ptr():
        logits.copy_(masked)


OVERRIDES = {
    "vllm.v1.sample.ops.topk_topp_triton._topk_topp_kernel": _topk_topp,
}
