"""The stand-in for vllm.v1.worker.utils against the interpreted kernel."""

import pytest
import torch

from .harness import Launch, Pointers, check

BLOCKS = 6


def zeroing(blocks: list[int], chunk: int) -> Launch:
    """Three layers: compact pages, pages with a gap, and one of another size."""
    strides, pages = (32, 40, 10), (32, 24, 10)
    caches = [torch.arange(1, BLOCKS * stride + 1).int() for stride in strides]
    return Launch(
        "vllm.v1.worker.utils._zero_kv_blocks_kernel",
        (len(blocks), len(caches), -(-max(pages) // chunk)),
        {
            "seg_addrs_ptr": Pointers(caches),
            "seg_block_strides_ptr": torch.tensor(strides),
            "seg_page_sizes_ptr": torch.tensor(pages),
            "block_ids_ptr": torch.tensor(blocks, dtype=torch.int64),
            "BLOCK_SIZE": chunk,
        },
    )


@pytest.mark.parametrize("chunk", [8, 16, 32])
@pytest.mark.parametrize("blocks", [[], [0], [5, 2], [1, 1, 4]], ids=str)
def test_equals_the_interpreted_kernel(blocks: list[int], chunk: int) -> None:
    check(zeroing(blocks, chunk))


def test_only_the_page_of_the_named_blocks_is_zeroed() -> None:
    compact, gapped, small = check(zeroing([3], 16))["seg_addrs_ptr"]
    assert compact.view(BLOCKS, 32)[3].count_nonzero() == 0
    assert compact.count_nonzero() == (BLOCKS - 1) * 32
    assert gapped.view(BLOCKS, 40)[3].nonzero().flatten().tolist() == list(
        range(24, 40)
    )
    assert small.view(BLOCKS, 10)[3].count_nonzero() == 0
