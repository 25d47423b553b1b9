"""Replacing kernels survives an object that claims to have a `__dict__`.

`register_kernels` looks through every attribute of every loaded module, and asks
``vars(value).get("kernel")`` of whatever says that it has a ``__dict__``. An object whose
``__getattr__`` answers to every name says so too, and what it returns is no dictionary:
llvmlite's handle of its library is one, so once numba has been imported, no kernel can
be replaced any more. Such attributes are out of sight during the scan.
"""

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from atom_vllm_bridge.patches.registry import PATCHES, Fingerprint, Patch


def hide_what_has_no_dictionary(
    original: Callable[[Any], None],
) -> Callable[[Any], None]:
    """A scan that does not see attributes whose `__dict__` is not a mapping."""

    @functools.wraps(original)
    def scan(overrides: Any) -> None:
        hidden = [
            (vars(module), name, value)
            for module in list(sys.modules.values())
            if isinstance(module, ModuleType)
            for name, value in list(vars(module).items())
            if _pretends(value)
        ]
        for namespace, name, _ in hidden:
            del namespace[name]
        try:
            original(overrides)
        finally:
            for namespace, name, value in hidden:
                namespace[name] = value

    return scan


def _pretends(value: Any) -> bool:
    """Instances of such a type have no dictionary; one that answers all the same made it up."""
    kind = type(value)
    return (
        kind.__dictoffset__ == 0
        and hasattr(kind, "__getattr__")
        and not isinstance(value, type)
        and hasattr(value, "__dict__")
        and not hasattr(value.__dict__, "get")
    )


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
        remove_when=_vllm_scans_safely,
        expects=Fingerprint(signature="(overrides)", source="68f705141997c1e3"),
        apply=hide_what_has_no_dictionary,
    )
)
