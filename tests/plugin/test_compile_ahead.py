"""Kernels are compiled by threads before the steps that need them, from a run of those steps that launches none."""

import json
import os
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from vllm.v1.worker.gpu_worker import Worker

from atom_vllm_bridge.workers import gpu

# A driver with a kind of GPU and no GPU: Triton compiles for it, and has nothing to launch on.
STEP = """
    import json, threading, torch, triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class Driver:
        def get_current_target(self): return GPUTarget("hip", "gfx942", 64)
        def get_current_device(self): return 0
        def get_current_stream(self, device): return 0

    driver.set_active(Driver())
    finished, threads, launched = [], set(), []
    knobs.runtime.jit_post_compile_hook = lambda **found: finished.append(found["fn"].name.rpartition(".")[2])
    compile = triton.compiler.compile
    def compiling(*args, **options):
        threads.add(threading.current_thread().name)
        return compile(*args, **options)
    triton.compiler.compile = compiling

    from atom_vllm_bridge.models.ops.triton import rms_norm, swiglu
    from atom_vllm_bridge.workers.compile_ahead import compiling_ahead

    @torch.inference_mode()
    def step(rows):
        x = torch.full((rows, 64), 2.0)
        return rms_norm.rms_norm(swiglu.swiglu(x, 10.0), torch.ones(32), 1e-6)
"""


def python(code: str) -> dict:
    environment = {
        name: value
        for name, value in os.environ.items()
        # What serves a model on a CPU in this process has kernels interpreted.
        if not name.startswith("TRITON")
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(STEP) + textwrap.dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_steps_kernels_are_compiled_by_threads_and_not_launched(tmp_path):
    found = python(f"""
        knobs.cache.dir = {str(tmp_path)!r}
        launch = JITFunction.run
        with compiling_ahead():
            first = step(3)
        ahead = sorted(finished)
        finished.clear()
        # Those of a step of another size are the same ones.
        with compiling_ahead():
            step(5)
        print(json.dumps({{
            "ahead": ahead, "again": finished, "in_main": "MainThread" in threads, "threads": bool(threads),
            "zeros": not first.any(), "restored": JITFunction.run is launch,
        }}))
    """)
    assert found == {
        "ahead": ["_rms_norm", "_swiglu"],
        "again": [],
        "in_main": False,
        "threads": True,
        "zeros": True,
        "restored": True,
    }


def test_a_kernel_that_is_not_the_models_is_launched(tmp_path):
    """As the engine's are, which prepare the steps."""
    (tmp_path / "theirs.py").write_text("""
import triton

@triton.jit
def kernel(x, N):
    return
""")
    found = python(f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        from theirs import kernel
        def run(self, *args, grid, warmup, **options):
            launched.append([self.fn.__name__, warmup, grid])
        JITFunction.run = run
        with compiling_ahead():
            kernel[(7,)](torch.zeros(1), 1)
            step(3)
        print(json.dumps({{"launched": launched}}))
    """)
    assert [found["launched"][i][:2] for i in range(3)] == [
        ["kernel", False],
        ["_swiglu", True],
        ["_rms_norm", True],
    ]


def test_an_error_of_the_compiler_comes_through(tmp_path):
    found = python(f"""
        knobs.cache.dir = {str(tmp_path)!r}
        def failing(*args, **options):
            raise RuntimeError("does not compile")
        triton.compiler.compile = failing
        launch = JITFunction.run
        try:
            with compiling_ahead():
                step(3)
        except RuntimeError as error:
            print(json.dumps({{"error": str(error), "restored": JITFunction.run is launch}}))
    """)
    assert found == {"error": "does not compile", "restored": True}


@pytest.mark.parametrize("eager", [True, False])
def test_a_worker_compiles_ahead_the_steps_that_it_will_capture(monkeypatch, eager):
    """Whole requests of one token and five drafts, none where nothing is captured."""
    seen: list[object] = []

    @contextmanager
    def compiling_ahead():
        seen.append("ahead")
        yield
        seen.append("compiled")

    monkeypatch.setattr(gpu, "compiling_ahead", compiling_ahead)
    monkeypatch.setattr(gpu, "watch", seen.append)
    monkeypatch.setattr(
        Worker, "compile_or_warm_up_model", lambda self: seen.append("captured")
    )
    worker = object.__new__(gpu.AtomGpuWorker)
    worker.model_config = SimpleNamespace(enforce_eager=eager)
    worker.vllm_config = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[1, 6, 8, 12, 64])
    )
    worker.model_runner = SimpleNamespace(
        decode_query_len=6,
        max_num_reqs=4,
        _dummy_run=lambda tokens, uniform_decode: seen.append((tokens, uniform_decode)),
    )
    worker.compile_or_warm_up_model()
    ahead = ["ahead", (6, True), (12, True), "compiled"]
    assert seen == [*([] if eager else ahead), "captured", worker.model_runner]
