"""e to the power of x in plain arithmetic: unlike a call into the C library, loops that use it become vector code."""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

# Beyond, the result is no ordinary float32.
_LEAST, _MOST = np.float32(-87.3), np.float32(88.3)
_LOG2_E = np.float32(1.44269504)
# ln 2 in two parts, of which a small multiple of the first is exact.
_LN_2, _LN_2_REST = np.float32(0.693359375), np.float32(-2.12194440e-4)
# Of (eʳ − 1 − r) / r² for |r| ≤ ln 2 / 2, from the highest power down (Cephes, expf).
_C5, _C4, _C3, _C2, _C1, _C0 = (
    np.float32(c)
    for c in (
        1.9875691500e-4,
        1.3981999507e-3,
        8.3334519073e-3,
        4.1665795894e-2,
        1.6666665459e-1,
        5.0000001201e-1,
    )
)


@intrinsic
def _power_of_two(typing: Any, n: Any) -> Any:
    """2ⁿ, −126 ≤ n ≤ 127, from its bits."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        kind = ir.IntType(32)
        return b.bitcast(b.shl(b.add(args[0], kind(127)), kind(23)), ir.FloatType())

    return types.float32(types.int32), generate


@numba.njit(fastmath={"contract"})
def exponential(x):
    """Of a float32, to 2 units in the last place; 0 below −87.3, infinite above 88.3, NaN of NaN."""
    within = min(max(x, _LEAST), _MOST)
    n = np.floor(within * _LOG2_E + np.float32(0.5))
    r = within - n * _LN_2 - n * _LN_2_REST
    p = ((((_C5 * r + _C4) * r + _C3) * r + _C2) * r + _C1) * r + _C0
    y = (p * r * r + r + np.float32(1)) * _power_of_two(np.int32(n))
    y = np.float32(0) if x < _LEAST else y
    y = np.float32(np.inf) if x > _MOST else y
    return y if x == x else x
