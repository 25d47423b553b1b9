"""Hyper-connection head: collapse the streams after the last layer.

y = Σ_i (σ(mix_i · scale + base_i) + ε_hc) · stream_i,   mix = ẑ · fnᵀ as in hc_pre; nothing is written back.
"""

import torch
import torch.nn.functional as F

from atom_vllm_bridge.models.ops.torch.rms_norm import inverse_rms


def hc_head(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
    norm_eps: float,
) -> torch.Tensor:
    """Collapse the streams.

    Args:
        streams: [T, n, d].
        fn: [n, n · d] float32.
        base: [n] float32.
        scale: [1] float32.
        eps, norm_eps: ε_hc, and ε of the norm without weight.

    Returns:
        [T, d] in streams' dtype; arithmetic in float32.
    """
    z = streams.float()
    flat = z.flatten(1)
    mix = F.linear(flat, fn).mul_(inverse_rms(flat, norm_eps))
    pre = torch.sigmoid(mix * scale + base) + eps
    return torch.bmm(pre.unsqueeze(1), z).squeeze(1).to(streams.dtype)
