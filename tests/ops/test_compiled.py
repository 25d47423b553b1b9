"""How ops for a CPU are compiled."""

import subprocess
import sys

import numba
import pytest
from numba.core.caching import CacheImpl

from atom_vllm_bridge.models.ops.numba.few import compiled

# What numba is left with where neither the installation nor a home can be written.
NO_PLACE = """
from numba.core.caching import CacheImpl
CacheImpl._locator_classes = []
import importlib, pkgutil, torch
from atom_vllm_bridge.models.ops import numba as ops
names = [module.name for module in pkgutil.iter_modules(ops.__path__)]
for name in names:
    importlib.import_module(f"{ops.__name__}.{name}")
from atom_vllm_bridge.models.ops.numba.swiglu import swiglu
print(len(names), swiglu(torch.tensor([[1.0, 2.0]]), 10.0).item())
"""


def plus_one(x):
    return x + 1


def test_a_function_is_compiled_where_nothing_can_be_cached(monkeypatch):
    monkeypatch.setattr(CacheImpl, "_locator_classes", [])
    with pytest.raises(RuntimeError, match="no locator available"):
        numba.njit(cache=True)(plus_one)
    function = compiled()(plus_one)
    assert function(2) == 3
    assert function.targetoptions["nogil"]
    assert len(function.signatures) == 1


def test_every_op_does_without_a_cache():
    run = subprocess.run(
        [sys.executable, "-c", NO_PLACE], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    count, value = run.stdout.split()
    assert int(count) >= 10
    assert float(value) == pytest.approx(2 / (1 + 2.718281828**-1), rel=1e-5)


def test_any_other_error_is_not_swallowed(monkeypatch):
    def broken(*args, **options):
        raise RuntimeError("out of order")

    monkeypatch.setattr(numba, "njit", broken)
    with pytest.raises(RuntimeError, match="out of order"):
        compiled()(plus_one)
