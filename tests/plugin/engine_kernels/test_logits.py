"""The stand-in for vllm.v1.worker.gpu.metrics.logits against a count in Python.

The interpreter cannot run this kernel: it calls libdevice, which is for GPUs.
"""

import pytest
import torch

from .harness import run_stand_in

KERNEL = "vllm.v1.worker.gpu.metrics.logits._num_nans_kernel"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("counts", [[], [0], [3, 0, 10, 1]], ids=str)
def test_counts_the_nans_of_each_row(counts: list[int], dtype: torch.dtype) -> None:
    logits = torch.randn(
        len(counts), 12, generator=torch.Generator().manual_seed(0)
    ).to(dtype)
    logits[:, 10:] = torch.nan  # past the vocabulary
    for row, count in zip(logits, counts, strict=True):
        row[:count] = torch.nan
        row[count] = torch.inf
    found = torch.full((len(counts) + 1,), -7, dtype=torch.int32)
    run_stand_in(
        KERNEL,
        (len(counts),),
        {
            "logits_ptr": logits,
            "logits_stride": 12,
            "num_nans_ptr": found,
            "vocab_size": 10,
            "BLOCK_SIZE": 8,
        },
    )
    assert found.tolist() == [*counts, -7]
