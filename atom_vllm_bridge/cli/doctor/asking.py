"""Probes, each asked in a process of its own (see cli/probes.py)."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atom_vllm_bridge.cli import probes


@dataclass(frozen=True)
class Answer:
    """What a probe said: a value, or the one line that explains why there is none."""

    value: Any = None
    error: str = ""


def ask(
    probe: str, arguments: list[str], environ: Mapping[str, str], timeout: float
) -> Answer:
    """Run one probe in a process of its own; never raises for what happens there."""
    # -P: a folder named like a package, where doctor is started, is not that package. Ours comes last on the path, so
    # that it is found from a checkout and hides nothing.
    root = str(Path(__file__).resolve().parents[3])
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
