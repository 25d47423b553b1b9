"""Replacing kernels survives an object that claims to have a `__dict__`.

`register_kernels` looks through every attribute of every loaded module, and asks
``vars(value).get("kernel")`` of whatever says that it has a ``__dict__``. An object whose
``__getattr__`` answers to every name says so too, and what it returns is no dictionary:
llvmlite's handle of its library is one, so once numba has been imported, no kernel can
be replaced any more. The scan is therefore run as a copy that looks such objects up in a
`vars` of its own; modules, and what other threads see of them, stay as they are.
"""

import builtins
import functools
import sys
from collections.abc import Mapping
from types import FunctionType, ModuleType
from typing import Any

from atom_vllm_bridge.patches.registry import PATCHES, Fingerprint, Patch


def scan_with_tolerant_vars(original: FunctionType) -> FunctionType:
    """The same scan, to which an object whose `__dict__` is no mapping has an empty one."""
    scan = FunctionType(
        original.__code__,
        {**original.__globals__, "vars": _vars},
        original.__name__,
        original.__defaults__,
        original.__closure__,
    )
    functools.update_wrapper(scan, original)
    return scan


def _vars(value: Any) -> Mapping[str, Any]:
    namespace = builtins.vars(value)
    return namespace if isinstance(namespace, Mapping) else {}


def _vllm_scans_safely() -> bool:
    from vllm.triton_utils.dispatcher import _rebind_kernels

    class Everything:
        __slots__ = ()

        def __getattr__(self, name: str) -> object:
            return object()

    probe = ModuleType("atom_vllm_bridge_probe")
    vars(probe)["everything"] = Everything()
    sys.modules[probe.__name__] = probe
    try:
        getattr(_rebind_kernels, "__wrapped__", _rebind_kernels)([])
    except AttributeError:
        return False
    finally:
        del sys.modules[probe.__name__]
    return True


PATCHES.add(
    Patch(
        id="kernel-scan",
        target="vllm.triton_utils.dispatcher:_rebind_kernels",
        runner="v2",
        process="worker",
        why=(
            "Kernels cannot be replaced once numba is imported: the scan of modules "
            "fails on llvmlite's handle of its library."
        ),
        upstream="no issue known",
        without="DeepSeek-V4 does not start on a CPU; elsewhere nothing changes.",
        test="tests/plugin/test_patches.py::TestKernelScan::test_without_it_numba_stops_the_scan",
        remove_when=_vllm_scans_safely,
        expects=Fingerprint(signature="(overrides)", source="68f705141997c1e3"),
        apply=scan_with_tolerant_vars,
        needed_on="cpu",
    )
)
