"""The stand-in for vllm.v1.sample.ops.topk_topp_triton.

The interpreter cannot run this kernel (its row number stays a Python int). So the
oracle is the definition, written out token by token in float64, and vLLM's own path
for a CPU without Triton must be matched to the bit.
"""

import pytest
import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

from .harness import run_stand_in

KERNEL = "vllm.v1.sample.ops.topk_topp_triton._topk_topp_kernel"
VOCABULARY = 50


def kept_by_definition(row: torch.Tensor, k: int, p: float) -> set[int]:
    """The k likeliest, and of these the fewest whose probabilities reach p."""
    order = sorted(range(len(row)), key=lambda t: -row[t].item())[:k]
    probabilities = row.double()[order].softmax(0).tolist()
    kept, mass = set(), 0.0
    for token, probability in zip(order, probabilities, strict=True):
        if mass >= p:
            break
        kept.add(token)
        mass += probability
    return kept


def launch(
    logits: torch.Tensor,
    k: torch.Tensor | None,
    p: torch.Tensor | None,
    mask_value: float = float("-inf"),
) -> None:
    run_stand_in(
        KERNEL,
        (len(logits),),
        {
            "LOGITS": logits,
            "LOGITS_STRIDE_0": logits.stride(0),
            "BUFFER": logits,
            "PERCENTILE_TO_STD_TABLE": logits,
            "NORMAL_CDF_TO_SIGMA_TABLE": logits,
            "K": logits if k is None else k,
            "P": logits if p is None else p,
            "BATCH_SIZE": len(logits),
            "VOCAB_SIZE": logits.shape[1],
            "MASK_VALUE": mask_value,
            "BLOCK_SIZE": 256,
            "BLOCK_SIZE_TRUNC": 128,
            "TOPK_ENABLED": k is not None,
            "TOPP_ENABLED": p is not None,
            "SPLIT_COVERS_PONLY": False,
            "num_warps": 4,
        },
    )


def some_logits(rows: int = 5) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(0))


K = torch.tensor([1, 3, 10, VOCABULARY, 25], dtype=torch.int32)
P = torch.tensor([1.0, 0.4, 0.9, 0.7, 0.01])


@pytest.mark.parametrize(
    ("use_k", "use_p"), [(True, False), (False, True), (True, True)]
)
def test_keeps_the_tokens_of_the_definition(use_k: bool, use_p: bool) -> None:
    logits = some_logits()
    before = logits.clone()
    launch(logits, K if use_k else None, P if use_p else None)
    for row, original, k, p in zip(logits, before, K.tolist(), P.tolist(), strict=True):
        kept = set(row.isfinite().nonzero().flatten().tolist())
        assert kept == kept_by_definition(
            original, k if use_k else VOCABULARY, p if use_p else 1.0
        )
        at = sorted(kept)
        assert torch.equal(row[at], original[at])


@pytest.mark.parametrize(("k", "p"), [(K, None), (None, P), (K, P)])
def test_equals_vllm_without_triton(
    k: torch.Tensor | None, p: torch.Tensor | None
) -> None:
    logits = some_logits()
    expected = apply_top_k_top_p_pytorch(logits.clone(), k, p, allow_cpu_sync=True)
    launch(logits, k, p)
    assert torch.equal(logits, expected)


def test_rows_with_few_finite_logits_keep_them() -> None:
    logits = torch.full((1, VOCABULARY), -torch.inf)
    logits[0, [4, 9]] = torch.tensor([1.0, 2.0])
    launch(logits, torch.tensor([10], dtype=torch.int32), torch.tensor([0.999]))
    assert logits.isfinite().nonzero()[:, 1].tolist() == [4, 9]


def test_a_finite_mask_value_is_written() -> None:
    logits = some_logits()
    launch(logits, K, P, mask_value=-1e30)
    assert logits.isfinite().all()
    assert (logits[0] == -1e30).sum() == VOCABULARY - 1


def test_rows_past_the_batch_are_left_alone() -> None:
    logits = some_logits()
    before = logits.clone()
    launch(logits[:2], K[:2], P[:2])
    assert torch.equal(logits[2:], before[2:])
