"""Routed experts: y[t] = Σ_k weight[t, k] · w2_e · swiglu(w13_e · x[t]),  e = experts[t, k].

Rows are sorted by expert, so that an expert's weights are read once. With many rows every expert multiplies its own. With
few, a matrix times a vector is taken as a sum of the matrix's rows weighted by the vector, which an embedding bag computes
for chosen matrices where they lie; that is what weights stored input by input are for.
"""

import torch
import torch.nn.functional as F

from atom_vllm_bridge.models.ops import panels
from atom_vllm_bridge.models.ops.torch.swiglu import swiglu
from atom_vllm_bridge.models.quantization.kept import Kept


def experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor | Kept,
    w2: torch.Tensor | Kept,
    limit: float,
) -> torch.Tensor:
    """Run each token through its experts.

    Args:
        x: [T, d].
        chosen: [T, k] int64; E: an expert that is not here, and counts nothing.
        weights: [T, k] float32.
        w13: [E, d, 2 · I], for each input the gate's weights beside up's; or the panels of that (ops/panels.py), or as a GPU
            keeps them (quantization/kept.py).
        w2: [E, I, d], or the same of that. Dtypes narrower than x's are widened.
        limit: of the clamp in `swiglu`.

    Returns:
        [T, d] float32.
    """
    tokens, k = chosen.shape
    if isinstance(w13, Kept) or isinstance(w2, Kept):
        w13, w2 = (w.plain(x.dtype) if isinstance(w, Kept) else w for w in (w13, w2))
    elif w13.dim() == 4:
        inner = w2.shape[2]
        w13 = panels.join(w13)[..., : 2 * inner].to(x.dtype)
        w2 = panels.join(w2)[..., : x.shape[1]].to(x.dtype)
    expert, order = chosen.flatten().sort(stable=True)
    rows = x.index_select(0, order // k)
    few = len(expert) <= w13.shape[0]
    product = _bags if few or _may_not_wait(x) else _groups
    hidden = swiglu(product(rows, expert, w13), limit)
    missing = (expert == w13.shape[0]).unsqueeze(1)
    sorted_y = product(hidden, expert, w2).masked_fill_(missing, 0.0)
    y = torch.empty_like(sorted_y).index_copy_(0, order, sorted_y)
    return torch.bmm(weights.unsqueeze(1), y.view(tokens, k, -1).float()).squeeze(1)


def _may_not_wait(x: torch.Tensor) -> bool:
    """Whether a graph is being captured, which cannot wait for the host, where `grouped_mm` reads the groups' ends on it.

    It does except for bfloat16 on NVIDIA's Hopper and data-centre Blackwell.
    """
    if not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    major, _ = torch.cuda.get_device_capability(x.device)
    on_device = torch.version.hip is None and major in (9, 10)
    return not (on_device and x.dtype == torch.bfloat16)


def _bags(
    x: torch.Tensor, expert: torch.Tensor, matrices: torch.Tensor
) -> torch.Tensor:
    """x [M, a], expert [M], matrices [E, a, b] → [M, b]: row m times matrix expert[m]; anything for an expert that is not here."""
    many, inputs, _ = matrices.shape
    expert = expert.clamp(max=many - 1)
    row = torch.arange(inputs, device=x.device) + (expert * inputs).unsqueeze(1)
    return F.embedding_bag(
        row, matrices.flatten(0, 1), per_sample_weights=x, mode="sum"
    )


def _groups(
    x: torch.Tensor, expert: torch.Tensor, matrices: torch.Tensor
) -> torch.Tensor:
    """The same, for `expert` in ascending order."""
    every = torch.arange(matrices.shape[0], device=x.device)
    end = torch.searchsorted(expert, every, right=True, out_int32=True)
    return F.grouped_mm(x, matrices, offs=end)
