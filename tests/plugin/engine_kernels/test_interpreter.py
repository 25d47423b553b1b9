"""Triton's interpreter as a CPU backend, each case in a fresh process."""

import importlib.util

import pytest

from .test_registration import run

KERNEL = """
    import torch, triton
    import triton.language as tl

    @triton.jit
    def kernel(x, out, n, N: tl.constexpr):
        place = tl.arange(0, N)
        first = tl.load(x) > 0
        value = tl.load(x + place, mask=first & (place < n), other=0)
        tl.store(out + place, value.sum() + tl.max(value, 0), mask=first & (place < 2))

    out = torch.zeros(4)
    kernel[(1,)](torch.arange(1.0, 5.0), out, 3, N=4)
    print(out.tolist())
"""


def test_neither_torch_nor_vllm_is_loaded() -> None:
    script = """
        import sys
        import atom_vllm_bridge.engine_kernels
        from atom_vllm_bridge.engine_kernels import interpreter
        print(interpreter.is_installed(), interpreter.install(), interpreter.install())
        print(interpreter.is_installed(), {"torch", "vllm"} & set(sys.modules))
    """
    assert run(script).splitlines() == [
        "False interpreter interpreter",
        "True set()",
    ]


@pytest.mark.parametrize("before", ["import triton", "import vllm"])
def test_kernels_run_whatever_was_imported_before(before: str) -> None:
    """`import vllm` imports Triton, through torch, before it loads plugins."""
    script = f"""
    {before}
    from atom_vllm_bridge.engine_kernels import interpreter
    interpreter.install()
    from vllm.triton_utils import HAS_TRITON
    print(HAS_TRITON)
    {KERNEL}
    """
    assert run(script).splitlines() == ["True", "[9.0, 9.0, 0.0, 0.0]"]


def test_torch_compile_still_compiles_for_the_cpu() -> None:
    script = """
        from atom_vllm_bridge.engine_kernels import interpreter
        interpreter.install()
        import torch

        @torch.compile(dynamic=True)
        def doubled(x):
            return (2 * x).relu().sum()

        print(doubled(torch.ones(3, 4)).item())
        print(len(torch._dynamo.utils.counters["stats"]) > 0)
    """
    assert run(script).splitlines() == ["24.0", "True"]


def test_a_cpu_backend_of_tritons_own_is_left_alone() -> None:
    script = """
        import os
        import triton.backends as b

        class Driver:
            is_active = classmethod(lambda cls: True)

        own = b.Backend(compiler=object, driver=Driver)
        b.backends["cpu"] = own
        from atom_vllm_bridge.engine_kernels import interpreter
        print(interpreter.install(), interpreter.is_installed())
        print(b.backends["cpu"] is own, os.environ.get("TRITON_INTERPRET"))
    """
    assert run(script).splitlines() == ["compiled False", "True None"]


def test_too_late_is_refused() -> None:
    script = """
        import sys, types
        late = types.ModuleType("vllm.triton_utils.importing")
        late.HAS_TRITON = False
        sys.modules[late.__name__] = late
        from atom_vllm_bridge.engine_kernels import interpreter
        try:
            interpreter.install()
        except RuntimeError as error:
            print(error)
    """
    assert "before the plugin was loaded. Import vllm.platforms first" in run(script)


def test_a_missing_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from atom_vllm_bridge.engine_kernels import interpreter

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="Run: pip install triton"):
        interpreter.install()
