"""ops/torch/rope.py in one call."""

import math

import numpy as np
import torch

from atom_vllm_bridge.models.ops.numba.few import compiled, few
from atom_vllm_bridge.models.ops.torch import rope as reference


@compiled()
def turn(x, rotation, sign):
    """Rotate the tails of x [T, H, d] in place by rotation [T, P], its imaginary part times `sign`."""
    tokens, heads, d = x.shape
    pairs = rotation.shape[1]
    first = d - 2 * pairs
    for t in range(tokens):
        for h in range(heads):
            for p in range(pairs):
                cos, sin = rotation[t, p].real, rotation[t, p].imag * sign
                a, b = x[t, h, first + 2 * p], x[t, h, first + 2 * p + 1]
                x[t, h, first + 2 * p] = a * cos - b * sin
                x[t, h, first + 2 * p + 1] = a * sin + b * cos


def rope(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    if not few(x):
        return reference.rope(x, rotation)
    turn(rows(x), rotation.numpy(), np.float32(1))
    return x


def rows(x: torch.Tensor) -> np.ndarray:
    """`x` [T, ..., d] as [T, H, d] over the same memory; T may be 0."""
    return x.numpy().reshape(x.shape[0], math.prod(x.shape[1:-1]), x.shape[-1])
