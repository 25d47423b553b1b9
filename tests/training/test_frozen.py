"""The held-out files of the repository: made again, and apart from what is trained on."""

import json
import random

import pytest

from training.frozen import MEASURE, frozen_files
from training.problems import problem, text_is_held_out
from training.prose import beginning, paragraph


@pytest.fixture(scope="module")
def files():
    return frozen_files()


def records(files, name):
    return [json.loads(line) for line in files[name].splitlines()]


def test_the_files_are_made_again_byte_for_byte(files):
    for name, text in files.items():
        same = (MEASURE / name).read_bytes() == text.encode()
        assert (
            same
        ), f"{name} is not what the generator makes: python -m training.frozen"


def test_nothing_held_out_occurs_in_training(files):
    tests = records(files, "tasks/schoolbook_test.jsonl")
    asked = {record["question"] for record in tests}
    prompts = {
        record["prompt"].removeprefix("Question: ").removesuffix("\nAnswer:")
        for record in records(files, "prompts/problems.jsonl")
    }
    assert len(asked) == 1000
    assert len(prompts) == 200
    assert not asked & prompts
    rng = random.Random(41)
    trained = {problem(rng).question for _ in range(20_000)}
    assert not trained & (asked | prompts)


def test_both_ways_of_holding_out_are_tested_alike(files):
    tests = records(files, "tasks/schoolbook_test.jsonl")
    assert [record["split"] for record in tests] == ["text", "template"] * 500
    for record in tests[::2]:
        assert text_is_held_out(record["question"])
    assert {record["steps"] for record in tests} == {1, 2, 3, 4}


def test_shots_are_training_problems_and_so_are_the_renumbered(files):
    shots = records(files, "tasks/schoolbook_shots.jsonl")
    again = records(files, "tasks/schoolbook_shots_renumbered.jsonl")
    assert len(shots) == len(again) == 64
    assert {record["split"] for record in shots + again} == {"train"}
    for one, other in zip(shots, again, strict=True):
        assert one["question"] != other["question"]
        assert one["steps"] == other["steps"]


def test_prose_prompts_end_with_a_sentence_and_no_training_text_begins_so(files):
    beginnings = [record["prompt"] for record in records(files, "prompts/prose.jsonl")]
    assert len(set(beginnings)) == 200
    assert all(b.rstrip('"')[-1] in ".!?" for b in beginnings)
    rng = random.Random(42)
    trained = [paragraph(rng) for _ in range(3000)]
    assert not [b for b in beginnings if any(t.startswith(b) for t in trained)]
    assert all(text_is_held_out(beginning(b + " ", 2)) for b in beginnings)
