"""The catalog's cases as matrices of jobs: `python3 cases.py recipes/catalog.json`.

Prints lines for `GITHUB_OUTPUT`: `cpu` and `gpu` are matrices (JSON), each entry with the `runner` and the whole `case`
as it stands in the catalog; `rocm` has one entry a runner with AMD GPUs, with its `runner` and `where`, whose cases run in
the container of .github/rocm; `left_out` names the cases that have no runner. `RUNNERS` in the environment is a JSON object
from a case's `where` to the label of a runner, as in `{"h200": "self-hosted-h200"}`; `cpu` is always GitHub's own.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any


def of_amd(where: str) -> bool:
    """Whether a place is one with AMD GPUs: mi300x, mi350x, …"""
    return where.startswith("mi")


def matrices(
    cases: list[dict[str, Any]], runners: dict[str, str]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[str]]:
    """The entries on CPUs, those on other runners than AMD's, and the ids of the cases without one."""
    cpu, gpu, left_out = [], [], []
    for case in cases:
        if case["where"] == "cpu":
            cpu.append({"runner": "ubuntu-24.04", "case": case})
        elif of_amd(case["where"]) and case["where"] in runners:
            continue
        elif case["where"] in runners:
            gpu.append({"runner": runners[case["where"]], "case": case})
        else:
            left_out.append(case["id"])
    return cpu, gpu, left_out


def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text("utf-8"))["cases"]
    runners = json.loads(os.environ.get("RUNNERS") or "{}")
    cpu, gpu, left_out = matrices(cases, runners)
    print(f"cpu={json.dumps(cpu)}")
    print(f"gpu={json.dumps(gpu)}")
    has_cases = {case["where"] for case in cases}
    rocm = [
        # A runner without cases of its own runs what every GPU can.
        {"runner": label, "where": where if where in has_cases else ""}
        for where, label in runners.items()
        if of_amd(where)
    ]
    print(f"rocm={json.dumps(rocm)}")
    print(f"left_out={' '.join(left_out)}")


if __name__ == "__main__":
    main()
