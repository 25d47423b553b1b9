"""Allowed tokens, logit bias and minimum length against the interpreted kernel."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.worker.gpu.sample import logit_bias as upstream

from .harness import check
from .recording import record

KERNEL = "vllm.v1.worker.gpu.sample.logit_bias._bias_kernel"
SLOTS, WIDTH = 6, 8


def distinct(vocab, generator):
    """[SLOTS, WIDTH] tokens, no two alike in a row."""
    rows = [torch.randperm(vocab, generator=generator)[:WIDTH] for _ in range(SLOTS)]
    return torch.stack(rows).int()


def apply(logits, mapping, *, restore=False, **changes):
    nothing = torch.zeros(SLOTS).int()
    lists = torch.zeros(SLOTS, WIDTH).int()
    arguments = {
        "pos": torch.full((len(mapping),), 10),
        "num_allowed_token_ids": nothing,
        "allowed_token_ids": lists,
        "num_logit_bias": nothing,
        "logit_bias_token_ids": lists,
        "logit_bias": torch.zeros(SLOTS, WIDTH),
        "min_lens": nothing,
        "num_stop_token_ids": nothing,
        "restore_when_all_masked": nothing,
        "stop_token_ids": lists,
    } | changes
    launches = record(
        lambda: upstream.apply_logit_bias(
            logits, mapping, **arguments, check_all_masked_rows=restore
        ),
        KERNEL,
    )
    return launches[0]


@settings(max_examples=40, deadline=None)
@given(
    vocab=st.sampled_from([8, 100, 8300]),
    seed=st.integers(0, 1000),
    restore=st.booleans(),
)
def test_edits_leave_the_bits_of_the_kernel(vocab, seed, restore):
    generator = torch.Generator().manual_seed(seed)

    def integers(high, *size):
        return torch.randint(high, size, generator=generator).int()

    logits = torch.randn(7, vocab + 3, generator=generator)
    stop = distinct(vocab, generator)
    mapping = integers(SLOTS, 7)
    # Two rows in which a grammar leaves nothing but stop tokens.
    for row in (0, 1):
        left = stop[mapping[row], :3].long()
        kept = logits[row, left].clone()
        logits[row] = -torch.inf
        logits[row, left] = kept
    logits[1, stop[mapping[1], 0].long()] = torch.inf
    launch = apply(
        logits[:, :vocab],
        mapping,
        restore=restore,
        pos=integers(20, 7).long(),
        num_allowed_token_ids=integers(WIDTH + 1, SLOTS) * integers(2, SLOTS),
        allowed_token_ids=distinct(vocab, generator),
        num_logit_bias=integers(WIDTH + 1, SLOTS) * integers(2, SLOTS),
        logit_bias_token_ids=distinct(vocab, generator),
        logit_bias=torch.randn(SLOTS, WIDTH, generator=generator) * 10,
        min_lens=integers(20, SLOTS),
        num_stop_token_ids=integers(WIDTH + 1, SLOTS),
        restore_when_all_masked=integers(2, SLOTS),
        stop_token_ids=stop,
    )
    check(launch)


def edited(logits, **options):
    logits = torch.tensor([logits])
    apply(logits, torch.zeros(1).int(), **options)
    return logits[0].tolist()


def slots(*values):
    """Per-request state whose first request has these values."""
    tensor = torch.zeros(SLOTS, WIDTH, dtype=torch.tensor(values).dtype)
    tensor[0, : len(values)] = torch.tensor(values)
    return tensor if len(values) > 1 else tensor[:, 0].contiguous()


INF = float("inf")


def test_all_but_the_allowed_tokens_are_masked_then_biased():
    after = edited(
        [1.0, 2.0, 3.0, 4.0],
        num_allowed_token_ids=slots(2).int(),
        allowed_token_ids=slots(3, 1).int(),
        num_logit_bias=slots(2).int(),
        logit_bias_token_ids=slots(1, 0).int(),
        logit_bias=slots(0.5, 9.0),
    )
    assert after == [-INF, 2.5, -INF, 4.0]


def stops(min_len):
    return {
        "num_stop_token_ids": slots(2).int(),
        "stop_token_ids": slots(0, 2).int(),
        "min_lens": slots(min_len).int(),
        "restore_when_all_masked": slots(1).int(),
    }


def test_stop_tokens_are_masked_until_the_minimum_length():
    assert edited([1.0, 2.0, 3.0], **stops(12)) == [-INF, 2.0, -INF]
    assert edited([1.0, 2.0, 3.0], **stops(11)) == [1.0, 2.0, 3.0]


def test_stop_tokens_stay_when_a_grammar_leaves_no_other():
    masked = [1.0, -INF, 3.0]
    assert edited(masked, restore=True, **stops(12)) == masked
    assert edited(masked, restore=False, **stops(12)) == [-INF] * 3
