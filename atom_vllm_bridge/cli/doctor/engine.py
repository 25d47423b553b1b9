"""What the probes of torch and vLLM found."""

from collections.abc import Mapping

from atom_vllm_bridge import compat, rocm_atom
from atom_vllm_bridge.cli.doctor.asking import Answer
from atom_vllm_bridge.cli.doctor.report import Report
from atom_vllm_bridge.patches import registry
from atom_vllm_bridge.settings import ATOM, MODEL, Settings

SHOWN = 20  # faults of a checkpoint


def failed_probes(report: Report, answers: Mapping[str, Answer]) -> None:
    """One fault an error, however many probes met it; a vLLM or torch that is absent is a fault already."""
    met: dict[str, list[str]] = {}
    for name, answer in answers.items():
        if answer.error:
            met.setdefault(answer.error, []).append(name)
    absent = [n for n in ("vllm", "torch") if report.sections["versions"][n] is None]
    for error, names in met.items():
        if error not in [f"ModuleNotFoundError: No module named '{n}'" for n in absent]:
            report.faults.append(f"Cannot examine {', '.join(names)}: {error}")


def platform(
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
    if settings.model == ATOM and (reason := rocm_atom.absence(environ)):
        report.faults.append(f"model = atom, but {reason}, or unset {MODEL}.")
    if chosen == found["ours"]:
        why = f"vLLM finds {stock}, which the plugin extends"
    elif found["refusal"]:
        why = f"the plugin refused: {found['refusal']}"
    elif settings.disable:
        why = "ATOM_BRIDGE_DISABLE=1"
    elif found["left_to"] and found["enum"] == "ROCM":
        deepseek_v4 = (
            "DeepSeek-V4 too, since model = atom"
            if settings.model == ATOM
            else "keeps DeepSeek-V4"
        )
        why = f"the plugin leaves it to {found['left_to']} of ROCm/ATOM, and {deepseek_v4}"
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


def devices(report: Report, answer: Answer) -> None:
    """The GPUs that torch sees, and whether it was built for them."""
    found = report.sections["devices"] = answer.value
    if found is None:
        return
    if found["built_for"] != "cpu" and not found["devices"]:
        report.notes.append(
            f"torch is built for {found['built_for']}, and sees no GPU here."
        )
    for device in found["devices"]:
        if not runs_on(device["architecture"], found["architectures"]):
            report.faults.append(
                f"{device['name']} is {device['architecture']}, and torch {found['torch']} was built for "
                f"{', '.join(found['architectures'])}. Install a build of torch and vLLM for it."
            )


def runs_on(architecture: str, built: list[str]) -> bool:
    """Whether code for one of `built` runs on `architecture`: the same; of NVIDIA's also a lower one of its generation, or any PTX."""
    if architecture in built:
        return True
    kind, _, number = architecture.partition("_")
    if kind != "sm":
        return False
    for name in built:
        form, _, other = name.partition("_")
        digits = other.rstrip("af")
        # What ends in a letter is for that one generation alone.
        if not digits.isdecimal() or digits != other or int(digits) > int(number):
            continue
        if form == "compute" or digits[:-1] == number[:-1]:
            return True
    return False


def selftest(report: Report, answer: Answer | None) -> None:
    """A row an op; None where it was not asked for, or could not be run."""
    rows = report.sections["selftest"] = answer.value if answer else None
    for row in rows or ():
        if row["state"] in ("wrong", "failed"):
            report.faults.append(
                f"{row['provider']}'s {row['op']} is {row['state']}: {row['reason']}. "
                f"Set ATOM_BRIDGE_OPS={row['op']}=torch."
            )


def patches(report: Report, answer: Answer) -> None:
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


def checkpoint(report: Report, answer: Answer | None) -> None:
    found = answer.value if answer else None
    if found is None:
        report.sections["checkpoint"] = None
        return
    problems = found["problems"]
    report.sections["checkpoint"] = {
        name: value
        for name, value in found.items()
        if name not in ("problems", "outlook")
    }
    report.faults += [f"checkpoint: {problem}" for problem in problems[:SHOWN]]
    if len(problems) > SHOWN:
        report.faults.append(f"checkpoint: {len(problems) - SHOWN} more faults.")


def plan(report: Report, read: Answer | None, planned: Answer) -> None:
    """What config.json says of it; and what vLLM's planner does, where there is one and the checkpoint is sound."""
    checkpoint = read.value if read else None
    if checkpoint is None or checkpoint["outlook"] is None:
        report.sections["plan"] = None
        return
    layouts = report.sections["plan"] = checkpoint["outlook"] | {"layouts": None}
    found = planned.value
    if found is None:
        return
    if found["refusal"]:
        # A faulty checkpoint is refused for what is in the report already.
        if not checkpoint["problems"]:
            report.faults.append(found["refusal"])
        return
    layouts["layouts"] = found["layouts"]
    for architecture, chosen in found["classes"].items():
        if architecture in layouts["classes"]:
            layouts["classes"][architecture] = chosen
