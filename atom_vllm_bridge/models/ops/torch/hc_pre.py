"""Hyper-connection read: collapse the residual streams into a block's input, and make the weights that write back.

ẑ = z / √(mean(z²) + ε),  z = the streams of a token, flattened;   mix = ẑ · fnᵀ
pre  = σ(mix₀ · s₀ + b₀) + ε_hc            post = 2 σ(mix₁ · s₁ + b₁)
comb = Sinkhorn(softmax(mix₂ · s₂ + b₂) + ε_hc)        y = Σ_i pre_i · stream_i
(manifold-constrained hyper-connections; DeepSeek-V4 report, section 2.2)
"""

import torch
import torch.nn.functional as F

from atom_vllm_bridge.models.ops.torch.rms_norm import inverse_rms


def sinkhorn(comb: torch.Tensor, iterations: int) -> torch.Tensor:
    """Normalise columns, then rows and columns alternately, towards a doubly stochastic matrix.

    Dividing by a sum is subtracting a log-sum-exp, so in logarithms one normalisation is one log-softmax. The published
    code adds ε (1e-6) to every sum; a common factor of a row or a column cancels in the next normalisation, so that leaves
    the result within a few ε.

    Args:
        comb: [T, n, n] float32, positive.
        iterations: how often columns are normalised; rows once less.
    """
    log = comb.log().log_softmax(-2)
    for _ in range(iterations - 1):
        log = log.log_softmax(-1).log_softmax(-2)
    return log.exp_()


def hc_pre(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Collapse the streams.

    Args:
        streams: [T, n, d], the residual.
        fn: [(2 + n) · n, n · d] float32.
        base: [(2 + n) · n] float32: n for pre, n for post, n · n for comb.
        scale: [3] float32: pre, post, comb.
        iterations: of the Sinkhorn normalisation.
        eps: ε_hc.
        norm_eps: ε of the norm without weight.

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
    comb = sinkhorn(comb.softmax(-1) + eps, iterations)
    y = torch.bmm((gate[:, :n] + eps).unsqueeze(1), z).squeeze(1)
    return y.to(streams.dtype), gate[:, n:] * 2, comb
