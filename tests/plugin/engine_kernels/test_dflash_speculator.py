"""The stand-in for vllm.v1.worker.gpu.spec_decode.dflash.speculator."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from .batches import few_examples, tokens
from .harness import Launch, check

STEPS = 3
BLOCKS = 9  # in a row of the block table
BLOCK_SIZE = 4
NOISE = 96
PAD = -1


@dataclass(frozen=True)
class Drafting:
    """One request: where it stands, its tokens in the batch, how many fell away."""

    computed: int
    query: int
    rejected: int
    sampled: int


@st.composite
def draftings(draw: st.DrawFn) -> Drafting:
    query = draw(st.integers(1, 7))
    return Drafting(
        computed=draw(st.integers(0, 22)),
        query=query,
        rejected=draw(st.integers(0, query - 1)),
        sampled=draw(st.integers(0, 2)),
    )


def drafting_inputs(
    batch: list[Drafting],
    anchored: bool = True,
    ranks: int = 1,
    rank: int = 0,
    interleave: int = 1,
    max_model_len: int = 30,
) -> Launch:
    """DSpark's layout (anchored: K queries) or DFlash's (K + 1)."""
    count, max_reqs = len(batch), len(batch) + 2
    queries = STEPS if anchored else STEPS + 1
    max_tokens = max_reqs * queries + 3
    loc = torch.tensor([0] + [r.query for r in batch]).cumsum(0).int()
    positions = torch.cat(
        [torch.arange(r.computed, r.computed + r.query) for r in batch]
    )
    table = tokens(count, BLOCKS)
    table[:, ::3] = 0  # the null block
    longest = max(r.query for r in batch) + queries
    block = 4
    empty = torch.zeros
    return Launch(
        "vllm.v1.worker.gpu.spec_decode.dflash.speculator._prepare_dflash_inputs_kernel",
        (count, -(-longest // block)),
        {
            "out_input_ids_ptr": empty(max_tokens, dtype=torch.int32),
            "out_query_positions_ptr": empty(max_tokens, dtype=torch.int64),
            "out_query_start_loc_ptr": empty(max_reqs + 1, dtype=torch.int32),
            "out_seq_lens_ptr": empty(max_reqs, dtype=torch.int32),
            "out_query_slot_mapping_ptr": empty(max_tokens, dtype=torch.int64),
            "out_context_positions_ptr": empty(40, dtype=torch.int64),
            "out_context_slot_mapping_ptr": empty(40, dtype=torch.int64),
            "out_sample_indices_ptr": empty(max_reqs * STEPS, dtype=torch.int64),
            "out_sample_pos_ptr": empty(max_reqs * STEPS, dtype=torch.int64),
            "out_sample_idx_mapping_ptr": empty(max_reqs * STEPS, dtype=torch.int64),
            "out_temperature_ptr": empty(max_reqs),
            "out_seeds_ptr": empty(max_reqs, dtype=torch.int64),
            "target_positions_ptr": positions,
            "target_query_start_loc_ptr": loc,
            "idx_mapping_ptr": torch.arange(count - 1, -1, -1).int(),
            "last_sampled_ptr": tokens(max_reqs, 1, dtype=torch.int64, seed=1),
            "next_prefill_tokens_ptr": tokens(2, max_reqs, seed=2),
            "num_sampled_ptr": torch.tensor([r.sampled for r in batch]).int(),
            "num_rejected_ptr": torch.tensor([r.rejected for r in batch]).int(),
            "temperature_ptr": torch.linspace(0, 1, max_reqs),
            "seeds_ptr": tokens(max_reqs, dtype=torch.int64, seed=3),
            "block_table_ptr": table,
            "block_table_stride": BLOCKS,
            "parallel_drafting_token_id": NOISE,
            "block_size": BLOCK_SIZE,
            "num_query_per_req": queries,
            "num_speculative_steps": STEPS,
            "max_num_reqs": max_reqs,
            "max_num_tokens": max_tokens,
            "max_model_len": max_model_len,
            "cp_rank": rank,
            "SAMPLE_FROM_ANCHOR": anchored,
            "PAD_SLOT_ID": PAD,
            "CP_SIZE": ranks,
            "CP_INTERLEAVE": interleave,
            "BLOCK_SIZE": block,
        },
        outputs=(
            "out_input_ids_ptr",
            "out_query_positions_ptr",
            "out_query_start_loc_ptr",
            "out_seq_lens_ptr",
            "out_query_slot_mapping_ptr",
            "out_context_positions_ptr",
            "out_context_slot_mapping_ptr",
            "out_sample_indices_ptr",
            "out_sample_pos_ptr",
            "out_sample_idx_mapping_ptr",
            "out_temperature_ptr",
            "out_seeds_ptr",
        ),
    )


members = st.lists(draftings(), min_size=1, max_size=4)


@pytest.mark.parametrize("anchored", [True, False], ids=["dspark", "dflash"])
@few_examples
@given(batch=members)
def test_equals_the_interpreted_kernel(anchored: bool, batch: list[Drafting]) -> None:
    check(drafting_inputs(batch, anchored))


@pytest.mark.parametrize("interleave", [1, 2])
@few_examples
@given(batch=members, rank=st.integers(0, 1))
def test_a_ranks_share_equals_the_interpreted_kernel(
    interleave: int, batch: list[Drafting], rank: int
) -> None:
    check(drafting_inputs(batch, ranks=2, rank=rank, interleave=interleave))


def test_queries_start_after_the_accepted_tokens() -> None:
    launch = drafting_inputs([Drafting(computed=5, query=4, rejected=2, sampled=1)])
    after = check(launch)
    assert after["out_query_positions_ptr"][:3].tolist() == [7, 8, 9]
    assert after["out_sample_pos_ptr"][:3].tolist() == [8, 9, 10]
    assert after["out_input_ids_ptr"][:3].tolist() == [
        launch.arguments["last_sampled_ptr"][0].item(),
        NOISE,
        NOISE,
    ]
    assert after["out_seq_lens_ptr"].tolist() == [10, 0, 0]


def test_a_rejected_token_writes_no_context() -> None:
    launch = drafting_inputs([Drafting(computed=5, query=4, rejected=2, sampled=1)])
    after = check(launch)
    block = launch.arguments["block_table_ptr"][0, 1].item()
    assert block != 0
    assert after["out_context_positions_ptr"][:4].tolist() == [5, 6, 0, 0]
    slots = after["out_context_slot_mapping_ptr"][:4].tolist()
    assert slots == [block * BLOCK_SIZE + 1, block * BLOCK_SIZE + 2, PAD, PAD]


def test_the_null_block_is_never_written() -> None:
    launch = drafting_inputs([Drafting(computed=0, query=4, rejected=0, sampled=1)])
    assert launch.arguments["block_table_ptr"][0, 0] == 0
    after = check(launch)
    assert after["out_context_slot_mapping_ptr"][:4].tolist() == [PAD] * 4
    assert (after["out_query_slot_mapping_ptr"][:3] >= BLOCK_SIZE).all()


def test_unused_requests_sample_nothing() -> None:
    after = check(drafting_inputs([Drafting(3, 2, 0, 1)]))
    assert (
        after["out_sample_idx_mapping_ptr"].tolist() == [0] * STEPS + [-1] * 2 * STEPS
    )
    assert after["out_query_start_loc_ptr"].tolist() == [0, 3, 3, 3]
