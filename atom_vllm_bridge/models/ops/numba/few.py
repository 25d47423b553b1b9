"""When one thread in one call beats torch, and how that call is compiled."""

from collections.abc import Callable
from typing import Any

import numba
import torch

# numpy has no bfloat16.
BITS = {torch.float32: torch.uint32, torch.bfloat16: torch.uint16}
# Elements of the largest tensor; beyond, torch's threads win.
MOST = 32768


def few(*tensors: torch.Tensor) -> bool:
    """Whether all are small, float32, contiguous, on a CPU, and free of gradients."""
    for t in tensors:
        if t.dtype != torch.float32 or t.numel() > MOST or not t.is_contiguous():
            return False
        if not t.is_cpu or t.requires_grad:
            return False
    return True


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile a function at its first call, outside the GIL; machine code is kept on disk where numba finds a place for it.

    Args:
        options: more of `numba.njit`'s.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            return numba.njit(cache=True, nogil=True, **options)(function)
        except RuntimeError as error:
            # Neither the installation nor the user's cache directory can be written.
            if "no locator available" not in str(error):
                raise
            return numba.njit(nogil=True, **options)(function)

    return decorate
