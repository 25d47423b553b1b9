"""The soak finds wrong answers, and lets only ties pass."""

import pytest

from benchmarks.soak import Known, compared, prompts

KNOWN = Known("…?", "a b c d", [5, 6, 7, 8], [3.0, 0.5, 1e-4, 2.0], "c")


@pytest.mark.parametrize(
    ("found", "length", "fault", "tie"),
    [
        ([5, 6, 7, 8], 4, None, False),
        ([5, 6], 2, None, False),
        ([], 0, None, False),
        ([5, 9, 7, 8], 4, "token 1 is 9, not 6", False),
        ([5, 6, 9, 1], 4, None, True),
        ([5, 6, 7], 4, "3 tokens, not 4", False),
        ([5, 6, 7, 8, 1], 4, "5 tokens, not 4", False),
    ],
)
def test_answers_are_compared_token_by_token(found, length, fault, tie):
    what, tied = compared(found, KNOWN, length)
    assert tied is tie
    assert (what is None) if fault is None else what.endswith(fault)


def test_long_prompts_share_their_beginnings():
    asked = prompts()
    assert len(set(asked)) == len(asked) == 40
    long = [prompt for prompt in asked if len(prompt) > 2000]
    assert len(long) == 16
    assert len({prompt[:1000] for prompt in long}) == 4
