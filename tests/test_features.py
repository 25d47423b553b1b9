"""The matrix of features: what counts as ok, and that each cell has its test or its reason."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import features
import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
COLLECT = """
import json, sys
import features, pytest
class Marks:
    def pytest_collection_finish(self, session):
        marks = {i.nodeid: {"covers": features.covered(i), "refuses": features.refused(i)} for i in session.items}
        print("MARKS", json.dumps({id: one for id, one in marks.items() if any(one.values())}))
sys.exit(pytest.main([*sys.argv[1:], "--collect-only", "-qq"], plugins=[Marks()]))
"""


def test_the_page_of_features_is_the_generated_one():
    page = (DOCS / "feature-matrix.md").read_text(encoding="utf-8")
    assert page == features.page(features.read())


def test_every_test_of_the_matrix_exists_with_the_features_that_were_recorded():
    """And what is marked was recorded: `python -m pytest FILE --record-features`, then `make docs`."""
    marks = re.compile(r"\bmark\.(covers|refuses)\b")
    files = [
        path
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if marks.search(path.read_text("utf-8"))
    ]
    done = subprocess.run(
        [sys.executable, "-c", COLLECT, *map(str, files)],
        cwd=ROOT,
        # Where `features` lies.
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    (line,) = [one for one in done.stdout.splitlines() if one.startswith("MARKS ")]
    marked = json.loads(line.removeprefix("MARKS "))
    recorded = {
        id: {"covers": run["covers"], "refuses": run["refuses"]}
        for id, run in features.read().items()
    }
    assert recorded == marked


def test_no_cell_is_unexplained_and_none_failed():
    runs = features.read()
    assert {run["outcome"] for run in runs.values()} <= {"passed", "skipped"}
    found = features.cells(runs)
    assert sum(cell.outcome.startswith(features.OK) for cell in found) >= 60
    for cell in found:
        if cell.outcome == features.NOT_RUN:
            assert cell.reason
        for id in cell.tests:
            assert runs[id]["outcome"] == "passed"


def run(outcome=features.PASSED, **covers):
    return {
        "covers": covers,
        "refuses": {},
        "outcome": outcome,
        "reason": "needs a GPU",
        "line": "",
        "on": "CPU",
        "vllm": "0",
    }


def cell_of(runs, one, other):
    (found,) = [cell for cell in features.cells(runs) if cell.pair == (one, other)]
    return found


DRAFT, RING = ("spec", "dspark"), ("layout", "ring")


def test_a_skipped_test_is_not_ok_and_says_why():
    runs = features.read() | {"t": run(spec="dspark", layout="ring")}
    for id in list(runs):
        if runs[id]["covers"].items() >= {DRAFT, RING}:
            runs[id] = runs[id] | {"outcome": features.SKIPPED, "reason": "no time"}
    cell = cell_of(runs, DRAFT, RING)
    assert (cell.outcome, cell.tests) == (features.NOT_RUN, [])
    assert cell.reason.startswith("no time: ")


def test_a_pair_without_test_and_reason_is_an_error():
    runs = {
        id: one
        for id, one in features.read().items()
        if not one["covers"].items() >= {DRAFT, RING}
    }
    with pytest.raises(ValueError, match=r"dspark.*ring.*was not run"):
        features.cells(runs)


def test_a_refusal_is_shown_with_its_line_and_device():
    refuses = {"spec": "dspark", "layout": "ring", "on": "a GPU"}
    runs = features.read() | {"t": run() | {"refuses": refuses, "line": "no rings"}}
    cell = cell_of(runs, DRAFT, RING)
    assert cell.outcome == "ok, refused"
    assert cell.lines == {"t": "on a GPU: “no rings”"}


def test_a_skip_keeps_what_became_of_a_test_elsewhere():
    passed, skipped = run(), run(features.SKIPPED)
    assert features.merged({"t": passed}, {"t": skipped}) == {"t": passed}
    assert features.merged({"t": skipped}, {"t": passed}) == {"t": passed}
    assert features.merged({}, {"t": skipped}) == {"t": skipped}


def test_a_mark_that_the_matrix_does_not_have_is_an_error():
    with pytest.raises(ValueError, match="layout='heap'"):
        features.check({"layout": "heap"})
