"""Cases of accuracy and acceptance with their bars, from a file; `recipes/catalog.json` is the project's."""

import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tabulate import tabulate

from atom_vllm_bridge.measure.accuracy import MOST, Outcome, Task, measure
from atom_vllm_bridge.measure.server import Server, ServerError

SCHEMA = "catalog.schema.json"


class CatalogError(ValueError):
    """A catalog that does not fit its schema, or speaks of a case that is not there."""


@dataclass(frozen=True)
class Case:
    """A model, how it is served, what it is asked, and what it must reach.

    Attributes:
        where: "cpu", or the GPUs that it was written for.
        flags: of `vllm serve`.
        environment: of the server.
        bars: figures by name, see `figures`.
        differs_from: id of the case whose texts must not be this one's.
        status: {"measured": …} or {"not_run": reason}.
    """

    id: str
    model: str
    where: str
    flags: list[str]
    environment: dict[str, str]
    task: Task
    temperature: float
    bars: dict[str, float]
    differs_from: str | None
    status: dict[str, Any]

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> "Case":
        asked = dict(entry["task"])
        temperature = asked.pop("temperature", 0.0)
        bars = dict(entry["thresholds"])
        return cls(
            id=entry["id"],
            model=entry["model"],
            where=entry["where"],
            flags=shlex.split(entry["flags"]),
            environment=entry.get("environment", {}),
            task=Task(**asked),
            temperature=temperature,
            differs_from=bars.pop("differs_from", None),
            bars=bars,
            status=entry["status"],
        )


@dataclass
class Result:
    """What became of a case.

    Attributes:
        rows: figure's name, figure, bar and whether it is reached.
        failure: why there are none.
    """

    case: Case
    outcome: Outcome | None = None
    rows: list[tuple[str, str, str, bool]] = field(default_factory=list)
    failure: str | None = None

    @property
    def passed(self) -> bool:
        return self.failure is None and all(reached for *_, reached in self.rows)


def read(path: Path) -> list[Case]:
    """The cases of a catalog whose schema lies beside it.

    Raises:
        OSError: either cannot be read.
        CatalogError: the file is not JSON or does not fit.
    """
    from jsonschema import Draft202012Validator

    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        schema = json.loads((path.parent / SCHEMA).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise CatalogError(f"{path}: not JSON: {error}.") from None
    for fault in Draft202012Validator(schema).iter_errors(entries):
        raise CatalogError(f"{path}: {fault.json_path}: {fault.message}.")
    cases = [Case.of(entry) for entry in entries["cases"]]
    ids = [case.id for case in cases]
    for case in cases:
        if ids.count(case.id) > 1:
            raise CatalogError(f"{path}: two cases are called {case.id}.")
        if case.differs_from not in (None, *ids):
            raise CatalogError(
                f"{path}: {case.id} is to differ from {case.differs_from}, which is no case."
            )
    return cases


def chosen(cases: Sequence[Case], ids: Sequence[str], where: str) -> list[Case]:
    """The cases of these ids, or else of one place; with those that they are compared with.

    Raises:
        CatalogError: an id is not there.
    """
    known = {case.id: case for case in cases}
    for name in ids:
        if name not in known:
            raise CatalogError(f"no case {name}; there are {', '.join(known)}.")
    wanted = set(ids) or {case.id for case in cases if case.where == where}
    wanted |= {known[i].differs_from or i for i in wanted}
    return [case for case in cases if case.id in wanted]


def figures(outcome: Outcome) -> dict[str, float | None]:
    """What a bar can be set on: strict exact match, tokens a step with the target's own, and the share of draft tokens kept."""
    return {
        "accuracy": outcome.score().value,
        "acceptance_length": outcome.counters.acceptance_length,
        "acceptance_rate": outcome.counters.acceptance_rate,
    }


def judged(case: Case, outcome: Outcome, others: Mapping[str, Outcome]) -> Result:
    """Compare a case's figures with its bars; a figure that is missing does not reach its bar."""
    found = figures(outcome)
    result = Result(case, outcome)
    for name, bar in case.bars.items():
        value = found[name]
        text = "none" if value is None else f"{value:.4f}"
        reached = value is not None and value >= bar
        result.rows.append((name.replace("_", " "), text, f"≥ {bar}", reached))
    if case.differs_from is not None:
        total = len(outcome.answers)
        other = others.get(case.differs_from)
        n = None if other is None else outcome.differing(other)
        result.rows.append(
            (
                f"texts unlike {case.differs_from}'s",
                "none" if n is None else f"{n} of {total}",
                "> half",
                n is not None and n > MOST * total,
            )
        )
    return result


def run(cases: Iterable[Case], out: Path, say: Callable[[str], None]) -> list[Result]:
    """Serve and ask one case after another, each by a server of its own.

    A case whose server fails, or whose task cannot be read, has failed; the others go on. Servers' logs go to `out`.
    """
    results, outcomes = [], {}
    # A case that others are compared with comes first.
    for case in sorted(cases, key=lambda case: case.differs_from is not None):
        say(f"{case.id}: starting")
        try:
            with Server(
                case.model,
                case.flags,
                log=out / f"{case.id}.log",
                environment=case.environment,
            ) as server:
                outcome = measure(server, case.task, case.id, case.temperature)
        # OSError and ValueError: the task's, as questions that cannot be downloaded.
        except (ServerError, OSError, ValueError) as error:
            results.append(Result(case, failure=str(error)))
            say(f"{case.id}: {error}")
            continue
        outcomes[case.id] = outcome
        results.append(judged(case, outcome, outcomes))
    return results


def table(cases: Iterable[Case], results: Iterable[Result]) -> str:
    """One row a figure of each case that ran, and one for each that did not, in Markdown."""
    ran = {result.case.id: result for result in results}
    rows: list[tuple[str, str, str, str, str]] = []
    for case in cases:
        result = ran.get(case.id)
        if result is None:
            why = case.status.get("not_run") or "measured before: see the catalog"
            rows.append((case.id, case.where, "", "", f"not run: {why}"))
        elif result.failure is not None:
            last = (result.failure.splitlines() or ["no reason given"])[-1]
            rows.append((case.id, case.where, "", "", f"FAIL: {last}"))
        else:
            for name, value, bar, reached in result.rows:
                verdict = "pass" if reached else "FAIL"
                rows.append((case.id, case.where, f"{name} {value}", bar, verdict))
    headers = ("case", "where", "figure", "bar", "result")
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)
