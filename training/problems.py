"""Word problems with worked steps, for training and, apart from it, for testing.

A problem is a template (an opening, events and a question, see `training.stories`), a cast
that fills its words, and numbers. What is held out is decided by digests alone, so that no
seed and no amount of training data can reach it:

- template: one template in 16 is never trained on.
- text: of the other templates, one question in 64 is never trained on.
"""

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from training.stories import (
    ENDED,
    GOES_ON,
    MANNERS,
    MONEY,
    OPENED,
    THINGS,
    TOUR,
    Family,
    Form,
    begun,
)
from training.stories_more import BAKING, CROWD, GARDEN, PRACTICE, READING

FAMILIES = (THINGS, MONEY, TOUR, PRACTICE, BAKING, READING, CROWD, GARDEN)
SPLITS = ("train", "text", "template")
HELD_OUT_TEMPLATES, HELD_OUT_TEXTS = 16, 64
STEPS = (1, 2, 2, 3, 3, 4)
"""Drawn from, so two and three steps are twice as frequent as one and four."""

LARGEST = 999
ATTEMPTS = 20


@dataclass(frozen=True, slots=True)
class Story:
    """What stays when the numbers change.

    Attributes:
        beginnings: of the answer's sentences, one a form.
    """

    family: Family
    forms: tuple[Form, ...]
    cast: dict[str, str]
    beginnings: tuple[str, ...] = ()

    @property
    def template(self) -> str:
        """The whole question with its slots open."""
        sentences = " ".join(form.asks for form in self.forms)
        return f"{self.family.name}: {sentences}"


@dataclass(frozen=True, slots=True)
class Problem:
    """A question and its worked answer, which ends in a line `#### value`."""

    question: str
    answer: str
    value: int
    steps: int
    template: str
    story: Story = field(repr=False, compare=False)

    @property
    def split(self) -> str:
        if template_is_held_out(self.template):
            return "template"
        return "text" if text_is_held_out(self.question) else "train"


def template_is_held_out(template: str) -> bool:
    return _remainder(template, HELD_OUT_TEMPLATES) == 0


def text_is_held_out(text: str) -> bool:
    """True for a question (of a template that is trained on) or a paragraph of prose."""
    return _remainder(text, HELD_OUT_TEXTS) == 0


def _remainder(text: str, modulus: int) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest(), "big") % modulus


def problem(rng: random.Random, split: str = "train") -> Problem:
    """Draw a problem of a split: "train", "text" or "template".

    Raises:
        ValueError: a split that is none of them.
    """
    if split not in SPLITS:
        raise ValueError(f"split = {split!r} is none of {', '.join(SPLITS)}")
    wants_template = split == "template"
    while True:
        story = _story(rng)
        template = story.template
        if template_is_held_out(template) != wants_template:
            continue
        made = _numbered(story, template, rng)
        if made is None:
            continue
        if wants_template or text_is_held_out(made.question) == (split == "text"):
            return made


def renumbered(original: Problem, rng: random.Random) -> Problem:
    """The same story with another question's numbers, on the same side of the split."""
    while True:
        made = _numbered(original.story, original.template, rng)
        if (
            made is not None
            and made.question != original.question
            and made.split == original.split
        ):
            return made


def templates() -> Iterator[str]:
    """Every template, held out or not; there are hundreds of thousands."""
    for family in FAMILIES:
        for opening in family.openings:
            for question in family.questions:
                for steps in sorted(set(STEPS)):
                    rest = steps - opening.steps - question.steps
                    for events in _event_sequences(family.events, rest):
                        yield Story(family, (opening, *events, question), {}).template


def _event_sequences(
    events: tuple[Form, ...], steps: int
) -> Iterator[tuple[Form, ...]]:
    if steps == 0:
        yield ()
    for i, event in enumerate(events):
        if event.steps <= steps:
            others = events[:i] + events[i + 1 :]
            for rest in _event_sequences(others, steps - event.steps):
                yield (event, *rest)


def _story(rng: random.Random) -> Story:
    family = rng.choice(FAMILIES)
    while True:
        steps = rng.choice(STEPS)
        opening = rng.choice(family.openings)
        question = rng.choice(family.questions)
        rest = steps - opening.steps - question.steps
        if rest >= 0:
            break
    forms = [opening]
    while rest:
        event = rng.choice(family.events)
        if event.steps <= rest and event not in forms:
            forms.append(event)
            rest -= event.steps
    forms.append(question)
    while True:
        cast: dict[str, str] = {}
        for role in family.roles:
            cast.update(rng.choice(role))
        if cast.get("friend") != cast.get("name", ""):
            return Story(family, tuple(forms), cast, _beginnings(len(forms), rng))


def _beginnings(count: int, rng: random.Random) -> tuple[str, ...]:
    ways = [OPENED, *[GOES_ON] * (count - 2), ENDED]
    return tuple(rng.choices(way, MANNERS)[0] for way in ways)


def _numbered(story: Story, template: str, rng: random.Random) -> Problem | None:
    """None where these forms cannot be given numbers in a few attempts."""
    for _ in range(ATTEMPTS):
        slots: dict[str, str | int] = dict(story.cast)
        asked, told = [], []
        value, steps = rng.randint(*story.forms[0].a), 0
        for form, beginning in zip(story.forms, story.beginnings, strict=True):
            slots["a"] = value
            if form.op:
                operand = _operand(form, value, rng)
                if operand is None:
                    break
                value = _apply(form.op, value, *operand, slots)
                if not 2 <= value <= LARGEST:
                    break
                steps += form.steps
            asked.append(form.asks.format_map(slots))
            told.append(begun(beginning, form.tells).format_map(slots))
        else:
            answer = " ".join(told)
            return Problem(
                " ".join(asked),
                f"{answer}\n#### {value}",
                value,
                steps,
                template,
                story,
            )
    return None


def _operand(form: Form, a: int, rng: random.Random) -> tuple[int, int] | None:
    """What the form brings (n, m), or None where nothing fits the number before it."""
    low, high = form.n
    op = form.op
    if op == "+":
        return rng.randint(low or 3, high or 60), 0
    if op == "to":
        return a + rng.randint(low or 3, high or 60), 0
    if op == "−":
        high = min(high or 60, a - 2)
        return (rng.randint(2, high), 0) if high >= 2 else None
    if op == "×":
        # One factor has two digits at most, the other one digit, or is 10.
        low, high = low or 2, high or 10
        if a > 99 or (a > 10 and low > 10):
            return None
        return rng.randint(low, min(high, 10) if a > 10 else high), 0
    if op == "÷":
        fits = range(low or 2, (high or 10) + 1)
        divisors = [n for n in fits if a % n == 0 and 2 <= a // n <= 99]
        return (rng.choice(divisors), 0) if divisors else None
    n, high = rng.randint(2, 6), 12
    if op == "×−":
        high = min(high, (a - 2) // n)
    return (n, rng.randint(2, high)) if high >= 2 else None


def _apply(op: str, a: int, n: int, m: int, slots: dict[str, str | int]) -> int:
    """The number after the form; fills `n`, `m`, `eq1` and `eq`."""
    slots["n"] = n
    if op in ("×+", "×−"):
        slots["m"] = m
        slots["eq1"] = f"{n} × {m} = {n * m}"
        op, n = op[1], n * m
    if op == "+":
        r = a + n
    elif op == "−":
        r = a - n
    elif op == "×":
        r = a * n
    elif op == "÷":
        r = a // n
    else:
        a, n, op, r = n, a, "−", n - a
    slots["eq"] = f"{a} {op} {n} = {r}"
    return r
