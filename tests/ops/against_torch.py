"""How a provider's op is compared with torch's: on which sizes, and how near."""

import pytest
from interpreted import gpu_only

from atom_vllm_bridge.models.ops.registry import resolve_from


def both(op):
    """Triton's, and torch's."""
    return resolve_from("triton", op), resolve_from("torch", op)


def close(got, want, tolerance):
    """‖got − want‖ ≤ tolerance · ‖want‖, of the whole and of the worst row."""
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    got, want = got.double().flatten(1), want.double().flatten(1)
    assert got.isfinite().all()
    error, size = (got - want).norm(dim=1), want.norm(dim=1)
    assert error.norm() <= tolerance * size.norm()
    assert (error <= 5 * tolerance * size + 1e-9).all()


def sizes(small, large):
    """Odd small sizes for the interpreter and a GPU, real ones for a GPU."""
    return pytest.mark.parametrize(
        "size", [*small, *(pytest.param(s, marks=gpu_only) for s in large)], ids=str
    )
