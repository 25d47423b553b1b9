"""`atom-vllm-bridge doctor`: what is installed, what was chosen and why, and what is wrong.

The report must come out where much else is broken, so this package and what it imports need the standard library only.
Whatever has to import torch or vLLM is asked of a process of its own (see cli/probes.py) and may fail there.
"""

import argparse
import json
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from atom_vllm_bridge.cli.doctor import engine, installation
from atom_vllm_bridge.cli.doctor.asking import Answer, ask
from atom_vllm_bridge.cli.doctor.report import Report, text

__all__ = ["Asked", "ask", "examine", "main"]

TIMEOUT = 120  # seconds a probe
SELFTEST_TIMEOUT = 600  # its first run on a machine compiles
UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}


@dataclass(frozen=True)
class Asked:
    """What is examined beside the installation.

    Attributes:
        model: a checkpoint's directory, or the name of one in the hub's cache; None: none.
        memory: bytes of KV cache for which its capacity is told; 0: not told.
        speculative: a JSON object as in vLLM's --speculative-config; "{}": no draft.
        selftest: whether ops are run.
    """

    model: str | None = None
    memory: int = 0
    speculative: str = "{}"
    selftest: bool = False


def examine(
    asked: Asked, environ: Mapping[str, str], timeout: float = TIMEOUT
) -> Report:
    """The whole report.

    Args:
        asked: what beside the installation.
        environ: the environment in which the server would be started.
        timeout: seconds that each probe may take.
    """
    report = Report()
    settings = installation.read_environment(report, environ)
    probed = {
        "platform": [],
        "devices": [],
        "ops": [settings.ops],
        "patches": [",".join(sorted(settings.disabled_patches))],
    }
    if asked.selftest:
        probed["selftest"] = []
    if asked.model is not None:
        probed["checkpoint"] = [asked.model, asked.speculative]
        probed["plan"] = [asked.model, asked.speculative, str(asked.memory)]
    with ThreadPoolExecutor(max_workers=len(probed)) as pool:
        running = {
            name: pool.submit(
                ask,
                name,
                arguments,
                environ,
                SELFTEST_TIMEOUT if name == "selftest" else timeout,
            )
            for name, arguments in probed.items()
        }
        installation.versions(report, settings)
        installation.entry_points(report, environ)
        installation.runner(report, environ)
        answers = {name: future.result() for name, future in running.items()}
    engine.failed_probes(report, answers)
    engine.platform(report, answers["platform"], settings, environ)
    engine.devices(report, answers["devices"])
    installation.variables(report, environ)
    installation.rocm_modules(report)
    report.sections["ops"] = answers["ops"].value
    engine.selftest(report, answers.get("selftest"))
    engine.patches(report, answers["patches"])
    engine.checkpoint(report, answers.get("checkpoint"))
    engine.plan(report, answers.get("checkpoint"), answers.get("plan", Answer()))
    return report


def size(text: str) -> int:
    """Bytes from "16G", "512M" or a number.

    Raises:
        argparse.ArgumentTypeError: something else.
    """
    found = re.fullmatch(r"(\d+)([kmgt]?)(i?b)?", text.strip().lower())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size. Write one, as 16G.")
    return int(found[1]) << UNITS[found[2]]


def json_object(text: str) -> str:
    """`text`, if it is a JSON object.

    Raises:
        argparse.ArgumentTypeError: something else.
    """
    try:
        fine = isinstance(json.loads(text), dict)
    except ValueError:
        fine = False
    if not fine:
        raise argparse.ArgumentTypeError(
            f"""{text!r} is no JSON object. Write one, as '{{"method": "dspark"}}'."""
        )
    return text


def main(arguments: list[str]) -> int:
    """Print the report; 0 if nothing is wrong, else 1."""
    parser = argparse.ArgumentParser(
        prog="atom-vllm-bridge doctor",
        description="Report what is installed, what is chosen and why, and what is wrong. Exit code 1 if anything is.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--selftest", action="store_true", help="run every op against torch's as well"
    )
    parser.add_argument(
        "--model",
        metavar="DIR",
        help="read this checkpoint as well, and plan its caches; also a name that is in the hub's cache",
    )
    parser.add_argument(
        "--memory",
        type=size,
        default=0,
        metavar="SIZE",
        help="of KV cache, as 16G: tell how many requests of the model fit",
    )
    parser.add_argument(
        "--speculative-config",
        type=json_object,
        default="{}",
        metavar="JSON",
        help="plan the model with this draft, as for vllm serve",
    )
    options = parser.parse_args(arguments)
    about_a_model = options.memory or options.speculative_config != "{}"
    if options.model is None and about_a_model:
        parser.error("--memory and --speculative-config are about a --model: name one.")
    asked = Asked(
        options.model, options.memory, options.speculative_config, options.selftest
    )
    report = examine(asked, os.environ)
    if options.json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        print(text(report), end="")
    return 1 if report.faults else 0
