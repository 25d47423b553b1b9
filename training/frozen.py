"""Write the held-out files that measurements read: `python -m training.frozen`.

They are kept in the repository, so that a measurement needs no generator and two of them mean
the same; the tests make them again and compare.
"""

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import atom_vllm_bridge
from training.corpus import prompt
from training.problems import Problem, problem, renumbered
from training.prose import beginning, paragraph

TESTS, SHOTS, PROMPTS = 1000, 64, 200
HELD_OUT = ("text", "template")
MEASURE = Path(atom_vllm_bridge.__file__).parent / "measure"

Record = dict[str, str | int]


def frozen_files() -> dict[str, str]:
    """Path below `atom_vllm_bridge/measure` → text, a JSON object a line."""
    tests = list(held_out("test", TESTS, without=set()))
    rng = random.Random("shots")
    shots = [problem(rng) for _ in range(SHOTS)]
    again = [renumbered(made, rng) for made in shots]
    asked = {made.question for made in tests}
    others = held_out("prompts", PROMPTS, without=asked)
    return {
        "tasks/schoolbook_test.jsonl": _lines(map(_record, tests)),
        "tasks/schoolbook_shots.jsonl": _lines(map(_record, shots)),
        "tasks/schoolbook_shots_renumbered.jsonl": _lines(map(_record, again)),
        "prompts/problems.jsonl": _lines(
            {"prompt": prompt(made.question)} for made in others
        ),
        "prompts/prose.jsonl": _lines({"prompt": b} for b in _beginnings(PROMPTS)),
    }


def write(directory: Path = MEASURE) -> None:
    """Write the files below a directory."""
    for name, text in frozen_files().items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text, encoding="utf-8")


def held_out(seed: str, count: int, without: set[str]) -> Iterator[Problem]:
    """Distinct problems, of the two held-out splits by turns."""
    rng, seen = random.Random(seed), set(without)
    for i in range(count):
        made = problem(rng, HELD_OUT[i % 2])
        while made.question in seen:
            made = problem(rng, HELD_OUT[i % 2])
        seen.add(made.question)
        yield made


def _beginnings(count: int) -> Iterator[str]:
    """The first two or three sentences of held-out paragraphs, all distinct."""
    rng, seen = random.Random("beginnings"), set[str]()
    while len(seen) < count:
        text = paragraph(rng, "text")
        if "\n1. " in text:
            continue  # the number of a step would pass for a sentence
        begun = beginning(text, rng.randint(2, 3))
        if begun not in seen:
            seen.add(begun)
            yield begun


def _record(made: Problem) -> Record:
    return {
        "question": made.question,
        "answer": made.answer,
        "split": made.split,
        "steps": made.steps,
    }


def _lines(records: Iterable[Record]) -> str:
    return "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records)


if __name__ == "__main__":
    write()
