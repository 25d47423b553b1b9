"""When one thread in one call beats torch, and how that call is compiled."""

from collections.abc import Callable
from typing import Any

import numba
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


def trained(*weights: torch.Tensor | None) -> bool:
    """Whether any needs a gradient, which compiled code cannot give."""
    return any(weight is not None and weight.requires_grad for weight in weights)


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
