"""Pool the last K tokens' compressor inputs into one entry.

entry = Σ_k softmax_k(score_k) · kv_k   for each channel                      (DeepSeek-V4 report, section 2.3)

Without overlap K = ratio. With overlap K = 2 · ratio: a token makes two rows of kv and score, one for the entry of the next
group of tokens (the first half of the columns) and one for that of its own (the second half).
"""

import torch

from atom_vllm_bridge.models.ops.torch.gather_rows import gather_rows

# Entries are pooled in batches, so that a long prefill needs no more than this at once.
TEMPORARY_BYTES = 4 << 20


def compressor_pool(
    state: torch.Tensor, ids: torch.Tensor, unseen: torch.Tensor
) -> torch.Tensor:
    """Pool rows of the rolling state.

    Args:
        state: [B, N · P, D] float32, the state's rows cut into parts of D columns: P = 2 (kv, score), or 4 with overlap
            (kv for the next group, kv for its own, and the two scores).
        ids: [M, 2, K] int64, ids of the parts to read: kv, then score. Where `unseen`, any id of finite values.
        unseen: [M, K] bool, sources before the start of the sequence.

    Returns:
        [M, D] float32.
    """
    step = max(1, TEMPORARY_BYTES // (ids[0].numel() * state.shape[-1] * 4))
    entries = []
    for ids_, unseen_ in zip(ids.split(step), unseen.split(step), strict=True):
        kv, score = gather_rows(state, ids_).unbind(1)
        weight = score.masked_fill_(unseen_.unsqueeze(-1), -torch.inf).softmax(1)
        entries.append(weight.mul_(kv).sum(1))
    return entries[0] if len(entries) == 1 else torch.cat(entries)
