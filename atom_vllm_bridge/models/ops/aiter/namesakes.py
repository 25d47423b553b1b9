"""Which project an installed module belongs to, found without importing it: two of ROCm's names are taken on the package index.

Standard library only, so that a report can be written where torch is broken.
"""

from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

# Module → a folder that only ROCm's has, and what to install.
NAMESAKES = {"aiter": ("ops", "amd-aiter"), "atom": ("model_ops", "ROCm's ATOM")}


@dataclass(frozen=True)
class Installed:
    """A module that could be imported.

    Attributes:
        place: where it lies.
        real: whether it is ROCm's.
        distribution: name, version and summary of the distribution of the module's name; empty where there is none.
    """

    place: str
    real: bool
    distribution: str


def look(module: str) -> Installed | None:
    """What would be imported as `module`, "aiter" or "atom"; None: nothing."""
    folder, wanted = NAMESAKES[module]
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):  # a broken finder, or a module without a spec
        return None
    if spec is None:
        return None
    places = list(spec.submodule_search_locations or []) or [str(spec.origin)]
    real = any((Path(place) / folder).is_dir() for place in places)
    return Installed(places[0], real, _described(wanted if real else module))


def _described(name: str) -> str:
    try:
        found = metadata.metadata(name).json
    except metadata.PackageNotFoundError:
        return ""
    summary = found.get("summary")
    said = f" (“{summary}”)" if summary and summary != "UNKNOWN" else ""
    return f"{found['name']} {found['version']}{said}"


def refusal() -> str | None:
    """Why AMD's aiter cannot be imported, as far as that is known without trying."""
    found = look("aiter")
    if found is None:
        return "is not installed; pip install amd-aiter"
    if not found.real:
        other = found.distribution or f"the module in {found.place}"
        return f"is not installed: {other} is another project; pip uninstall aiter, pip install amd-aiter"
    return None
