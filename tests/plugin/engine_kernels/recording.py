"""Turns calls of vLLM's own host functions into launches for the harness.

A kernel of a chain reads what the one before it wrote, and its launch has two dozen
arguments; recording what vLLM launches gives both.
"""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from atom_vllm_bridge.engine_kernels import overrides, parameters_of

from .harness import Launch, run_stand_in


def record(call: Callable[[], Any], *kernels: str) -> list[Launch]:
    """Run `call`, the kernels replaced by their stand-ins.

    Args:
        call: launches kernels.
        kernels: qualified names.

    Returns:
        The launches in order, with copies of their arguments from before each ran.
    """
    launches: list[Launch] = []
    with pytest.MonkeyPatch.context() as patch:
        for kernel in kernels:
            assert kernel in overrides(), f"{kernel} has no stand-in"
            module, _, attribute = kernel.rpartition(".")
            recorder = _Recorder(kernel, launches)
            patch.setattr(importlib.import_module(module), attribute, recorder)
        call()
    return launches


class _Recorder:
    def __init__(self, kernel: str, launches: list[Launch]) -> None:
        self.kernel = kernel
        self.launches = launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            names = parameters_of(overrides()[self.kernel])
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            arguments = {name: given[name] for name in names}
            copies = {
                name: _copy(value) if isinstance(value, torch.Tensor) else value
                for name, value in arguments.items()
            }
            self.launches.append(Launch(self.kernel, grid, copies))
            run_stand_in(self.kernel, grid, arguments)

        return launch


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in the same layout, gaps included."""
    storage = tensor.untyped_storage().clone()
    return torch.empty(0, dtype=tensor.dtype).set_(
        storage, tensor.storage_offset(), tensor.size(), tensor.stride()
    )
