"""ROCm/ATOM beside the bridge, known by its entry points: nothing of it is imported to find out.

Its plugin brings a platform and registers model classes of its own, DeepSeek-V4's among them, and vLLM allows one platform
from outside. An unrelated project has the name `atom` on the package index; it has none of these entry points.
"""

from collections.abc import Mapping
from importlib import metadata

from atom_vllm_bridge.settings import ATOM, Settings

GROUP = "vllm.platform_plugins"
OFF = "ATOM_DISABLE_VLLM_PLUGIN"

_MODULES = "atom.plugin."


def brings(value: str) -> bool:
    """Whether an entry point or a model class, written "module:name", is ATOM's."""
    return value.startswith(_MODULES)


def platform_plugin(environ: Mapping[str, str]) -> str | None:
    """The name of ATOM's platform plugin, if vLLM loads it in this environment; None if it is absent or turned off."""
    return None if absence(environ) else _installed()


def absence(environ: Mapping[str, str]) -> str | None:
    """Why vLLM does not load ATOM's platform plugin in this environment, and the way out; None if it does."""
    name = _installed()
    if name is None:
        return (
            "ROCm/ATOM is not installed. Run `pip install .` in a clone of github.com/ROCm/ATOM (the atom of the package index is "
            "another project)"
        )
    if environ.get(OFF) == "1":
        return f"{OFF}=1 turns ROCm/ATOM's plugin off. Unset it"
    if "VLLM_PLUGINS" in environ and name not in environ["VLLM_PLUGINS"].split(","):
        return f"VLLM_PLUGINS leaves ROCm/ATOM's plugin out. Add {name}"
    return None


def serves_deepseek_v4(environ: Mapping[str, str]) -> bool:
    """Whether DeepSeek-V4 is left to ATOM's model in this process: it is chosen, and ATOM's plugin is loaded."""
    return (
        Settings.read(None, environ).model == ATOM
        and platform_plugin(environ) is not None
    )


def _installed() -> str | None:
    for point in metadata.entry_points(group=GROUP):
        if brings(point.value):
            return point.name
    return None
