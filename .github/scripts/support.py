"""README's support matrix, from recipes/support.json and the results in recipes/support: `python3 support.py README.md`.

Rewrites what stands between the two marks of the document. A row with an architecture takes its state from the result of
that name, which .github/rocm/run.sh writes; without one it is untested on hardware.
"""

import json
import sys
from pathlib import Path
from typing import Any

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
START, END = "<!-- support -->", "<!-- end of support -->"
UNTESTED = "untested on hardware"
ONE_COMMAND = (
    "on simulated GPUs, `tests/plugin/test_rocm.py`; with one, `.github/rocm/run.sh`"
)


def table(rows: list[dict[str, Any]], results: Path) -> str:
    """The matrix in Markdown.

    Args:
        rows: of support.json.
        results: folder of gfxNNN.json.

    Raises:
        ValueError: a result that no row is for, or that is not what run.sh writes.
    """
    found = {path.stem: _read(path) for path in sorted(results.glob("*.json"))}
    if unknown := found.keys() - {row.get("arch") for row in rows}:
        raise ValueError(f"recipes/support.json has no row for {', '.join(unknown)}.")
    lines = ["| devices | state | shown by |", "|---|---|---|"]
    for row in rows:
        arch = row.get("arch")
        if arch is None:
            state, how = row["state"], row["how"]
        elif arch in found:
            state, how = _state(found[arch]), f"`recipes/support/{arch}.json`"
        else:
            state, how = UNTESTED, ONE_COMMAND
        devices = f"{row['devices']} ({arch})" if arch else row["devices"]
        lines.append(f"| {devices} | {state} | {how} |")
    return "\n".join(lines)


def _read(path: Path) -> dict[str, Any]:
    try:
        result = json.loads(path.read_text("utf-8"))
        named = result["arch"], result["gpu"], result["date"], result["commit"]
        steps = [(step["name"], step["passed"]) for step in result["steps"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a result of run.sh: {error!r}.") from None
    if result["arch"] != path.stem or not all(named) or not steps:
        raise ValueError(f"{path} is not a result of run.sh for {path.stem}.")
    return result


def _state(result: dict[str, Any]) -> str:
    failed = [step["name"] for step in result["steps"] if not step["passed"]]
    passed = [step["name"] for step in result["steps"] if step["passed"]]
    said = f"passed: {', '.join(passed)}" if passed else ""
    if failed:
        said = "; ".join(filter(None, (f"failed: {', '.join(failed)}", said)))
    return f"{said} ({result['gpu']}, {result['date']}, commit {result['commit'][:9]})"


def replaced(text: str, matrix: str) -> str:
    """The document with another matrix between its marks."""
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not (start and end):
        raise ValueError(f"the document lacks {START} or {END}.")
    return f"{before}{START}\n{matrix}\n{END}{after}"


def main(document: Path) -> None:
    rows = json.loads((RECIPES / "support.json").read_text("utf-8"))["rows"]
    text = document.read_text("utf-8")
    document.write_text(replaced(text, table(rows, RECIPES / "support")), "utf-8")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except ValueError as error:
        sys.exit(f"support.py: {error}")
