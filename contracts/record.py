"""Answers of a vLLM, kept: one JSON file a release, one line an answer."""

import ast
import json
from pathlib import Path
from typing import Any

from atom_vllm_bridge.patches import registry
from contracts.callers import faults_of_callers
from contracts.sources import Answer, Sources
from contracts.table import PROBED
from contracts.uses import Ask, Unrecorded, faults_of_uses

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(__file__).parent


def our_files() -> dict[str, Path]:
    """Our modules by name."""
    package = ROOT / "atom_vllm_bridge"
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for path in sorted(package.rglob("*.py"))
    }


def faults(ask: Ask) -> list[str]:
    """A line for each thing that our code, its patches and its hooks need of a vLLM and that it does not have."""
    files = our_files()
    found = faults_of_uses(files, ask) + faults_of_callers(files, ask)
    patches = registry.load()
    for patch in patches:
        digest = ask(f"{patch.target}#source")
        if digest != patch.expects.source:
            found.append(
                f"patch {patch.id}: {patch.target} is {digest or 'not there'}, expected {patch.expects.source}."
            )
    for duty in patches.duties():
        if ask(duty.hook) is None:
            found.append(f"duty {duty.id}: vLLM has no {duty.hook}.")
    for places in PROBED:
        answers = [ask(place) for place in places]
        if not any(answers):
            found.append(f"vLLM has none of {', '.join(places)}.")
    return sorted(set(found))


def lost(answers: dict[str, Answer], before: dict[str, Answer]) -> list[str]:
    """What an earlier release had of what is asked for, and this one has not; an override of it would be called by nobody."""
    elsewhere = {place for places in PROBED for place in places}
    return [
        f"{question} is not there any more."
        for question in sorted(answers)
        if answers[question] is None
        and before.get(question) is not None
        and question not in elsewhere
    ]


class Recorder:
    """Asks, and keeps the answers."""

    def __init__(self, ask: Ask) -> None:
        self._ask, self.answers = ask, dict[str, Answer]()

    def __call__(self, question: str) -> Answer:
        self.answers[question] = self._ask(question)
        return self.answers[question]


class Kept:
    """Answers from a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answers: dict[str, Answer] = json.loads(path.read_text())["answers"]

    @property
    def version(self) -> str:
        return self.path.stem.removeprefix("vllm-")

    def __call__(self, question: str) -> Answer:
        """Raises Unrecorded."""
        try:
            return self.answers[question]
        except KeyError:
            raise Unrecorded(question) from None


def kept() -> list[Kept]:
    """Of every release that is kept, in order."""
    return [Kept(path) for path in sorted(FOLDER.glob("vllm-*.json"))]


def version_of(sources: Sources) -> str:
    """The release, without a local part ("+cpu")."""
    tree = sources.tree("vllm._version")
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            names = [ast.unparse(target) for target in node.targets]
            if "__version__" in names or "version" in names:
                return str(node.value.value).partition("+")[0]
    raise ValueError("vllm/_version.py does not say which vLLM this is.")


def as_text(version: str, answers: dict[str, Any]) -> str:
    """The file's content."""
    lines = [
        f"  {json.dumps(question)}: {json.dumps(answers[question])}"
        for question in sorted(answers)
    ]
    body = ",\n".join(lines)
    return f'{{"vllm": "{version}", "answers": {{\n{body}\n}}}}\n'
