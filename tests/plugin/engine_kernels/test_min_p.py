"""min-p against the interpreted kernel."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.worker.gpu.sample import min_p as upstream

from .harness import check
from .recording import record

KERNEL = "vllm.v1.worker.gpu.sample.min_p._min_p_kernel"


def apply(logits, mapping, min_p):
    return record(lambda: upstream.apply_min_p(logits, mapping, min_p), KERNEL)[0]


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 5),
    vocab=st.sampled_from([1, 1000, 1024, 2100]),
    seed=st.integers(0, 1000),
)
def test_masking_leaves_the_bits_of_the_kernel(rows, vocab, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab + 2, generator=generator) * 3
    logits[:, vocab // 2] = -torch.inf
    logits[0, :vocab] = torch.tensor([1.0, -torch.inf, torch.nan])[seed % 3]
    if vocab > 1:
        logits[0, -3] = 2.0
    min_p = torch.tensor([0.0, 0.05, 1.0, 1e-6])
    mapping = torch.randint(4, (rows,), generator=generator).int()
    check(apply(logits[:, :vocab], mapping, min_p))


def test_tokens_below_min_p_times_the_likeliest_are_dropped():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 500, generator=generator)
    probability = logits.softmax(-1)
    expected = probability >= 0.2 * probability.amax(-1, keepdim=True)
    expected[1] = True
    apply(logits, torch.tensor([1, 0, 1]).int(), torch.tensor([0.0, 0.2]))
    assert torch.equal(logits.isfinite(), expected)
