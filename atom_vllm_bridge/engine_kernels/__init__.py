"""CPU stand-ins for the Triton kernels of vLLM's Model Runner V2.

One file for each vLLM module whose kernels it replaces, with a table

    OVERRIDES = {"vllm.package.module._some_kernel": some_function}

A stand-in has the kernel's parameters under the kernel's names, in its order, then
``*, grid, **options``: `grid` is the launch grid, a tuple of ints; `options` takes
num_warps and the like. It reads and writes the same tensors in place, with the same
bits as the interpreted kernel. Kernels without one run in Triton's interpreter.

Importing this package loads neither torch nor vLLM.
"""

import importlib
import inspect
import logging
import pkgutil
import warnings
from collections.abc import Callable, Collection
from typing import Any

from atom_vllm_bridge.engine_kernels import fingerprints
from atom_vllm_bridge.patches.registry import (
    ALREADY_UPSTREAM,
    APPLIED,
    TURNED_OFF,
    VARIABLE,
    load,
)

logger = logging.getLogger(__name__)

_registered: set[str] = set()


def overrides() -> dict[str, Callable[..., Any]]:
    """Every stand-in, by the qualified name of the kernel that it replaces.

    Raises:
        ValueError: two files replace the same kernel.
    """
    merged: dict[str, Callable[..., Any]] = {}
    for module in sorted(m.name for m in pkgutil.iter_modules(__path__)):
        table = getattr(
            importlib.import_module(f"{__name__}.{module}"), "OVERRIDES", {}
        )
        twice = merged.keys() & table.keys()
        if twice:
            raise ValueError(
                f"engine kernels: {module} replaces {sorted(twice)}, which another file "
                "replaces too. Keep one."
            )
        merged.update(table)
    return merged


def register(only: Collection[str] | None = None) -> list[str]:
    """Replace the kernels in this process; once for each kernel.

    A kernel that is missing in the installed vLLM, or that is not the one its stand-in
    was written against, is left to the interpreter and named in a warning.

    Args:
        only: qualified names to register; every one if None.

    Returns:
        The names registered by this call.

    Raises:
        RuntimeError: a patch that the stand-ins need was refused, or is turned off.
        KeyError: a name in `only` has no stand-in.
    """
    for patch in ("override-grid", "kernel-scan"):
        state = load().apply(patch, runner="v2", process="worker")
        if state.name not in (APPLIED, ALREADY_UPSTREAM):
            way_out = (
                f"Leave it out of {VARIABLE}."
                if state.name == TURNED_OFF
                else "Install a vLLM that this plugin supports."
            )
            raise RuntimeError(
                f"engine kernels: patch {patch} is {state}; the stand-ins need it. {way_out}"
            )
    if importlib.import_module("vllm.platforms").current_platform.is_cpu():
        # What vLLM's CPU worker imports before anything of the runner: it replaces
        # functions that the runner's modules copy when they are imported.
        importlib.import_module("vllm.v1.worker.cpu.shm")
    table = overrides()
    if only is not None:
        table = {name: table[name] for name in only}
    fitting = {
        name: implementation
        for name, implementation in table.items()
        if name not in _registered and _fits(name, implementation)
    }
    register_kernels = importlib.import_module(
        "vllm.triton_utils.dispatcher"
    ).register_kernels
    with warnings.catch_warnings():
        # It looks at every attribute of every module, deprecated ones too.
        warnings.simplefilter("ignore")
        register_kernels(fitting)
    _registered.update(fitting)
    return list(fitting)


def parameters_of(implementation: Callable[..., Any]) -> tuple[str, ...]:
    """The names that a stand-in shares with its kernel, in order."""
    return tuple(
        parameter.name
        for parameter in inspect.signature(implementation).parameters.values()
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    )


def find_kernel(name: str) -> Any:
    """The object that a qualified kernel name stands for; classes may own kernels.

    Raises:
        ImportError, AttributeError: the installed vLLM has no such kernel.
    """
    module, _, attribute = name.rpartition(".")
    owner_of, _, owner = module.rpartition(".")
    if owner[:1].isupper():
        return getattr(getattr(importlib.import_module(owner_of), owner), attribute)
    return getattr(importlib.import_module(module), attribute)


def _fits(name: str, implementation: Callable[..., Any]) -> bool:
    try:
        kernel = find_kernel(name)
    except (ImportError, AttributeError) as error:
        logger.warning("engine kernels: %s is not in this vLLM: %s", name, error)
        return False
    expected = parameters_of(implementation)
    if tuple(kernel.arg_names) != expected:
        reason = f"it takes {tuple(kernel.arg_names)} where {expected} was expected"
    elif fingerprints.digest(kernel) != fingerprints.KERNELS.get(name):
        reason = "its code is not the one that the stand-in was written against"
    else:
        return True
    logger.warning("engine kernels: %s stays interpreted, and slow: %s.", name, reason)
    return False
