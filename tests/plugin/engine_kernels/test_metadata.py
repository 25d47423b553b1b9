"""The stand-in for vllm.v1.attention.ops.metadata against the interpreted kernel."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from .batches import few_examples
from .harness import Launch, check


def mapping(lengths: list[int], unmapped: int, capacity: int) -> Launch:
    total = sum(lengths)
    loc = torch.tensor([0, *lengths]).cumsum(0).int()
    num_tokens = total + capacity
    return Launch(
        "vllm.v1.attention.ops.metadata._token_request_mapping_kernel",
        ((num_tokens + 255) // 256,),
        {
            "query_start_loc": loc,
            "output": torch.zeros(num_tokens + 3, dtype=torch.int32),
            "num_reqs": len(lengths),
            "num_mapped": max(0, total + unmapped),
            "num_tokens": num_tokens,
            "num_warps": 4,
        },
        outputs=("output",),
    )


@few_examples
@given(
    lengths=st.lists(st.integers(0, 130), min_size=1, max_size=6),
    unmapped=st.integers(-4, 4),
    capacity=st.integers(0, 40),
)
def test_equals_the_interpreted_kernel(
    lengths: list[int], unmapped: int, capacity: int
) -> None:
    check(mapping(lengths, unmapped, capacity))


def test_requests_without_tokens_are_skipped() -> None:
    output = check(mapping([2, 0, 3], unmapped=0, capacity=2))["output"]
    assert output[:7].tolist() == [0, 0, 2, 2, 2, 0, 0]


def test_tokens_past_the_end_belong_to_the_last_request() -> None:
    output = check(mapping([2, 1], unmapped=2, capacity=3))["output"]
    assert output[:6].tolist() == [0, 0, 1, 1, 1, 0]
