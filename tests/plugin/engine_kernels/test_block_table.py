"""Stand-ins for vllm.v1.worker.gpu.block_table against the interpreted kernels."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from .batches import Batch, Request, batches, few_examples, tokens
from .harness import Launch, Pointers, check

MODULE = "vllm.v1.worker.gpu.block_table"
WIDTHS = (40, 7, 3)  # blocks in a row of each group's table
BLOCK_SIZES = (4, 32, 64)


def tables(num_slots: int) -> Pointers:
    return Pointers([tokens(num_slots, width, seed=width) for width in WIDTHS])


def gather(batch: Batch, padding: int) -> Launch:
    rows = batch.size + padding
    num_blocks = torch.stack(
        [tokens(batch.num_slots, seed=width) % (width + 1) for width in WIDTHS]
    )
    return Launch(
        f"{MODULE}._gather_block_tables_kernel",
        (len(WIDTHS), rows),
        {
            "batch_idx_to_req_idx": batch.idx_mapping(),
            "src_block_table_ptrs": tables(batch.num_slots),
            "dst_block_table_ptrs": tables(rows),
            "block_table_strides": torch.tensor(WIDTHS, dtype=torch.int64),
            "num_blocks_ptr": num_blocks,
            "num_blocks_stride": num_blocks.stride(0),
            "num_reqs": batch.size,
            "BLOCK_SIZE": 16,
        },
        outputs=("dst_block_table_ptrs",),
    )


def slot_mappings(
    batch: Batch,
    enabled: tuple[bool, ...] = (True, True, True),
    dummies: bool = False,
    ranks: int = 1,
    rank: int = 0,
    interleave: int = 1,
) -> Launch:
    idx_mapping = batch.idx_mapping()
    if dummies:
        idx_mapping[::2] = -1
    loc = batch.starts("query")
    positions = torch.cat(
        [torch.zeros(0, dtype=torch.int64)]
        + [torch.arange(r.computed, r.computed + r.query) for r in batch.requests]
    )
    total = batch.total("query") + 6
    mappings = torch.zeros(len(WIDTHS), total, dtype=torch.int64)
    return Launch(
        f"{MODULE}._compute_slot_mappings_kernel",
        (len(WIDTHS), batch.size + 1),
        {
            "max_num_tokens": total,
            "idx_mapping": idx_mapping,
            "query_start_loc": loc,
            "pos": positions,
            "block_table_ptrs": tables(batch.num_slots),
            "block_table_strides": torch.tensor(WIDTHS, dtype=torch.int64),
            "block_sizes": torch.tensor(BLOCK_SIZES, dtype=torch.int32),
            "slot_mapping_enabled": torch.tensor(enabled),
            "dcp_sharded": torch.tensor([True, False, True]),
            "slot_mappings_ptr": mappings,
            "slot_mappings_stride": mappings.stride(0),
            "cp_rank": rank,
            "CP_SIZE": ranks,
            "CP_INTERLEAVE": interleave,
            "PAD_ID": -1,
            "TRITON_BLOCK_SIZE": 4,
        },
        outputs=("slot_mappings_ptr",),
    )


@few_examples
@given(batch=batches(), padding=st.integers(0, 3))
def test_gathered_tables_equal_the_interpreted_kernel(
    batch: Batch, padding: int
) -> None:
    check(gather(batch, padding))


@few_examples
@given(
    batch=batches(),
    enabled=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    dummies=st.booleans(),
)
def test_slots_equal_the_interpreted_kernel(
    batch: Batch, enabled: tuple[bool, ...], dummies: bool
) -> None:
    check(slot_mappings(batch, enabled, dummies))


@pytest.mark.parametrize("interleave", [1, 2, 4])
@few_examples
@given(batch=batches(), rank=st.integers(0, 1), dummies=st.booleans())
def test_slots_of_a_rank_equal_the_interpreted_kernel(
    interleave: int, batch: Batch, rank: int, dummies: bool
) -> None:
    check(
        slot_mappings(batch, dummies=dummies, ranks=2, rank=rank, interleave=interleave)
    )


BATCH = Batch([Request(3, 5, 0, 1, 1), Request(9, 2, -1, 1, 1)], [2, 0], 3)


def test_blocks_past_the_requests_own_are_left_as_they_were() -> None:
    launch = gather(BATCH, padding=1)
    launch.arguments["num_blocks_ptr"][0] = torch.tensor([2, 0, 3])
    source = launch.arguments["src_block_table_ptrs"].tensors[0]
    table = check(launch)["dst_block_table_ptrs"][0]
    assert table[0, :3].tolist() == source[2, :3].tolist()
    assert table[1, :2].tolist() == source[0, :2].tolist()
    assert (table[0, 3:] == table[0, 3]).all()
    assert table[2].count_nonzero() == 0


def test_a_slot_is_block_times_size_plus_offset() -> None:
    launch = slot_mappings(BATCH, enabled=(True, False, True))
    table = launch.arguments["block_table_ptrs"].tensors[0]
    mapping = check(launch)["slot_mappings_ptr"]
    first = [table[2, p // 4] * 4 + p % 4 for p in range(3, 8)]
    assert mapping[0, :5].tolist() == first
    assert mapping[1].unique().tolist() == [-1]
    assert mapping[:, 7:].unique().tolist() == [-1]


def test_a_dummy_request_gets_no_slots() -> None:
    launch = slot_mappings(BATCH, dummies=True)
    mapping = check(launch)["slot_mappings_ptr"]
    assert mapping[:, :5].unique().tolist() == [-1]
    assert (mapping[:, 5:7] >= 0).all()


def test_ranks_share_a_groups_positions_without_overlap() -> None:
    first, second = (
        check(slot_mappings(BATCH, ranks=2, rank=rank))["slot_mappings_ptr"]
        for rank in (0, 1)
    )
    assert ((first[0, :7] >= 0) ^ (second[0, :7] >= 0)).all()
    assert torch.equal(first[1], second[1])  # not sharded: every rank holds it
