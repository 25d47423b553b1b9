"""Logits of any float type, computed on in float32 by numpy."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

Float32 = NDArray[np.float32]

# Elements that one pass of numpy calls works on: its temporaries (64 KiB each in
# float32) stay in a core's second-level cache, and a call's overhead is small
# beside the work.
PASS_ELEMENTS = 16384


def widened(tensor: torch.Tensor) -> Float32:
    """The values in float32: a view of a float32 tensor, else an exact copy."""
    return tensor.float().numpy()


def gathered(
    tensor: torch.Tensor, *index: NDArray[np.integer], width: int | None = None
) -> Float32:
    """Elements tensor[index], or the first `width` of each row, copied to float32.

    Args:
        tensor: any float type; one more dimension than `index` if `width` is given.
        index: arrays of one shape [n], one for each leading dimension.

    Returns:
        [n], or [n, width].
    """
    columns = () if width is None else (slice(width),)
    if tensor.dtype == torch.float32:
        return tensor.numpy()[(*index, *columns)]
    rows = (torch.from_numpy(i.astype(np.int64, copy=False)) for i in index)
    return tensor[(*rows, *columns)].float().numpy()


@contextmanager
def edited(logits: torch.Tensor) -> Iterator[Float32]:
    """The values in float32, to be changed in place.

    A float32 tensor is changed directly; another type is rounded to nearest at the
    end, as a GPU does (Triton's interpreter truncates bfloat16).
    """
    if logits.dtype == torch.float32:
        yield logits.numpy()
        return
    values = logits.float()
    yield values.numpy()
    logits.copy_(values)


def row_groups(rows: NDArray[np.intp], width: int) -> Iterator[NDArray[np.intp]]:
    """Cut row numbers into groups of about PASS_ELEMENTS elements, one row or more."""
    size = max(1, PASS_ELEMENTS // max(1, width))
    for start in range(0, len(rows), size):
        yield rows[start : start + size]
