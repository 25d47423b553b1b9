"""How a matrix that has been loaded is kept for the ops that multiply with it."""

import torch


def pack(w: torch.Tensor) -> torch.Tensor | None:
    """Pack a matrix.

    Args:
        w: [..., a, b], input by input.

    Returns:
        Its panels (ops/panels.py), in bfloat16 if that holds every value exactly; or, as here, None: leave it as it is.
    """
    return None
