"""Compile the model's Triton kernels side by side, before the step that needs them.

A kernel is compiled where it is first launched, and a step launches one after the other: the first steps of a new machine would
take minutes on one core. Inside `compiling_ahead` a step is run for its launches only: each is handed to a pool of
threads to be compiled, and not made. What kernels would have written is zeros, so that whatever reads it finds valid indices.
"""

import contextvars
import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

logger = logging.getLogger("vllm.atom_vllm_bridge")

OPS = "atom_vllm_bridge.models.ops.triton."
_EMPTY = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}


class _Zeros(TorchDispatchMode):
    """New memory is zeros."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.zero_() if func in _EMPTY else out


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """Steps that are run inside launch no kernel of the model's ops; at the end, all that they would have are compiled.

    Kernels that are not the model's, and torch's own operations, run as ever.

    Raises:
        Exception: what Triton raises for a kernel that it cannot compile.
    """
    launch: Callable[..., Any] = JITFunction.run
    threads, start = len(os.sched_getaffinity(0)), time.monotonic()
    compiled: set[int] = set()
    with ThreadPoolExecutor(threads) as pool:
        # Only launches of the model's kernels see the mode: another kernel has to be there when it is launched.
        mode, context = triton.AsyncCompileMode(pool), contextvars.copy_context()

        def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            if not self.module.startswith(OPS):
                return launch(self, *args, grid=grid, warmup=warmup, **kwargs)
            kernel = context.run(launch, self, *args, grid=grid, warmup=True, **kwargs)
            compiled.add(id(kernel))
            return None

        context.run(mode.__enter__)
        JITFunction.run = run
        try:
            with _Zeros():
                yield
        finally:
            JITFunction.run = launch
            context.run(mode.__exit__, None, None, None)
    logger.info(
        "%d kernels for captured steps are ready after %.0f s on %d threads.",
        len(compiled),
        time.monotonic() - start,
        threads,
    )
