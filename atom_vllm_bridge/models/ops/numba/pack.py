"""ops/torch/pack.py: panels for `tile`, of half the bytes where float32 was only widened bfloat16."""

import torch

from atom_vllm_bridge.models.ops import panels


def pack(w: torch.Tensor) -> torch.Tensor | None:
    if w.device.type != "cpu" or w.dtype not in (torch.float32, torch.bfloat16):
        return None
    narrow = w.bfloat16()
    # Compared as numbers: a NaN, which no checkpoint should hold, keeps its matrix wide.
    return panels.cut(narrow if torch.equal(narrow.to(w.dtype), w) else w)
