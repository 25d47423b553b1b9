"""Rows of bfloat16 and of fp8: the text is that of a plain engine with the same rows, whatever else is on (arithmetic in float32).

`test_adaptive_verification.py` has the same for drafts of which a budget is verified.
"""

from dataclasses import asdict, dataclass
from functools import cache

import pytest
from engines import SHALLOW, difference, prompt, running

PROMPTS = [
    prompt(length, seed=length, vocabulary=SHALLOW["vocab_size"])
    for length in (700, 30, 1100, 126)
]
TOKENS = 24
DRAFTS = 3
# What a second run finds. An MTP row also holds the next token, so that vLLM takes one block less.
HITS = {"off": (640, 0, 1024, 0), "dspark": (640, 0, 1024, 0), "mtp": (512, 0, 896, 0)}


@dataclass(frozen=True)
class Case:
    """An engine, in the words of tests/features.py."""

    kv: str
    spec: str
    layout: str
    caching: str
    scheduling: str

    def __str__(self) -> str:
        return "-".join(asdict(self).values())


# Every dtype with every draft, and with each value of the others.
CASES = [
    Case("fp8", "off", "ring", "on", "async"),
    Case("fp8", "dspark", "paged", "on", "sync"),
    Case("fp8", "mtp", "ring", "off", "async"),
    Case("bfloat16", "off", "paged", "on", "sync"),
    Case("bfloat16", "dspark", "ring", "off", "sync"),
    Case("bfloat16", "mtp", "paged", "on", "async"),
]


@pytest.fixture(scope="module")
def plain(agreeing_dspark, agreeing_mtp):
    """The checkpoint of a draft, and what it says from rows of a dtype: paged, without draft and caching."""

    @cache
    def by(kv, draft):
        checkpoint = agreeing_mtp if draft == "mtp" else agreeing_dspark
        with running(
            checkpoint, max_num_seqs=4, enable_prefix_caching=False, kv_cache_dtype=kv
        ) as engine:
            return checkpoint, engine.generate(PROMPTS, max_tokens=TOKENS)

    return by


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            marks=pytest.mark.covers(graphs="none", ranks="one", **asdict(case)),
            id=str(case),
        )
        for case in CASES
    ],
)
def test_the_text_is_that_of_a_plain_engine_with_the_same_rows(case, plain):
    checkpoint, expected = plain(case.kv, case.spec)
    speculative = {"method": case.spec, "num_speculative_tokens": DRAFTS}
    with running(
        checkpoint,
        max_num_seqs=4,
        kv_cache_dtype=case.kv,
        enable_prefix_caching=case.caching == "on",
        async_scheduling=case.scheduling == "async",
        speculative_config=None if case.spec == "off" else speculative,
        additional_config={"atom": {"state_layout": case.layout}},
    ) as engine:
        for hits in ((0,) * 4, HITS[case.spec] if case.caching == "on" else (0,) * 4):
            answers = engine.generate(PROMPTS, max_tokens=TOKENS)
            assert tuple(answer.cached for answer in answers) == hits
            for pair in zip(expected, answers, strict=True):
                difference(*pair)
        drafted = engine.counter("vllm:spec_decode_num_draft_tokens")
        accepted = engine.counter("vllm:spec_decode_num_accepted_tokens")
    assert (0 < accepted < drafted) is (case.spec != "off")
