"""Which features ran together: the marks of tests, what became of these tests, and the page made from both.

    @pytest.mark.covers(spec="dspark", layout="ring")    its answers were compared with those of a plain run
    @pytest.mark.refuses(spec="adaptive", graphs="none") it holds the line with which the two are refused

Marks of a test, its parameters, its class and its module add up; the nearest counts. `python -m pytest FILES --record-features`
writes what became of each marked test into tests/feature_runs.json, and `python tests/features.py` prints the page
docs/feature-matrix.md from that. A cell that neither ran nor has a reason in UNTESTED is an error.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations, product
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_name("feature_runs.json")
PASSED, SKIPPED = "passed", "skipped"
OK, REFUSED, NOT_RUN = "ok", "refused", "untested"


@dataclass(frozen=True)
class Axis:
    """One feature.

    Attributes:
        title: in the page.
        values: as in marks → as in the page.
    """

    title: str
    values: dict[str, str]


AXES = {
    "spec": Axis(
        "draft",
        {
            "off": "no draft",
            "dspark": "DSpark",
            "adaptive": "DSpark, adaptive",
            "mtp": "MTP",
        },
    ),
    "caching": Axis(
        "prefix caching", {"on": "prefix caching", "off": "no prefix caching"}
    ),
    "layout": Axis("state", {"paged": "paged", "ring": "ring"}),
    "scheduling": Axis("scheduling", {"async": "async", "sync": "sync"}),
    "graphs": Axis("graphs", {"none": "no graphs", "decode": "decode graphs"}),
    "ranks": Axis(
        "ranks",
        {
            "one": "one rank",
            "TP": "TP 2",
            "TP+EP": "TP 2, EP",
            "DP": "DP 2",
            "DP+EP": "DP 2, EP",
        },
    ),
    "kv": Axis("KV rows", {"float32": "float32", "bfloat16": "bfloat16", "fp8": "fp8"}),
}
Value = tuple[str, str]
VALUES: list[Value] = [
    (axis, value) for axis, known in AXES.items() for value in known.values
]

# Why cells have no test, by one of their values or both; the first that fits.
UNTESTED: list[tuple[dict[str, set[str]], str]] = [
    ({"graphs": {"decode"}, "ranks": {"TP", "TP+EP", "DP", "DP+EP"}}, "needs several GPUs"),
    ({"graphs": {"decode"}}, "needs a GPU"),
    ({"ranks": {"TP+EP"}}, "the experts of tensor-parallel ranks are whole and split without EP too: see TP 2"),
    ({"ranks": {"DP"}, "spec": {"off", "adaptive"}}, "without EP, ranks share nothing but the count of steps: see DP 2, EP"),
    ({"ranks": {"TP", "DP", "DP+EP"}, "kv": {"bfloat16", "fp8"}}, "any rank stores rows alike; of these ranks, another dtype was run"),
    ({"ranks": {"DP+EP"}, "scheduling": {"async"}}, "ranks of an engine without a server meet at every step; of servers, one without EP was run"),
]  # fmt: skip


def check(features: dict[str, Any]) -> None:
    """Raise ValueError for an axis or a value that the matrix does not have."""
    for axis, value in features.items():
        if axis not in AXES or value not in AXES[axis].values:
            raise ValueError(f"{axis}={value!r} is not in tests/features.py")


def covered(item: Any) -> dict[str, str]:
    """The features of a collected test that `covers` some; else none."""
    found: dict[str, str] = {}
    for mark in item.iter_markers("covers"):
        found = mark.kwargs | found
    check(found)
    return found


def refused(item: Any) -> dict[str, str]:
    """What a collected test `refuses`: two features (and `on` which device), or whatever is `asked`."""
    found: dict[str, str] = {}
    for mark in item.iter_markers("refuses"):
        found = mark.kwargs | found
    return found


# ------------------------------------------------------------------------------------------------------------ cells


@dataclass
class Cell:
    """Two features together.

    Attributes:
        pair: the two.
        tests: node ids that passed.
        lines: refusals, by node id.
        reason: why no test ran.
    """

    pair: tuple[Value, Value]
    tests: list[str] = field(default_factory=list)
    lines: dict[str, str] = field(default_factory=dict)
    reason: str = ""

    @property
    def outcome(self) -> str:
        found = [OK] * bool(self.tests) + [REFUSED] * bool(self.lines)
        return ", ".join(found) or NOT_RUN


Runs = dict[str, dict[str, Any]]


def read() -> Runs:
    """What became of marked tests, by node id."""
    return json.loads(RECORD.read_text(encoding="utf-8"))


def write(runs: Runs) -> None:
    """Write them in order of their ids."""
    text = json.dumps(dict(sorted(runs.items())), indent=1, ensure_ascii=False)
    RECORD.write_text(text + "\n", encoding="utf-8")


def merged(before: Runs, new: Runs) -> Runs:
    """`before` with `new`: a test that is skipped here keeps what became of it elsewhere."""
    kept = {
        id: run
        for id, run in new.items()
        if run["outcome"] != SKIPPED or before.get(id, run)["outcome"] == SKIPPED
    }
    return before | kept


def cells(runs: Runs) -> list[Cell]:
    """Every pair of values of two axes, with the tests that ran it.

    Raises:
        ValueError: a pair without a test, a refusal or a reason.
    """
    found = [Cell(pair) for pair in _pairs()]
    by_pair = {cell.pair: cell for cell in found}
    skipped: dict[tuple[Value, Value], str] = {}
    for id, run in runs.items():
        ordered = [v for v in VALUES if run["covers"].get(v[0]) == v[1]]
        for pair in combinations(ordered, 2):
            if run["outcome"] == PASSED:
                by_pair[pair].tests.append(id)
            else:
                skipped.setdefault(pair, f"{run['reason']}: `{id}`")
        both = tuple(v for v in VALUES if run["refuses"].get(v[0]) == v[1])
        if both in by_pair and run["outcome"] == PASSED:
            where = f"on {run['refuses']['on']}: " if "on" in run["refuses"] else ""
            by_pair[both].lines[id] = f"{where}“{run['line']}”"
    for cell in found:
        if cell.outcome == NOT_RUN:
            cell.reason = skipped.get(cell.pair) or _reason(cell.pair)
    return found


def _pairs() -> Iterator[tuple[Value, Value]]:
    for one, other in combinations(AXES, 2):
        for values in product(AXES[one].values, AXES[other].values):
            yield (one, values[0]), (other, values[1])


def _reason(pair: tuple[Value, Value]) -> str:
    features = dict(pair)
    for values, reason in UNTESTED:
        if all(features.get(axis) in among for axis, among in values.items()):
            return reason
    raise ValueError(
        f"{pair} was not run: mark a test that covers it, or say why in tests/features.py"
    )


# ------------------------------------------------------------------------------------------------------------- page


def title(value: Value) -> str:
    axis, name = value
    return AXES[axis].values.get(name, name)


def page(runs: Runs) -> str:
    """The text of docs/feature-matrix.md."""
    all_cells = cells(runs)
    counts = {
        what: sum(what in cell.outcome for cell in all_cells)
        for what in (OK, REFUSED, NOT_RUN)
    }
    where = sorted(
        {
            f"{run['on']}, vLLM {run['vllm']}"
            for run in runs.values()
            if run["outcome"] == PASSED
        }
    )
    return _PAGE.format(
        count=len(all_cells),
        **counts,
        where="; ".join(where),
        matrix=_matrix(all_cells),
        pairs="\n\n".join(_section(axis, all_cells) for axis in list(AXES)[:-1]),
        alone="\n".join(_refused_alone(runs)),
    )


def _matrix(all_cells: list[Cell]) -> str:
    columns = [value for value in VALUES if value[0] != "spec"]
    rows = [value for value in VALUES if value[0] != list(AXES)[-1]]
    by_pair = {cell.pair: cell for cell in all_cells}
    lines = [
        f"| | {' | '.join(map(title, columns))} |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for row in rows:
        found = [by_pair.get((row, column)) for column in columns]
        said = [
            "" if cell is None else "–" if cell.outcome == NOT_RUN else cell.outcome
            for cell in found
        ]
        lines.append(f"| **{title(row)}** | {' | '.join(said)} |")
    return "\n".join(lines)


def _section(axis: str, all_cells: list[Cell]) -> str:
    rows = [
        f"| {title(cell.pair[0])} | {title(cell.pair[1])} | {cell.outcome} | {_why(cell)} |"
        for cell in all_cells
        if cell.pair[0][0] == axis
    ]
    head = f"### {AXES[axis].title.capitalize()}\n\n| feature | with | outcome | shown by |\n|---|---|---|---|\n"
    return head + "\n".join(rows)


def _why(cell: Cell) -> str:
    said = []
    if cell.tests:
        more = f" and {len(cell.tests) - 1} more" if len(cell.tests) > 1 else ""
        said.append(f"`{min(cell.tests, key=lambda id: (len(id), id))}`{more}")
    said += [f"{line} (`{id}`)" for id, line in cell.lines.items()]
    return "; ".join(said) or cell.reason


def _refused_alone(runs: Runs) -> Iterator[str]:
    for id, run in runs.items():
        known = [v for v in VALUES if run["refuses"].get(v[0]) == v[1]]
        if run["refuses"] and len(known) < 2 and run["outcome"] == PASSED:
            yield f"| `{run['refuses']['asked']}` | {run['line']} | `{id}` |"


_PAGE = """\
# Features together

Each cell is a pair of features and what became of the tests that have both:

- **ok**: a test ran with both, and its answers were those of a plain run (one rank, no draft, paged state, rows of the same dtype):
  in float32 log-probabilities within 10⁻³ and the same tokens, through a server the tokens alone, at temperature 1 the same
  distribution;
- **refused**: the start ends with one line, which a test holds; on another device the same pair may be ok;
- **–**: untested; the list below says why.

Of {count} pairs {ok} are ok, {refused} refused and {untested} untested. Outcomes were recorded on: {where}. A test that was
skipped is never ok.

{matrix}

## Every pair

The test that is named is one of those that ran the pair. “DP 2” are data-parallel ranks with all experts each; “EP” shares
the experts between the ranks.

{pairs}

## Refused, whatever else is asked for

| asked | line | held by |
|---|---|---|
{alone}

This page is made from `tests/feature_runs.json`: `python -m pytest FILES --record-features` writes what became of the marked
tests of FILES into it, and `make docs` writes the page.
"""


if __name__ == "__main__":
    print(page(read()), end="")
