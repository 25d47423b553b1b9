"""Memory that a kernel gets as raw addresses, seen as numpy arrays.

vLLM passes tables of uint64 data pointers where one launch serves several tensors.
Nothing keeps the memory alive here: a view is as good as the address it was made
of, and is only used in the launch that brings the address.
"""

import ctypes
import functools

import numpy as np
from numpy.typing import NDArray


@functools.lru_cache(maxsize=4096)
def int32_at(address: int, rows: int, stride: int) -> NDArray[np.int32]:
    """[rows, stride] int32 at an address, row after row without gaps."""
    buffer = (ctypes.c_int32 * (rows * stride)).from_address(address)
    return np.ctypeslib.as_array(buffer).reshape(rows, stride)
