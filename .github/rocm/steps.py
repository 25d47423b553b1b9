"""The steps of the suite on AMD GPUs, inside the container of run.sh: `python3 steps.py --out DIR [--where GPU]`.

Every step runs, whatever became of those before. DIR gets their logs, and gfxNNN.json, which names the machine, the versions
and each step's result, for recipes/support. The exit code is 1 if a step failed. `--dry-run` prints the commands.
"""

import argparse
import datetime
import json
import os
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
BRIDGE = "atom-vllm-bridge"
PYTEST = "python3 -m pytest -q -p no:cacheprovider"
CATALOG = f"{BRIDGE} eval --catalog recipes/catalog.json"
SECONDS = 3 * 3600  # a step


class Step(NamedTuple):
    """
    Attributes:
        name: in the result.
        commands: run one after another until one fails; {out} is the folder for what they write.
        environment: beside the container's.
    """

    name: str
    commands: tuple[str, ...]
    environment: dict[str, str]


STEPS = (
    Step("doctor", (f"{BRIDGE} doctor --selftest",), {}),
    Step("ops", (f"{PYTEST} tests/ops",), {}),
    # What is otherwise compared of Triton's; fails where aiter has no op.
    Step("ops of aiter", (f"{PYTEST} tests/ops",), {"OPS_TEST_PROVIDER": "aiter"}),
    Step(
        "end to end",
        (f"{PYTEST} tests/models/test_gpu_model.py tests/plugin/test_gpu.py",),
        {},
    ),
    Step(
        "schoolbook",
        (
            f"{BRIDGE} checkpoint make checkpoints/schoolbook --preset schoolbook --overwrite",
            f"{BRIDGE} checkpoint make checkpoints/schoolbook-mtp --preset schoolbook --draft mtp --overwrite",
            # Written for a CPU, and small enough for any device.
            f"{CATALOG} --where cpu --out {{out}}/schoolbook",
        ),
        {},
    ),
)


def steps(where: str | None) -> tuple[Step, ...]:
    """Those for every GPU, and the catalog's cases for the GPUs `where`."""
    if where is None:
        return STEPS
    cases = f"{CATALOG} --where {where} --out {{out}}/catalog"
    return (*STEPS, Step("catalog", (cases,), {}))


def machine() -> dict[str, Any]:
    """The GPUs and the versions of what runs on them."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    return {
        "arch": properties.gcnArchName.split(":")[0],
        "gpu": properties.name,
        "gpus": torch.cuda.device_count(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": os.environ["COMMIT"],
        "image": os.environ["IMAGE"],
        "versions": {name: _version(name) for name in ("vllm", "torch", "amd-aiter")},
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def run(step: Step, out: Path) -> dict[str, Any]:
    """Run a step; its log is `name`.log, and its last line of text goes into the result."""
    path = out / f"{step.name.replace(' ', '-')}.log"
    code = 0
    with path.open("w", encoding="utf-8") as log:
        for command in step.commands:
            try:
                code = subprocess.run(
                    shlex.split(command.format(out=out)),
                    cwd=ROOT,
                    env=os.environ | step.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    timeout=SECONDS,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                code = 124
                print(f"no end within {SECONDS} seconds", file=log)
            if code:
                break
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "")
    # "12 passed, 3 skipped in 4.5s", without the seconds.
    said = re.sub(r" in [\d.]+s.*$", "", last.strip("= "))
    return {"name": step.name, "passed": code == 0, "said": said}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/rocm"))
    parser.add_argument("--where", help="also the catalog's cases for these GPUs")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(arguments)
    wanted = steps(options.where)
    if options.dry_run:
        for step in wanted:
            variables = [f"{name}={value} " for name, value in step.environment.items()]
            for command in step.commands:
                line = command.format(out=options.out)
                print(f"{step.name}: {''.join(variables)}{line}")
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    result = machine() | {"steps": []}
    for step in wanted:
        print(f"{step.name} …", flush=True)
        result["steps"].append(run(step, options.out))
        print(f"{step.name}: {result['steps'][-1]}", flush=True)
        # After each step, so that what ran stands even if the machine does not.
        path = options.out / f"{result['arch']}.json"
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if owner := os.environ.get("OWNER"):
        # Written by the container's root.
        for path in (options.out, *options.out.rglob("*")):
            os.chown(path, *map(int, owner.split(":")))
    return 0 if all(step["passed"] for step in result["steps"]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
