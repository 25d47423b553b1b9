"""Hyper-connection write-back: spread a block's output over the residual streams.

out[t, j] = post[t, j] · x[t] + Σ_i comb[t, i, j] · residual[t, i]      (DeepSeek-V4 report, section 2.2)
"""

import torch


def hc_post(
    x: torch.Tensor, residual: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """Write `x` back into the streams.

    Args:
        x: [T, d], output of attention or feed-forward.
        residual: [T, n, d], the streams before the block.
        post: [T, n] float32, write weights in (0, 2).
        comb: [T, n, n] float32, doubly stochastic; summed over its first index.

    Returns:
        [T, n, d] in residual's dtype; arithmetic in float32.
    """
    written = post.unsqueeze(-1) * x.unsqueeze(1)
    mixed = torch.baddbmm(written, comb.transpose(1, 2), residual.float())
    return mixed.to(residual.dtype)
