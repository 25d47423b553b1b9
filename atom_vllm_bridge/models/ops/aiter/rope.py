"""ops/torch/rope.py by aiter's rope_rotate_activation, as the indexer's queries are rotated.

Older versions multiply by a Hadamard matrix after that, always; the keys in this project's cache are not, so they are refused.
"""

import torch

from atom_vllm_bridge.models.ops import registry
from atom_vllm_bridge.models.ops.aiter.entries import Entry, Needs
from atom_vllm_bridge.models.ops.aiter.tables import tables
from atom_vllm_bridge.models.ops.gradients import trained

ROTATE = Entry(
    places=("aiter.ops.quant:rope_rotate_activation",),
    takes=("out", "input", "cos", "sin", "positions", "rope_dim"),
    one_of={"do_rotate_act": False},
)
NEEDS = Needs((ROTATE,), rounds="rounds rows and angles to bfloat16")
DIM = 128


def rope(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """By Triton where rows are not the indexer's, [T, H, 128]."""
    if x.dim() != 3 or x.shape[-1] != DIM or trained(x):
        return registry.resolve_from("triton", "rope")(x, rotation)
    rows = x.to(torch.bfloat16).contiguous()
    out = torch.empty_like(rows)
    ROTATE(out=out, input=rows, rope_dim=2 * rotation.shape[-1], **tables(rotation))
    return x.copy_(out)
