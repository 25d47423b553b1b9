"""When one thread in one call beats torch."""

import torch

# Elements of the largest tensor; beyond, torch's threads win.
MOST = 32768


def few(*tensors: torch.Tensor) -> bool:
    """Whether all are small, float32, contiguous, on a CPU, and free of gradients."""
    return all(
        t.dtype == torch.float32
        and t.numel() <= MOST
        and t.is_contiguous()
        and t.device.type == "cpu"
        and not t.requires_grad
        for t in tensors
    )
