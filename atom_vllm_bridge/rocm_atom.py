"""ROCm/ATOM beside the bridge, known by its entry points: nothing of it is imported to find out.

Its plugin brings a platform and registers model classes of its own, DeepSeek-V4's among them, and vLLM allows one platform
from outside. An unrelated project has the name `atom` on the package index; it has none of these entry points.
"""

from collections.abc import Mapping
from importlib import metadata

GROUP = "vllm.platform_plugins"
OFF = "ATOM_DISABLE_VLLM_PLUGIN"

_MODULES = "atom.plugin."


def brings(value: str) -> bool:
    """Whether an entry point, written "module:function", is ATOM's."""
    return value.startswith(_MODULES)


def platform_plugin(environ: Mapping[str, str]) -> str | None:
    """The name of ATOM's platform plugin, if vLLM loads it in this environment; None if it is absent or turned off."""
    if environ.get(OFF) == "1":
        return None
    chosen = environ["VLLM_PLUGINS"].split(",") if "VLLM_PLUGINS" in environ else None
    for point in metadata.entry_points(group=GROUP):
        if brings(point.value) and (chosen is None or point.name in chosen):
            return point.name
    return None
