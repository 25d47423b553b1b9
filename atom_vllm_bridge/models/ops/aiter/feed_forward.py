"""ops/torch/feed_forward.py by aiter's products and its gate."""

import torch

from atom_vllm_bridge.models.ops.aiter.entries import Needs
from atom_vllm_bridge.models.ops.aiter.linear import BLOCKSCALE, ROUNDS, linear
from atom_vllm_bridge.models.ops.aiter.swiglu import CLAMP_ACT_MUL, swiglu
from atom_vllm_bridge.models.quantization.kept import Kept

NEEDS = Needs((BLOCKSCALE, CLAMP_ACT_MUL), rounds=ROUNDS)


def feed_forward(
    x: torch.Tensor, w13: torch.Tensor | Kept, w2: torch.Tensor | Kept, limit: float
) -> torch.Tensor:
    hidden = linear(x, w13)[:, : 2 * w2.shape[-2]]
    return linear(swiglu(hidden, limit), w2)[:, : x.shape[1]]
