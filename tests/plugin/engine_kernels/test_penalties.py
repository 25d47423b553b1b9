"""Penalties and their statistics against the interpreted kernels."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.worker.gpu.sample import penalties as upstream

from .harness import check, run_stand_in
from .recording import record

MODULE = "vllm.v1.worker.gpu.sample.penalties"
SLOTS = 5


def apply(vocab, seed, dtype=torch.float32):
    """Launch for a mixed batch: requests with 1 to 4 rows, drafts repeated and absent."""
    generator = torch.Generator().manual_seed(seed)

    def integers(high, *size):
        return torch.randint(high, size, generator=generator)

    num_rows = [1, 4, 2, 1, 3]
    local_pos = torch.cat([torch.arange(n) for n in num_rows]).int()
    mapping = torch.randperm(SLOTS, generator=generator)
    mapping = mapping.repeat_interleave(torch.tensor(num_rows)).int()
    rows = len(mapping)
    logits = torch.randn(rows, vocab + 5, generator=generator).mul(3).to(dtype)
    logits[:, integers(vocab, 2)] = -torch.inf
    logits[:, integers(vocab, 2)] = -0.0
    fed = integers(min(vocab, 3), rows).int()
    fed[integers(rows, 2)] = -1
    choices = torch.tensor([[1.0, 0, 0], [1.3, 0, 0], [0.7, -0.5, 0.2], [1, 0.4, -1.5]])
    penalties = choices[integers(4, SLOTS)]
    counts = integers(4, SLOTS, vocab).sub(2).clamp(min=0).int()
    words = integers(2**32, SLOTS, -(-vocab // 32)).sub(2**31).int()
    launches = record(
        lambda: upstream.apply_penalties(
            logits[:, :vocab],
            mapping,
            fed,
            local_pos,
            *(column.contiguous() for column in penalties.T),
            words,
            counts,
        ),
        f"{MODULE}._penalties_kernel",
    )
    return launches[0]


@settings(max_examples=25, deadline=None)
@given(vocab=st.sampled_from([1, 31, 64, 1000, 8230]), seed=st.integers(0, 1000))
def test_penalties_leave_the_bits_of_the_kernel(vocab, seed):
    check(apply(vocab, seed))


def penalised(
    logits, *, fed, local_pos, counts, repetition=1.0, presence=0.0, prompt=0
):
    """Rows of one request through the stand-in."""
    logits = torch.tensor(logits)
    record(
        lambda: upstream.apply_penalties(
            logits,
            torch.zeros(len(logits)).int(),
            torch.tensor(fed).int(),
            torch.tensor(local_pos).int(),
            torch.tensor([repetition]),
            torch.tensor([0.5]),
            torch.tensor([presence]),
            torch.tensor([[prompt]]).int(),
            torch.tensor([counts]).int(),
        ),
        f"{MODULE}._penalties_kernel",
    )
    return logits


def test_a_row_counts_the_drafts_before_it_and_not_its_own_prediction():
    after = penalised(
        [[1.0, 1.0, 1.0]] * 3, fed=[0, 2, 2], local_pos=[0, 1, 2], counts=[1, 0, 0]
    )
    assert after.tolist() == [[0.5, 1.0, 1.0], [0.5, 1.0, 0.5], [0.5, 1.0, 0.0]]


def test_repetition_divides_positive_logits_and_multiplies_negative_ones():
    after = penalised(
        [[2.0, -2.0, 2.0]],
        fed=[0],
        local_pos=[0],
        counts=[0, 0, 0],
        repetition=2.0,
        prompt=0b011,
    )
    assert after.tolist() == [[1.0, -4.0, 2.0]]


@settings(max_examples=25, deadline=None)
@given(vocab=st.sampled_from([40, 64, 999]), seed=st.integers(0, 1000))
def test_statistics_leave_the_bits_of_the_kernel(vocab, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab, (SLOTS, 2500), generator=generator).int()
    prompt_len = torch.tensor([0, 7, 1024, 1500, 2048]).int()
    prefill_len = torch.tensor([0, 7, 1024, 2300, 2500]).int()
    mapping = torch.randperm(SLOTS, generator=generator)[:4]
    launches = record(
        lambda: upstream.bincount(
            mapping,
            tokens,
            prompt_len,
            prefill_len,
            torch.full((SLOTS, -(-vocab // 32)), -1).int(),
            torch.full((SLOTS, vocab), 3).int(),
            int(prefill_len[mapping].max()),
        ),
        f"{MODULE}._bincount_kernel",
    )
    after = check(launches[0])
    for slot in mapping.tolist():
        output = tokens[slot, prompt_len[slot] : prefill_len[slot]]
        counts = output.bincount(minlength=vocab)
        assert torch.equal(after["output_bin_counts_ptr"][slot], counts.int())


def test_half_precision_logits_are_rounded_to_nearest():
    """As a GPU does; the interpreter truncates bfloat16, so float32 is the oracle."""
    exact = apply(1000, 3)
    rounded = apply(1000, 3, torch.bfloat16)
    rounded.arguments["logits_ptr"].copy_(exact.arguments["logits_ptr"])
    exact.arguments["logits_ptr"].copy_(rounded.arguments["logits_ptr"])
    expected = check(exact)["logits_ptr"].bfloat16()
    run_stand_in(rounded.kernel, rounded.grid, rounded.arguments)
    assert torch.equal(rounded.arguments["logits_ptr"], expected)


@pytest.mark.parametrize("vocab", [32, 1000])
def test_neutral_penalties_touch_nothing(vocab):
    launch = apply(vocab, 1)
    launch.arguments["repetition_penalty_ptr"][:] = 1.0
    launch.arguments["frequency_penalty_ptr"][:] = 0.0
    launch.arguments["presence_penalty_ptr"][:] = 0.0
    before = launch.arguments["logits_ptr"].clone()
    assert torch.equal(check(launch)["logits_ptr"], before)
