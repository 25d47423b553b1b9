"""Choose experts and weigh them.

score = √softplus(x · gateᵀ);   experts: the k largest of score + bias, the lower id first where equal, or a table's;   weight = route_scale · score / Σ score
(the bias only selects; DeepSeek-V4 report, section 2.1)
"""

import torch
import torch.nn.functional as F


def router(
    x: torch.Tensor,
    gate: torch.Tensor,
    route_scale: float,
    k: int,
    bias: torch.Tensor | None = None,
    experts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Route tokens.

    Args:
        x: [T, d].
        gate: [E, d] float32.
        route_scale: factor of the normalised weights.
        k: experts a token.
        bias: [E] float32, added for the choice; needed where `experts` is None.
        experts: [T, k] int64, the choice of a hash layer.

    Returns:
        experts [T, k] int64, weights [T, k] float32.
    """
    scores = F.softplus(F.linear(x.float(), gate)).sqrt_()
    if experts is None:
        # Unlike topk, a stable sort says which of equals comes first.
        order = (scores + bias).sort(dim=-1, descending=True, stable=True).indices
        experts = order[:, :k]
    weights = scores.gather(1, experts)
    return experts, weights * (route_scale / (weights.sum(-1, keepdim=True) + 1e-20))
