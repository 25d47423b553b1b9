"""The stand-in for vllm.v1.worker.gpu.sample.prompt_logprob against the kernel."""

import torch
from hypothesis import given

from .batches import Batch, Request, batches, few_examples, tokens
from .harness import Launch, check

LENGTH = 40


def following(batch: Batch) -> Launch:
    state = tokens(batch.num_slots + 1, LENGTH)
    return Launch(
        "vllm.v1.worker.gpu.sample.prompt_logprob._prompt_logprobs_token_ids_kernel",
        (batch.size,),
        {
            "prompt_logprobs_token_ids_ptr": torch.zeros(
                batch.total("query") + 3, dtype=torch.int64
            ),
            "query_start_loc_ptr": batch.starts("query"),
            "idx_mapping_ptr": batch.idx_mapping(),
            "num_computed_tokens_ptr": batch.per_slot("computed"),
            "all_token_ids_ptr": state,
            "all_token_ids_stride": LENGTH,
            "BLOCK_SIZE": 4,
        },
        outputs=("prompt_logprobs_token_ids_ptr",),
    )


@few_examples
@given(batch=batches())
def test_equals_the_interpreted_kernel(batch: Batch) -> None:
    check(following(batch))


def test_each_token_is_judged_by_the_next() -> None:
    launch = following(Batch([Request(4, 3, 9, 1, 1)], [1], 2))
    row = launch.arguments["all_token_ids_ptr"][1]
    after = check(launch)["prompt_logprobs_token_ids_ptr"]
    assert after[:3].tolist() == row[5:8].tolist()


def test_a_prompt_as_long_as_the_row_reads_the_next_row() -> None:
    check(following(Batch([Request(LENGTH - 2, 2, 2, 1, 1)], [1], 2)))
