"""The exponential of compiled loops against the exact one, and at its ends."""

import numba
import numpy as np

from atom_vllm_bridge.models.ops.numba.exponential import exponential


@numba.njit
def every(x):
    out = np.empty_like(x)
    for i in range(x.size):
        out[i] = exponential(x[i])
    return out


def test_it_is_exact_to_two_units_in_the_last_place():
    x = np.linspace(-87.2, 88.2, 200_001, dtype=np.float32)
    want = np.exp(x.astype(np.float64))
    assert np.abs(every(x) / want - 1).max() < 2 * np.finfo(np.float32).eps
    assert every(np.zeros(1, np.float32))[0] == 1


def test_its_ends_are_zero_and_infinite_and_nan_stays():
    x = np.array([-np.inf, -1e30, -88, 89, 1e30, np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(
        every(x), np.array([0, 0, 0, np.inf, np.inf, np.inf, np.nan], np.float32)
    )
