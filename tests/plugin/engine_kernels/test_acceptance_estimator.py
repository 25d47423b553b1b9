"""Online prediction of acceptance against the interpreted kernels."""

import pytest
import torch
from vllm.v1.worker.gpu.spec_decode import acceptance_estimator as upstream

from .harness import check
from .recording import record

MODULE = "vllm.v1.worker.gpu.spec_decode.acceptance_estimator"
KERNELS = [
    f"{MODULE}.{name}_kernel"
    for name in ("_accumulate", "_refit", "_local_max_sumexp", "_predict")
]
SLOTS, STEPS = 12, 5


def predict(estimator, logits, mapping, step, temperature):
    confidence = torch.zeros(SLOTS, STEPS)
    launches = record(
        lambda: estimator.predict(logits, mapping, step, confidence, temperature),
        *KERNELS,
    )
    return confidence, launches


def estimator_after(rounds, generator):
    """An estimator fed with random outcomes, and its launches."""
    estimator = upstream.OnlineAcceptanceEstimator(SLOTS, STEPS, torch.device("cpu"))
    estimator.REFIT_INTERVAL = 3
    estimator.features.copy_(torch.randn(SLOTS, STEPS, generator=generator) * 3)
    estimator.predictions.copy_(torch.rand(SLOTS, STEPS, generator=generator))

    def play():
        for _ in range(rounds):
            mapping = torch.randperm(SLOTS, generator=generator)[:9].int()
            sampled = torch.randint(STEPS + 2, (9,), generator=generator).int()
            estimator.step(mapping, sampled, (STEPS + 1 - sampled).clamp(min=0))

    return estimator, record(play, *KERNELS)


@pytest.mark.parametrize("seed", range(3))
def test_learning_leaves_the_bits_of_the_kernels(seed):
    generator = torch.Generator().manual_seed(seed)
    estimator, launches = estimator_after(4, generator)
    assert [launch.kernel for launch in launches].count(f"{MODULE}._refit_kernel") == 1
    for launch in launches:
        check(launch)
    assert not torch.equal(estimator.intercepts, torch.full((STEPS,), -0.2))


def test_a_round_without_drafts_changes_no_coefficient():
    estimator, _ = estimator_after(0, torch.Generator())
    nothing = torch.zeros(2).int()
    before = estimator.slope.clone(), estimator.intercepts.clone()

    def play():
        for _ in range(estimator.REFIT_INTERVAL):
            estimator.step(torch.tensor([0, 1]).int(), nothing + 1, nothing)

    launches = record(play, *KERNELS)
    for launch in launches:
        check(launch)
    assert torch.equal(estimator.slope, before[0])
    assert torch.equal(estimator.intercepts, before[1])


@pytest.mark.parametrize("vocab", [1, 700, 4096, 9000])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning:triton")
def test_prediction_leaves_the_bits_of_the_kernels(vocab, per_token):
    generator = torch.Generator().manual_seed(vocab)
    estimator, _ = estimator_after(3, generator)
    batch = 3 if per_token else 6
    rows = batch * STEPS if per_token else batch
    logits = torch.randn(rows, vocab + 3, generator=generator) * 4
    logits[:, vocab // 2 + 1 :: 7] = -torch.inf
    logits[0, 0] = 90.0
    mapping = torch.randperm(SLOTS, generator=generator)[:batch].int()
    mapping[-1] = -1
    step = torch.tensor(2)
    if per_token:
        mapping = mapping.repeat_interleave(STEPS)
        step = torch.arange(STEPS).repeat(batch)
    temperature = torch.rand(SLOTS, generator=generator).clamp(min=0.05)
    temperature[mapping[0]] = 0.0
    _, launches = predict(estimator, logits[:, :vocab], mapping, step, temperature)
    for launch in launches:
        check(launch)


def test_the_feature_is_the_log_odds_of_the_likeliest_token():
    estimator, _ = estimator_after(0, torch.Generator())
    logits = torch.randn(4, 5000, generator=torch.Generator().manual_seed(1)) * 4
    temperature = torch.full((SLOTS,), 0.7)
    confidence, _ = predict(
        estimator, logits, torch.arange(4).int(), torch.tensor(1), temperature
    )
    likeliest = (logits / 0.7).double().softmax(-1).amax(-1)
    feature = likeliest.logit()
    torch.testing.assert_close(
        estimator.features[:4, 1].double(), feature, rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(
        confidence[:4, 1].double(), (0.5 * feature - 0.2).sigmoid(), rtol=1e-4, atol=0
    )
