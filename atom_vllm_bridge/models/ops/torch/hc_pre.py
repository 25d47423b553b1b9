"""Hyper-connection read: collapse the residual streams into a block's input, and make the weights that write back.

ẑ = z / √(mean(z²) + ε),  z = the streams of a token, flattened;   mix = ẑ · fnᵀ
pre  = σ(mix₀ · s₀ + b₀) + ε_hc            post = 2 σ(mix₁ · s₁ + b₁)
comb = Sinkhorn(softmax(mix₂ · s₂ + b₂) + ε_hc)        y = Σ_i pre_i · stream_i
(manifold-constrained hyper-connections; DeepSeek-V4 report, section 2.2)
"""

import torch
import torch.nn.functional as F

from atom_vllm_bridge.models.ops.torch.rms_norm import inverse_rms, rms_norm


def sinkhorn(comb: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """Divide columns by their sums, then rows and columns alternately, towards a doubly stochastic matrix.

    Args:
        comb: [T, n, n] float32, positive; changed.
        iterations: how often columns are divided; rows once less.
        eps: added to every sum. It is not negligible: where `comb` is close to decomposable it moves the result by 1e-4.
    """
    comb = comb.div_(comb.sum(-2, keepdim=True).add_(eps))
    for _ in range(iterations - 1):
        comb = comb.div_(comb.sum(-1, keepdim=True).add_(eps))
        comb = comb.div_(comb.sum(-2, keepdim=True).add_(eps))
    return comb


def hc_pre(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    iterations: int,
    eps: float,
    norm_eps: float,
    weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Collapse the streams.

    Args:
        streams: [T, n, d], the residual.
        fn: [(2 + n) · n, n · d] float32.
        base: [(2 + n) · n] float32: n for pre, n for post, n · n for comb.
        scale: [3] float32: pre, post, comb.
        iterations: of the Sinkhorn normalisation.
        eps: ε_hc.
        norm_eps: ε of the norms.
        weight: [d] float32, of the norm of y that the block begins with; None: y is not normed.

    Returns:
        y [T, d] in streams' dtype; post [T, n] float32; comb [T, n, n] float32, whose rows and columns sum to 1.
    """
    n = streams.shape[1]
    z = streams.float()
    flat = z.flatten(1)
    mix = F.linear(flat, fn).mul_(inverse_rms(flat, norm_eps))
    gate = torch.addcmul(base[: 2 * n], mix[:, : 2 * n], scale[:2].repeat_interleave(n))
    gate.sigmoid_()
    comb = torch.addcmul(base[2 * n :], mix[:, 2 * n :], scale[2]).view(-1, n, n)
    comb = sinkhorn(comb.softmax(-1).add_(eps), iterations, eps)
    y = torch.bmm((gate[:, :n] + eps).unsqueeze(1), z).squeeze(1)
    y = y.to(streams.dtype)
    if weight is not None:
        y = rms_norm(y, weight, norm_eps)
    return y, gate[:, n:] * 2, comb
