"""Word problems: right, varied, and kept apart."""

import random
import re
from collections import Counter
from fractions import Fraction

import pytest

from training.problems import (
    HELD_OUT_TEMPLATES,
    HELD_OUT_TEXTS,
    problem,
    renumbered,
    template_is_held_out,
    templates,
    text_is_held_out,
)
from training.stories import ENDED, OPENED, begun, without_beginnings

EQUATION = re.compile(r"(\d+) ([+−×÷]) (\d+) = (\d+)")
OPERATIONS = {
    "+": lambda a, b: a + b,
    "−": lambda a, b: a - b,
    "×": lambda a, b: a * b,
    "÷": Fraction,
}
SINGULAR = re.compile(r"\b(0|1) (?!more)[a-z]+s\b")


@pytest.fixture(scope="module")
def drawn():
    rng = random.Random(11)
    return [problem(rng) for _ in range(20_000)]


def test_every_equation_is_right_and_the_last_one_gives_the_value(drawn):
    for made in drawn[:2000]:
        equations = EQUATION.findall(made.answer)
        assert len(equations) == made.steps == made.answer.count("=")
        for left, operation, right, result in equations:
            value = OPERATIONS[operation](int(left), int(right))
            assert value == int(result), made.answer
        assert int(equations[-1][3]) == made.value
        assert made.answer.endswith(f"\n#### {made.value}")


def test_the_numbers_are_those_of_a_grade_school(drawn):
    for made in drawn[:2000]:
        for left, operation, right, result in EQUATION.findall(made.answer):
            a, b, r = int(left), int(right), int(result)
            assert 2 <= r <= 999
            if operation == "×":
                assert a <= 99
                assert b <= 99
                assert min(a, b) <= 10
            if operation == "÷":
                assert b <= 10
                assert r <= 99
        assert not SINGULAR.search(made.question)


def test_all_operations_and_one_to_four_steps_occur(drawn):
    steps = Counter(made.steps for made in drawn)
    operations = Counter(
        op for made in drawn for _, op, _, _ in EQUATION.findall(made.answer)
    )
    assert set(steps) == {1, 2, 3, 4}
    assert set(operations) == set(OPERATIONS)
    assert min(steps.values()) > len(drawn) / 20
    assert min(operations.values()) > len(drawn) / 5


def test_a_question_leaves_no_slot_open_and_has_one_asking_sentence(drawn):
    for made in drawn[:2000]:
        assert not re.search(r"[{}]|  | ,| \.", made.question + made.answer)
        assert made.question.count("?") == 1
        assert made.question.endswith("?")
        assert re.fullmatch(r"(\d|[A-Z]).*", made.question)


def test_a_pronoun_agrees_with_the_person(drawn):
    """Everything that is hers in one story is hers to the end of it."""
    for made in drawn[:2000]:
        words = set(re.findall(r"[a-z]+", f"{made.question} {made.answer}".lower()))
        assert not (words & {"she", "her", "herself"} and words & {"he", "his", "him"})


def test_training_draws_neither_held_out_templates_nor_held_out_texts(drawn):
    for made in drawn:
        assert not template_is_held_out(made.template)
        assert not text_is_held_out(made.question)
        assert made.split == "train"


@pytest.mark.parametrize("split", ["text", "template"])
def test_a_held_out_problem_is_one_that_training_cannot_draw(split):
    rng = random.Random(12)
    for _ in range(50):
        made = problem(rng, split)
        assert made.split == split
        assert template_is_held_out(made.template) == (split == "template")
        if split == "text":
            assert text_is_held_out(made.question)


def test_the_held_out_share_is_the_stated_one(drawn):
    every = list(templates())
    assert len(set(every)) == len(every) > 100_000
    share = sum(map(template_is_held_out, every)) / len(every)
    assert share == pytest.approx(1 / HELD_OUT_TEMPLATES, rel=0.05)
    assert {made.template for made in drawn} <= set(every)
    texts = [f"{i} {made.question}" for i, made in enumerate(drawn)]
    share = sum(map(text_is_held_out, texts)) / len(texts)
    assert share == pytest.approx(1 / HELD_OUT_TEXTS, rel=0.2)


def test_a_question_determines_its_answer_but_for_how_sentences_begin(drawn):
    answers = {}
    for made in drawn:
        bare = without_beginnings(made.answer)
        assert answers.setdefault(made.question, bare) == bare


def test_the_likeliest_beginning_is_drawn_half_of_the_time(drawn):
    first = Counter(made.story.beginnings[0] for made in drawn)
    last = Counter(made.story.beginnings[-1] for made in drawn)
    for counts, ways in ((first, OPENED), (last, ENDED)):
        shares = [counts[way] / len(drawn) for way in ways]
        assert shares == pytest.approx([0.5, 0.3, 0.2], abs=0.02)
        assert counts.total() == len(drawn)


def test_a_beginning_leaves_names_and_numbers_as_they_are():
    assert begun("Then ", "{He} buys {n}.") == "Then {he} buys {n}."
    assert begun("So ", "The {things} bring {eq}.") == "So the {things} bring {eq}."
    assert begun("So ", "{name} has {a}.") == "So {name} has {a}."
    assert begun("First, ", "{n} days are {eq}.") == "First, {n} days are {eq}."
    assert begun("", "{He} buys {n}.") == "{He} buys {n}."


def test_renumbering_changes_the_numbers_and_nothing_else(drawn):
    rng = random.Random(13)
    for made in drawn[:200]:
        other = renumbered(made, rng)
        assert other.question != made.question
        assert other.template == made.template
        assert other.split == "train"
        for text, changed in (
            (made.question, other.question),
            (made.answer, other.answer),
        ):
            assert re.sub(r"\d+", "0", text) == re.sub(r"\d+", "0", changed)


def test_a_seed_gives_the_same_problems_again():
    first, second = random.Random("again"), random.Random("again")
    assert [problem(first) for _ in range(50)] == [problem(second) for _ in range(50)]


def test_an_unknown_split_is_named():
    with pytest.raises(ValueError, match="'valid' is none of train, text, template"):
        problem(random.Random(0), "valid")
