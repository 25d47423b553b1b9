"""Verification of drafts: each kernel that vLLM launches, against its stand-in."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle
from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils as upstream

from .chi_square import p_value
from .harness import check
from .recording import record

MODULE = "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils"
KERNELS = [
    f"{MODULE}.{name}_kernel"
    for name in (
        "_compute_local_logits_stats",
        "_compute_cumulative_log_p",
        "_compute_local_residual_mass",
        "_rejection",
        "_resample",
        "_insert_resampled",
    )
]


def scenario(seed, vocab, steps, *, draft_logits, temperatures=(0.0, 0.3, 1.0, 1.7)):
    """Keyword arguments of rejection_sample, for a mixed batch.

    Requests have 0 to `steps` drafts, some of them placeholders (−1) from some step
    on; drafts are drawn so that some are accepted and some are not.
    """
    generator = torch.Generator().manual_seed(seed)

    def integers(high, *size):
        return torch.randint(high, size, generator=generator)

    num_requests, slots = 7, 10
    num_drafts = integers(steps + 1, num_requests)
    num_drafts[:2] = steps
    num_drafts[2] = 0
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), (num_drafts + 1).cumsum(0)])
    num_logits = int(bounds[-1])
    mapping = torch.randperm(slots, generator=generator)[:num_requests]
    local_pos = torch.cat([torch.arange(n + 1) for n in num_drafts.tolist()])
    temperature = torch.tensor(temperatures)[integers(len(temperatures), slots)]
    target = torch.randn(num_logits, vocab, generator=generator) * 2
    target[:, integers(vocab, 3)] = -torch.inf
    target[torch.arange(num_logits), integers(vocab, num_logits)] = 14.0
    draft = torch.randn(slots, steps, vocab, generator=generator) * 2
    draft_sampled = integers(vocab, num_logits).int()
    for request in range(num_requests):
        first = int(bounds[request])
        for step in range(int(num_drafts[request])):
            row, slot = first + step, int(mapping[request])
            if torch.rand((), generator=generator) < 0.75 or request == 1:
                draft[slot, step] = target[row] * temperature[slot].clamp(min=0.1)
                draft[slot, step, integers(vocab, 4)] += 1.0
                draft_sampled[row + 1] = target[row].argmax()
    never = int(target[0].argmin())
    assert target[0, never] == -torch.inf
    draft_sampled[1] = never
    broken = int(1 + integers(num_requests - 1, 1))
    draft_sampled[int(bounds[broken]) + 1 + steps // 2 : int(bounds[broken + 1])] = -1
    return {
        "target_logits": target,
        "draft_logits": draft if draft_logits else None,
        "draft_sampled": draft_sampled,
        "cu_num_logits": bounds.int(),
        "pos": integers(5000, num_logits),
        "idx_mapping": mapping.int(),
        "expanded_idx_mapping": mapping.int().repeat_interleave(num_drafts + 1),
        "expanded_local_pos": local_pos.int(),
        "temperature": temperature,
        "seed": torch.randint(-(2**62), 2**62, (slots,), generator=generator),
        "num_speculative_steps": steps,
    }


def watermark(num_logits):
    """Arguments of rejection_sample for a watermark on some of the requests."""
    return {
        "contexts": torch.arange(num_logits * 5).view(num_logits, 5).int() - 3,
        "watermarking": torch.arange(10) % 3 != 0,
        "watermarking_skip_mask": torch.arange(num_logits) % 5 == 1,
        "watermark_key": 0x1234_5678_9ABC_DEF0,
    }


def synthetic(steps):
    return {"synthetic_conditional_rates": torch.linspace(0.7, 0.3, steps)}


MODES = {
    "token": lambda rows, steps: {},
    "block": lambda rows, steps: {"use_block_verification": True},
    "synthetic": lambda rows, steps: synthetic(steps),
    "float64": lambda rows, steps: {"use_fp64": True},
    "watermark": lambda rows, steps: watermark(rows),
    "watermark-block-float64": lambda rows, steps: {
        **watermark(rows),
        "watermarking_skip_mask": None,
        "use_block_verification": True,
        "use_fp64": True,
    },
}
ALWAYS = ("_compute_local_logits_stats", "_rejection", "_resample", "_insert_resampled")


@pytest.fixture
def log1p(monkeypatch):
    """Triton's interpreter has no libdevice: the residual's log1p is numpy's here."""

    def numpy_log1p(x):
        with np.errstate(all="ignore"):
            return tl.tensor(TensorHandle(np.log1p(x.handle.data), x.dtype), x.type)

    monkeypatch.setattr(upstream, "tldevice", SimpleNamespace(log1p=numpy_log1p))


def sample(arguments, **options):
    """rejection_sample through the stand-ins: (sampled, num_sampled, launches)."""
    result = []
    launches = record(
        lambda: result.extend(upstream.rejection_sample(**arguments, **options)),
        *KERNELS,
    )
    return *result, launches


# Vocabularies of one whole block, of one part of a block, and of two blocks (the
# blocks are 8192 wide in the walk and 1024 in the draw).
CASES = [
    *((mode, vocab, steps) for mode in MODES for vocab, steps in ((1024, 2), (300, 3))),
    ("token", 8200, 1),
    ("block", 8200, 2),
]


@pytest.mark.parametrize(("mode", "vocab", "steps"), CASES)
@pytest.mark.parametrize("draft_logits", [False, True], ids=["one-hot", "logits"])
@pytest.mark.usefixtures("log1p")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning:triton")
def test_each_launch_leaves_the_bits_of_the_kernel(mode, vocab, steps, draft_logits):
    """With draft logits the interpreter cannot run _resample: see the fixture log1p."""
    arguments = scenario(vocab, vocab, steps, draft_logits=draft_logits)
    num_logits = len(arguments["pos"])
    _, num_sampled, launches = sample(arguments, **MODES[mode](num_logits, steps))
    names = [launch.kernel.removeprefix(MODULE + ".") for launch in launches]
    assert set(names) >= {f"{name}_kernel" for name in ALWAYS}
    assert any("cumulative" in name for name in names) == ("block" in mode)
    for launch in launches:
        check(launch)
    num_drafts = arguments["cu_num_logits"].diff() - 1
    accepted = num_sampled - 1
    assert (accepted > 0).any(), "no draft was accepted"
    assert (accepted < num_drafts).any(), "none was rejected"


@pytest.mark.parametrize("mode", ["token", "block"])
@pytest.mark.usefixtures("log1p")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning:triton")
def test_bfloat16_logits_leave_the_bits_of_the_kernel(mode):
    arguments = scenario(1, 300, 2, draft_logits=True)
    for name in ("target_logits", "draft_logits"):
        arguments[name] = arguments[name].bfloat16()
    _, _, launches = sample(arguments, **MODES[mode](len(arguments["pos"]), 2))
    for launch in launches:
        check(launch)


@pytest.mark.parametrize("mode", ["token", "block"])
@pytest.mark.parametrize("draft_logits", [False, True], ids=["one-hot", "logits"])
def test_what_is_sampled_follows_the_target_whatever_the_draft(draft_logits, mode):
    """The first token of 20,000 requests against softmax of the target, by chi-square.

    Independent of the interpreter, which cannot run the residual with draft logits.
    Losslessness: Leviathan et al., appendix A.1.
    """
    count, vocab, steps = 20_000, 8, 2
    generator = torch.Generator().manual_seed(5)
    target = torch.randn(steps + 1, vocab, generator=generator)
    draft = torch.randn(steps, vocab, generator=generator)
    temperature = 0.8
    proposal = (draft / temperature).softmax(-1)
    if not draft_logits:
        proposal = torch.full_like(proposal, 1 / vocab)
    tokens = torch.stack(
        [p.multinomial(count, replacement=True, generator=generator) for p in proposal]
    )
    fed = torch.cat([torch.zeros(1, count, dtype=torch.int64), tokens])
    slot = torch.arange(count, dtype=torch.int32)
    local_pos = torch.arange(steps + 1, dtype=torch.int32)
    sampled, num_sampled, _ = sample(
        {
            "target_logits": target.div(temperature).repeat(count, 1),
            "draft_logits": draft.repeat(count, 1, 1) if draft_logits else None,
            "draft_sampled": fed.T.reshape(-1).int(),
            "cu_num_logits": torch.arange(count + 1, dtype=torch.int32) * (steps + 1),
            "pos": 7 + local_pos.long().repeat(count),
            "idx_mapping": slot,
            "expanded_idx_mapping": slot.repeat_interleave(steps + 1),
            "expanded_local_pos": local_pos.repeat(count),
            "temperature": torch.full((count,), temperature),
            "seed": torch.arange(count),
            "num_speculative_steps": steps,
        },
        use_block_verification=mode == "block",
    )
    assert (num_sampled == 1).any()
    assert (num_sampled == steps + 1).any()
    probabilities = (target / temperature).softmax(-1)
    assert p_value(sampled[:, 0], probabilities[0]) > 0.01
    assert p_value(sampled[num_sampled > 1, 1], probabilities[1]) > 0.01


def test_a_request_without_drafts_draws_its_bonus_token():
    arguments = scenario(0, 50, 2, draft_logits=False, temperatures=(0.0,))
    sampled, num_sampled, _ = sample(arguments)
    bounds = arguments["cu_num_logits"].tolist()
    assert bounds[3] - bounds[2] == 1
    assert num_sampled[2] == 1
    assert sampled[2, 0] == arguments["target_logits"][bounds[2]].argmax()


def test_greedy_accepts_the_argmax_and_replaces_the_first_other():
    arguments = scenario(0, 50, 2, draft_logits=False, temperatures=(0.0,))
    target, bounds = arguments["target_logits"], arguments["cu_num_logits"].tolist()
    best = target.argmax(-1)
    first = bounds[1]
    arguments["draft_sampled"][first + 1] = best[first]
    arguments["draft_sampled"][first + 2] = (best[first + 1] + 1) % 50
    sampled, num_sampled, _ = sample(arguments)
    assert num_sampled[1] == 2
    assert sampled[1, :2].tolist() == best[first : first + 2].tolist()


def test_a_placeholder_ends_the_walk():
    arguments = scenario(0, 50, 2, draft_logits=True)
    arguments["draft_sampled"][1:] = -1
    _, num_sampled, _ = sample(arguments)
    assert num_sampled.tolist() == [1] * len(num_sampled)
