"""The stand-in for vllm.v1.worker.gpu.structured_outputs against the kernel."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from .batches import few_examples
from .harness import Launch, check

STRIDE = 4  # positions of one request


def masked(
    logits_of: list[int],
    masks: list[tuple[int, int]],
    vocabulary: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Launch:
    generator = torch.Generator().manual_seed(seed)
    words = -(-vocabulary // 32)
    logits = torch.randn(sum(logits_of) + 1, vocabulary + 3, generator=generator)
    bitmask = torch.randint(
        -(2**31), 2**31, (len(masks), words), generator=generator, dtype=torch.int32
    )
    bitmask[1::3] = -1  # everything allowed
    bitmask[2::3] = 0  # nothing
    block = 64
    return Launch(
        "vllm.v1.worker.gpu.structured_outputs._apply_grammar_bitmask_kernel",
        (len(masks), -(-vocabulary // block)),
        {
            "logits_ptr": logits.to(dtype),
            "logits_stride": logits.stride(0),
            "logits_indices_ptr": torch.tensor(
                [r * STRIDE + p for r, p in masks], dtype=torch.int32
            ),
            "cu_num_logits_ptr": torch.tensor([0, *logits_of]).cumsum(0).int(),
            "bitmask_ptr": bitmask,
            "bitmask_stride": bitmask.stride(0),
            "vocab_size": vocabulary,
            "MASK_STRIDE": STRIDE,
            "BLOCK_SIZE": block,
        },
    )


@pytest.mark.parametrize("vocabulary", [64, 97, 130, 31])
@few_examples
@given(
    logits_of=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    data=st.data(),
    seed=st.integers(0, 99),
)
def test_equals_the_interpreted_kernel(
    vocabulary: int, logits_of: list[int], data: st.DataObject, seed: int
) -> None:
    every = [(r, p) for r in range(len(logits_of)) for p in range(STRIDE)]
    masks = data.draw(st.lists(st.sampled_from(every), unique=True, max_size=4))
    check(masked(logits_of, masks, vocabulary, seed=seed))


def test_a_position_past_the_requests_logits_is_dropped() -> None:
    launch = masked([1, 1], [(0, 2)], 64)
    after = check(launch)["logits_ptr"]
    assert torch.equal(after, launch.arguments["logits_ptr"])


def test_a_clear_bit_forbids() -> None:
    launch = masked([2], [(0, 1)], 64)
    launch.arguments["bitmask_ptr"][0] = torch.tensor([0b101, -1])
    after = check(launch)["logits_ptr"]
    forbidden = after[1].isneginf().nonzero().flatten().tolist()
    assert forbidden == [1, *range(3, 32)]
    assert not after[0].isinf().any()


def test_bfloat16_logits_are_masked_alike() -> None:
    check(masked([2, 1], [(0, 0), (1, 0)], 97, torch.bfloat16))
