"""Stand-ins for vllm.v1.worker.gpu.input_batch against the interpreted kernels."""

import dataclasses

import pytest
import torch
from hypothesis import given

from .batches import Batch, Request, batches, few_examples, tokens
from .harness import Launch, check

MODULE = "vllm.v1.worker.gpu.input_batch"
LENGTH = 64


def prefill_inputs(batch: Batch, lookahead: int = 2) -> Launch:
    state = tokens(batch.num_slots, LENGTH)
    following = tokens(lookahead, batch.num_slots, seed=1)
    return Launch(
        f"{MODULE}._prepare_prefill_inputs_kernel",
        (batch.size,),
        {
            "input_ids_ptr": tokens(batch.total("query") + 4, seed=2),
            "next_prefill_tokens_ptr": following,
            "next_prefill_tokens_stride": following.stride(0),
            "num_lookahead": lookahead,
            "idx_mapping_ptr": batch.idx_mapping(),
            "query_start_loc_ptr": batch.starts("query"),
            "all_token_ids_ptr": state,
            "all_token_ids_stride": state.stride(0),
            "prefill_lens_ptr": batch.per_slot("prefill"),
            "num_computed_tokens_ptr": batch.per_slot("computed"),
            "BLOCK_SIZE": 4,
            "LOOKAHEAD_BLOCK": max(2, lookahead),
        },
        outputs=("input_ids_ptr", "next_prefill_tokens_ptr"),
    )


def pos_seq_lens(batch: Batch) -> Launch:
    return Launch(
        f"{MODULE}._prepare_pos_seq_lens_kernel",
        (batch.size + 1,),
        {
            "pos_ptr": torch.zeros(batch.total("query") + 4, dtype=torch.int64),
            "seq_lens_ptr": torch.zeros(batch.num_slots, dtype=torch.int32),
            "idx_mapping_ptr": batch.idx_mapping(),
            "query_start_loc_ptr": batch.starts("query"),
            "num_computed_tokens_ptr": batch.per_slot("computed"),
            "max_num_reqs": batch.num_slots,
            "BLOCK_SIZE": 4,
        },
        outputs=("pos_ptr", "seq_lens_ptr"),
    )


def combined(batch: Batch, new_sampled: int = 1, steps: int = 2) -> Launch:
    drafts = tokens(batch.num_slots, steps, dtype=torch.int64, seed=3)
    if steps:
        drafts[0, -1] = -1  # as when fewer tokens were drafted than can be
    return Launch(
        f"{MODULE}._combine_sampled_and_draft_tokens_kernel",
        (batch.size,),
        {
            "input_ids_ptr": tokens(batch.total("query") + 4, seed=2),
            "idx_mapping_ptr": batch.idx_mapping(),
            "last_sampled_tokens_ptr": tokens(batch.num_slots, 1, dtype=torch.int64),
            "query_start_loc_ptr": batch.starts("query"),
            "seq_lens_ptr": batch.seq_lens(),
            "prefill_len_ptr": batch.per_slot("prefill"),
            "draft_tokens_ptr": drafts,
            "draft_tokens_stride": drafts.stride(0),
            "cu_num_logits_ptr": batch.starts("logits"),
            "logits_indices_ptr": torch.zeros(batch.total("logits"), dtype=torch.int64),
            "BLOCK_SIZE": 4,
            "NUM_NEW_SAMPLED_TOKENS": new_sampled,
        },
        outputs=("logits_indices_ptr",),
    )


def sampled_and_rejected(batch: Batch) -> Launch:
    return Launch(
        f"{MODULE}._get_num_sampled_and_rejected_kernel",
        (batch.size,),
        {
            "num_sampled_ptr": batch.per_request("sampled"),
            "num_rejected_ptr": torch.zeros(batch.size, dtype=torch.int32),
            "seq_lens_ptr": batch.seq_lens(),
            "cu_num_logits_ptr": batch.starts("logits"),
            "idx_mapping_ptr": batch.idx_mapping(),
            "prefill_len_ptr": batch.per_slot("prefill"),
        },
        outputs=("num_rejected_ptr",),
    )


def post_update(
    batch: Batch, counted: bool = True, queries: bool = True, skip: bool = False
) -> Launch:
    state = tokens(batch.num_slots, LENGTH)
    counts = tokens(batch.num_slots, 97, seed=4) if counted else None
    sampled = tokens(batch.size, 3, dtype=torch.int64, seed=5)
    sampled %= 3  # the same token more than once in a request
    idx_mapping = batch.idx_mapping()
    if skip:
        idx_mapping[::2] = -1
    return Launch(
        f"{MODULE}._post_update_kernel",
        (batch.size,),
        {
            "idx_mapping_ptr": idx_mapping,
            "num_computed_tokens_ptr": batch.per_slot("computed"),
            "last_sampled_tokens_ptr": tokens(batch.num_slots, 1, dtype=torch.int64),
            "output_bin_counts_ptr": counts,
            "output_bin_counts_stride": 97 if counted else 0,
            "sampled_tokens_ptr": sampled,
            "sampled_tokens_stride": 3,
            "num_sampled_ptr": batch.per_request("sampled"),
            "num_rejected_ptr": batch.per_request("logits")
            - batch.per_request("sampled"),
            "query_start_loc_ptr": batch.starts("query") if queries else None,
            "all_token_ids_ptr": state,
            "all_token_ids_stride": LENGTH,
            "total_len_ptr": batch.per_slot("computed") + 5,
            "num_warps": 1,
        },
    )


def post_update_computed(batch: Batch) -> Launch:
    return Launch(
        f"{MODULE}._post_update_num_computed_tokens_kernel",
        (batch.size,),
        {
            "idx_mapping_ptr": batch.idx_mapping(),
            "num_computed_tokens_ptr": batch.per_slot("computed"),
            "query_start_loc_ptr": batch.starts("query"),
        },
    )


def expanded(batch: Batch) -> Launch:
    total = batch.total("logits")
    return Launch(
        f"{MODULE}._expand_idx_mapping_kernel",
        (batch.size,),
        {
            "idx_mapping_ptr": batch.idx_mapping(),
            "expanded_idx_mapping_ptr": torch.zeros(total, dtype=torch.int32),
            "expanded_local_pos_ptr": torch.zeros(total, dtype=torch.int32),
            "cu_num_logits_ptr": batch.starts("logits"),
            "BLOCK_SIZE": 4,
        },
        outputs=("expanded_idx_mapping_ptr", "expanded_local_pos_ptr"),
    )


LAUNCHES = {
    "prefill_inputs": prefill_inputs,
    "no_lookahead": lambda batch: prefill_inputs(batch, lookahead=1),
    "pos_seq_lens": pos_seq_lens,
    "combined": combined,
    "combined_without_bonus": lambda batch: combined(batch, new_sampled=0, steps=3),
    "sampled_and_rejected": sampled_and_rejected,
    "post_update": post_update,
    "post_update_uncounted": lambda batch: post_update(batch, counted=False),
    "post_update_without_queries": lambda batch: post_update(batch, queries=False),
    "post_update_skips_dummies": lambda batch: post_update(batch, skip=True),
    "post_update_computed": post_update_computed,
    "expanded": expanded,
}

DECODING = Request(computed=20, query=1, beyond=-4, logits=1, sampled=1)
DRAFTING = Request(computed=20, query=3, beyond=-4, logits=3, sampled=2)
PROMPT = Request(computed=4, query=9, beyond=12, logits=1, sampled=1)
PROMPT_END = Request(computed=4, query=6, beyond=6, logits=1, sampled=1)


@pytest.mark.parametrize("name", LAUNCHES)
@few_examples
@given(batch=batches())
def test_equals_the_interpreted_kernel(name: str, batch: Batch) -> None:
    check(LAUNCHES[name](batch))


@pytest.mark.parametrize("name", LAUNCHES)
def test_an_empty_batch_writes_only_padding(name: str) -> None:
    check(LAUNCHES[name](Batch([], [], 3)))


@pytest.mark.parametrize("name", LAUNCHES)
def test_slots_may_be_int64(name: str) -> None:
    launch = LAUNCHES[name](Batch([PROMPT, DRAFTING, DECODING], [2, 0, 3], 4))
    wide = launch.arguments["idx_mapping_ptr"].long()
    arguments = launch.arguments | {"idx_mapping_ptr": wide}
    check(dataclasses.replace(launch, arguments=arguments))


def test_a_prompt_chunk_is_followed_by_its_lookahead() -> None:
    launch = prefill_inputs(Batch([PROMPT_END], [1], 2), lookahead=2)
    prompt = launch.arguments["all_token_ids_ptr"][1]
    after = check(launch)
    assert after["input_ids_ptr"][:6].tolist() == prompt[4:10].tolist()
    assert after["next_prefill_tokens_ptr"][:, 1].tolist() == [0, 0]
    after = check(prefill_inputs(Batch([PROMPT], [1], 2), lookahead=2))
    following = after["next_prefill_tokens_ptr"][:, 1].tolist()
    assert following == prompt[13:15].tolist()


def test_positions_continue_each_request() -> None:
    after = check(pos_seq_lens(Batch([DRAFTING, PROMPT_END], [2, 0], 4)))
    assert after["pos_ptr"][:9].tolist() == [20, 21, 22, 4, 5, 6, 7, 8, 9]
    assert after["seq_lens_ptr"].tolist() == [23, 10, 0, 0]


def test_drafts_follow_the_sampled_token() -> None:
    launch = combined(Batch([PROMPT, DRAFTING], [0, 1], 2))
    after = check(launch)
    sampled = launch.arguments["last_sampled_tokens_ptr"][1].tolist()
    drafts = launch.arguments["draft_tokens_ptr"][1].tolist()
    assert after["input_ids_ptr"][9:12].tolist() == sampled + drafts
    assert after["logits_indices_ptr"].tolist() == [8, 9, 10, 11]


def test_a_token_sampled_amid_a_prompt_does_not_count() -> None:
    after = check(
        sampled_and_rejected(Batch([PROMPT, PROMPT_END, DRAFTING], [0, 1, 2], 3))
    )
    assert after["num_sampled_ptr"].tolist()[1:] == [1, 2]
    assert after["num_rejected_ptr"].tolist()[1:] == [0, 1]
    longer = dataclasses.replace(PROMPT, beyond=30)
    after = check(sampled_and_rejected(Batch([longer], [0], 1)))
    assert after["num_sampled_ptr"].tolist() == [0]
    assert after["num_rejected_ptr"].tolist() == [0]


def test_a_token_sampled_twice_is_counted_twice() -> None:
    launch = post_update(Batch([DRAFTING], [0], 1))
    launch.arguments["sampled_tokens_ptr"][:] = 7
    counts = launch.arguments["output_bin_counts_ptr"][0, 7].item()
    assert check(launch)["output_bin_counts_ptr"][0, 7].item() == counts + 2


def test_a_dummy_request_leaves_the_state_alone() -> None:
    launch = post_update(Batch([DRAFTING], [0], 2), skip=True)
    before = launch.arguments["all_token_ids_ptr"].clone()
    after = check(launch)
    assert torch.equal(after["all_token_ids_ptr"], before)
    assert after["num_computed_tokens_ptr"][0] == DRAFTING.computed
