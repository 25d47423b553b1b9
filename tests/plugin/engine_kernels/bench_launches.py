"""Times a launch of eight requests, interpreted and replaced.

python -m pytest tests/plugin/engine_kernels/bench_launches.py -q -s
"""

import dataclasses

import pytest
import torch

from . import (
    test_block_table,
    test_buffer_utils,
    test_dflash_speculator,
    test_input_batch,
    test_logprob,
    test_metadata,
    test_prompt_logprob,
    test_structured_outputs,
    test_target_dependent_speculator,
    test_worker_utils,
)
from .batches import Batch, Request
from .harness import Launch, Pointers, check, microseconds

DECODE = Batch(
    [Request(20 + i, 3, -4, 3, i % 4) for i in range(8)], [3, 1, 0, 2, 7, 6, 5, 4], 16
)
PREFILL = Batch([Request(0, 9, 30, 1, 1) for _ in range(8)], list(range(8)), 16)
VOCABULARY = 4096


def cache_zeroing() -> Launch:
    """Four blocks of 43 layers, 16 KiB a page."""
    page = 4096
    layers = [torch.ones(8 * page, dtype=torch.int32) for _ in range(43)]
    launch = test_worker_utils.zeroing([1, 5, 2, 7], 1024)
    changes = {
        "seg_addrs_ptr": Pointers(layers),
        "seg_block_strides_ptr": torch.full((43,), page),
        "seg_page_sizes_ptr": torch.full((43,), page),
    }
    return dataclasses.replace(
        launch, grid=(4, 43, page // 1024), arguments=launch.arguments | changes
    )


def with_blocks_of_1024(launch: Launch) -> Launch:
    """The block sizes that vLLM launches with, where they are that."""
    block = {
        name: 1024
        for name in ("BLOCK_SIZE", "TRITON_BLOCK_SIZE")
        if name in launch.arguments
    }
    return dataclasses.replace(launch, arguments=launch.arguments | block)


LOGITS = test_logprob.some_logits(8, VOCABULARY, 0)
GRAMMAR = test_structured_outputs.masked(
    [1] * 8, [(i, 0) for i in range(8)], VOCABULARY
)
GRAMMAR.arguments["bitmask_ptr"].fill_(0x55555555)
DRAFTINGS = [test_dflash_speculator.Drafting(20, 4, i % 4, 1) for i in range(8)]

LAUNCHES = [
    *map(
        with_blocks_of_1024,
        [
            test_input_batch.prefill_inputs(PREFILL),
            test_input_batch.prefill_inputs(DECODE),
            test_input_batch.pos_seq_lens(DECODE),
            test_input_batch.post_update(DECODE),
            test_input_batch.post_update_computed(DECODE),
            test_input_batch.sampled_and_rejected(DECODE),
            test_block_table.gather(DECODE, 0),
            test_block_table.slot_mappings(DECODE),
            test_buffer_utils.write([(i % 5, 2, 1, 0) for i in range(8)], torch.int32),
            test_buffer_utils.write_groups([(i % 5, 2, 3, i % 3) for i in range(8)]),
            test_prompt_logprob.following(PREFILL),
            test_logprob.log_softmax(LOGITS, 6),
            test_logprob.ranks(LOGITS),
            test_target_dependent_speculator.prefill_inputs(
                [(4, i % 4, 1) for i in range(8)]
            ),
            test_target_dependent_speculator.decode_inputs(8, True, 3),
            test_target_dependent_speculator.updated_inputs(8, 0, True),
        ],
    ),
    test_input_batch.combined(DECODE),
    test_input_batch.expanded(DECODE),
    test_metadata.mapping([4] * 8, 0, 0),
    test_logprob.filled([2, 0] * 4, 5),
    dataclasses.replace(
        GRAMMAR,
        grid=(8, 1),
        arguments=GRAMMAR.arguments | {"BLOCK_SIZE": 8192},
    ),
    test_dflash_speculator.drafting_inputs(DRAFTINGS),
    cache_zeroing(),
]


@pytest.mark.parametrize(
    "launch", LAUNCHES, ids=[launch.kernel.rsplit(".", 1)[1] for launch in LAUNCHES]
)
def bench_launch(launch: Launch) -> None:
    check(launch)
    before = microseconds(launch, interpreted=True, repeats=3)
    after = microseconds(launch, interpreted=False, repeats=300)
    name = launch.kernel.removeprefix("vllm.v1.")
    print(f"\n{name:75} {before:10.0f} µs → {after:6.1f} µs  × {before / after:.0f}")
