"""Stand-ins for vllm.v1.worker.gpu.sample.logprob against the interpreted kernels.

In float32: the interpreter compares bfloat16 as bit patterns.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from .batches import few_examples, tokens
from .harness import Launch, check, run_stand_in

MODULE = "vllm.v1.worker.gpu.sample.logprob"


def some_logits(rows: int, vocabulary: int, seed: int, gap: int = 0) -> torch.Tensor:
    """[rows, vocabulary], a few of them −∞ or equal."""
    generator = torch.Generator().manual_seed(seed)
    logits = 9 * torch.randn(rows, vocabulary + gap, generator=generator)
    logits[:, ::7] = logits[:, ::7].round()
    logits[:, 3::11] = -torch.inf
    return logits[:, :vocabulary]


def log_softmax(logits: torch.Tensor, topk: int, block: int = 64) -> Launch:
    rows, vocabulary = logits.shape
    ids = tokens(rows, topk, dtype=torch.int64) % vocabulary
    return Launch(
        f"{MODULE}._topk_log_softmax_kernel",
        (rows,),
        {
            "output_ptr": torch.zeros(rows, topk),
            "logits_ptr": logits,
            "logits_stride": logits.stride(0),
            "topk_ids_ptr": ids,
            "topk_ids_stride": ids.stride(0),
            "topk": topk,
            "vocab_size": vocabulary,
            "BLOCK_SIZE": block,
            "TOPK_BLOCK_SIZE": 4,
        },
        outputs=("output_ptr",),
    )


def ranks(logits: torch.Tensor, block: int = 64) -> Launch:
    rows, vocabulary = logits.shape
    return Launch(
        f"{MODULE}._ranks_kernel",
        (rows,),
        {
            "output_ptr": torch.zeros(rows, dtype=torch.int64),
            "logits_ptr": logits,
            "logits_stride": logits.stride(0),
            "token_ids_ptr": tokens(rows, dtype=torch.int64) % vocabulary,
            "vocab_size": vocabulary,
            "BLOCK_SIZE": block,
        },
        outputs=("output_ptr",),
    )


def filled(own: list[int], topk: int) -> Launch:
    rows = len(own)
    columns = max(topk, *own, 1)
    slots = list(range(rows))[::-1]
    num_own = torch.zeros(rows + 1, dtype=torch.int32)
    num_own[torch.tensor(slots, dtype=torch.int64)] = torch.tensor(
        own, dtype=torch.int32
    )
    top = tokens(rows, max(topk, 1), seed=1)
    per_request = tokens(rows + 1, 8, seed=2)
    return Launch(
        f"{MODULE}._fill_logprob_token_ids_kernel",
        (rows,),
        {
            "out_token_ids_ptr": torch.zeros(rows, 1 + columns, dtype=torch.int64),
            "out_token_ids_stride": 1 + columns,
            "out_valid_mask_ptr": torch.zeros(rows, 1 + columns, dtype=torch.bool),
            "out_valid_mask_stride": 1 + columns,
            "sampled_token_ids_ptr": tokens(rows, dtype=torch.int64, seed=3),
            "topk_indices_ptr": top,
            "topk_indices_stride": top.stride(0),
            "expanded_idx_mapping_ptr": torch.tensor(slots, dtype=torch.int32),
            "num_per_req_token_ids_ptr": num_own,
            "per_req_token_ids_ptr": per_request,
            "per_req_token_ids_stride": per_request.stride(0),
            "NUM_TOPK": topk,
            "PADDED_COLS": 8,
        },
    )


@few_examples
@given(
    rows=st.integers(0, 4),
    vocabulary=st.sampled_from([1, 63, 64, 65, 300, 1024]),
    topk=st.integers(1, 6),
    seed=st.integers(0, 99),
)
def test_log_probabilities_equal_the_interpreted_kernel(
    rows: int, vocabulary: int, topk: int, seed: int
) -> None:
    check(log_softmax(some_logits(rows, vocabulary, seed, gap=2), topk))


def test_log_probabilities_of_a_large_vocabulary_equal_the_kernel() -> None:
    check(log_softmax(some_logits(3, 20_000, 0), 5, block=1024))


@few_examples
@given(
    rows=st.integers(0, 4),
    vocabulary=st.sampled_from([1, 63, 64, 65, 300]),
    seed=st.integers(0, 99),
)
def test_ranks_equal_the_interpreted_kernel(
    rows: int, vocabulary: int, seed: int
) -> None:
    check(ranks(some_logits(rows, vocabulary, seed, gap=2)))


@few_examples
@given(own=st.lists(st.integers(0, 6), min_size=1, max_size=4), topk=st.integers(0, 6))
def test_reported_tokens_equal_the_interpreted_kernel(
    own: list[int], topk: int
) -> None:
    check(filled(own, topk))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("value", [torch.nan, -torch.inf, torch.inf])
def test_rows_that_are_not_finite_equal_the_interpreted_kernel(value: float) -> None:
    logits = some_logits(3, 65, 1)
    logits[0] = value
    logits[1, 40] = value
    check(log_softmax(logits, 3))
    check(ranks(logits))


def test_log_probabilities_are_those_of_torch() -> None:
    launch = log_softmax(some_logits(3, 300, 2), 4)
    after = check(launch)["output_ptr"]
    reference = launch.arguments["logits_ptr"].double().log_softmax(-1)
    chosen = reference.gather(1, launch.arguments["topk_ids_ptr"])
    torch.testing.assert_close(after.double(), chosen, rtol=1e-6, atol=1e-5)


def test_the_likeliest_token_has_rank_one() -> None:
    launch = ranks(some_logits(3, 300, 2))
    launch.arguments["logits_ptr"][
        torch.arange(3), launch.arguments["token_ids_ptr"]
    ] = 99
    assert check(launch)["output_ptr"].tolist() == [1, 1, 1]


def test_bfloat16_logits_are_widened() -> None:
    narrow = some_logits(2, 65, 3).bfloat16()
    for make in (lambda x: log_softmax(x, 3), ranks):
        launch = make(narrow)
        run_stand_in(launch.kernel, launch.grid, launch.arguments)
        wide = check(make(narrow.float()))
        assert torch.equal(launch.arguments["output_ptr"], wide["output_ptr"])
