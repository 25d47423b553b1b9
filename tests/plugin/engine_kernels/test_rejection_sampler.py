"""Moving tokens to and from rows, against the interpreted kernels."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.worker.gpu.spec_decode import rejection_sampler as upstream

from .harness import Launch, check
from .recording import record

MODULE = "vllm.v1.worker.gpu.spec_decode.rejection_sampler"


def flatten(num_drafts, num_sampled):
    steps = max(num_drafts)
    sampled = torch.arange(len(num_drafts) * (steps + 2)).view(-1, steps + 2) + 100
    bounds = torch.tensor([0, *(n + 1 for n in num_drafts)]).cumsum(0).int()
    flat = torch.zeros(int(bounds[-1]), dtype=torch.int64)
    return Launch(
        f"{MODULE}._flatten_sampled_kernel",
        (len(num_drafts),),
        {
            "flat_sampled_ptr": flat,
            "sampled_ptr": sampled[:, : steps + 1],
            "sampled_stride": sampled.stride(0),
            "num_sampled_ptr": torch.tensor(num_sampled).int(),
            "cu_num_logits_ptr": bounds,
        },
    )


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(0, 1000))
def test_flattening_leaves_the_bits_of_the_kernel(num_drafts, seed):
    """A request samples at most one token a row; none in the middle of its prompt."""
    num_sampled = [(seed + 3 * i) % (n + 2) for i, n in enumerate(num_drafts)]
    check(flatten(num_drafts, num_sampled))


def test_each_request_fills_its_first_rows():
    after = check(flatten([2, 0, 1], [2, 1, 0]))["flat_sampled_ptr"]
    assert after.tolist() == [100, 101, 0, 104, 0, 0]


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([1, 30, 1024, 1100]), st.integers(0, 1000))
def test_gathering_leaves_the_bits_of_the_kernel(num_logits, seed):
    generator = torch.Generator().manual_seed(seed)

    def integers(high, *size):
        return torch.randint(high, size, generator=generator)

    launch = record(
        lambda: upstream.gather_draft_sampled(
            integers(1000, 2000).int(),
            integers(60, 2000),
            integers(2000, num_logits),
            integers(9, num_logits).int(),
            integers(4, num_logits).int(),
            integers(40, 9).int(),
        ),
        f"{MODULE}._gather_draft_sampled_kernel",
    )[0]
    check(launch)


def test_draft_slots_of_a_step_that_began_in_the_prompt_are_placeholders():
    draft_sampled, pos = [], []

    def call():
        tokens, positions = upstream.gather_draft_sampled(
            torch.tensor([10, 11, 12, 13, 14]).int(),
            torch.tensor([7, 8, 9, 3, 4]),
            torch.tensor([0, 1, 2, 3, 4]),
            torch.tensor([0, 0, 0, 1, 1]).int(),
            torch.tensor([0, 1, 2, 0, 1]).int(),
            torch.tensor([8, 2]).int(),
        )
        draft_sampled.extend(tokens.tolist())
        pos.extend(positions.tolist())

    record(call, f"{MODULE}._gather_draft_sampled_kernel")
    assert draft_sampled == [10, -1, -1, 13, 14]
    assert pos == [7, 8, 9, 3, 4]
