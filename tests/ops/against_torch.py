"""How a provider's op is compared with torch's: which provider, on which sizes, and how near."""

import os

import pytest
from interpreted import DEVICE, gpu_only

from atom_vllm_bridge.models.ops.registry import names, providers_of, resolve_from

VARIABLE = "OPS_TEST_PROVIDER"
ASKED = os.environ.get(VARIABLE)


def refuse_a_provider_that_is_not_here():
    """A suite that was asked for a provider must not pass without it."""
    if ASKED and not any(ASKED in providers_of(op, DEVICE) for op in names()):
        raise pytest.UsageError(f"{VARIABLE}={ASKED}, which has no op on {DEVICE} here")


def both(op):
    """The op of the provider that is asked for, Triton's otherwise, and torch's; an op that the provider lacks is skipped by name."""
    if ASKED and ASKED not in providers_of(op, DEVICE):
        pytest.skip(f"{ASKED} has no {op} here")
    return resolve_from(ASKED or "triton", op), resolve_from("torch", op)


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
