"""Temperature and Gumbel-max sampling against the interpreted kernels."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.worker.gpu.sample import gumbel as upstream

from .chi_square import p_value
from .harness import check
from .recording import record

MODULE = "vllm.v1.worker.gpu.sample.gumbel"
SAMPLE = f"{MODULE}._gumbel_sample_kernel"
TEMPERATURE = f"{MODULE}._temperature_kernel"
SLOTS = 6


def batch(rows, vocab, seed, dtype=torch.float32):
    """Logits in rows with a gap, and the arguments of gumbel_sample."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab + 3, generator=generator).mul(4).to(dtype)
    logits = logits[:, :vocab]
    temperatures = torch.tensor([0.0, 1.0, 0.7, 1e-3, 25.0])
    mapping = torch.randint(-1, SLOTS, (rows,), generator=generator).int()
    mapping[0] = -1 if rows > 1 else 0
    return {
        "logits": logits,
        "expanded_idx_mapping": mapping,
        "temperature": temperatures[torch.randint(5, (SLOTS,), generator=generator)],
        "seed": torch.randint(-(2**63), 2**63 - 1, (SLOTS,), generator=generator),
        "pos": torch.randint(2**31, (rows,), generator=generator),
    }


def sample(arguments, **options):
    """gumbel_sample through the stand-in: (sampled [rows], launches)."""
    given = {"apply_temperature": False, "is_drafting": False} | arguments | options
    result = []
    launches = record(lambda: result.append(upstream.gumbel_sample(**given)), SAMPLE)
    return result[0], launches


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 4),
    vocab=st.sampled_from([1, 7, 1023, 1024, 1025, 2100]),
    seed=st.integers(0, 1000),
    use_fp64=st.booleans(),
    is_drafting=st.booleans(),
    apply_temperature=st.booleans(),
)
def test_sampling_leaves_the_bits_of_the_kernel(rows, vocab, seed, **options):
    """Padding (−1), greedy and seeded rows mixed; blocks of 1024 whole and in part."""
    _, launches = sample(batch(rows, vocab, seed), **options)
    (launch,) = launches
    check(launch)


@pytest.mark.parametrize("use_fp64", [False, True])
def test_the_noise_of_every_token_has_the_bits_of_the_kernel(use_fp64):
    """In blocks of one token each maximum is one token's score."""
    vocab = 500
    arguments = batch(1, vocab, seed=9)
    arguments["temperature"][:] = 1.0
    (launch,) = sample(arguments, use_fp64=use_fp64)[1]
    scores = torch.zeros(1, vocab, dtype=launch.arguments["local_max_ptr"].dtype)
    changes = {
        "local_argmax_ptr": torch.zeros(1, vocab, dtype=torch.int64),
        "local_argmax_stride": vocab,
        "local_max_ptr": scores,
        "local_max_stride": vocab,
        "BLOCK_SIZE": 1,
    }
    check(replace(launch, grid=(1, vocab), arguments=launch.arguments | changes))


@pytest.mark.parametrize("use_fp64", [False, True])
def test_masked_rows_leave_the_bits_of_the_kernel(use_fp64):
    arguments = batch(5, 1500, seed=3)
    logits = arguments["logits"]
    logits[1, :1024] = -torch.inf
    logits[2] = -torch.inf
    logits[3, ::2] = torch.nan
    logits[4, :3] = 90.0
    arguments["expanded_idx_mapping"][:] = torch.arange(5)
    arguments["temperature"][:5] = torch.tensor([1.0, 0.5, 1.0, 2.0, 0.0])
    check(sample(arguments, use_fp64=use_fp64)[1][0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("per_token", [False, True])
def test_the_logits_are_cached_before_temperature(per_token, dtype):
    arguments = batch(4, 1030, seed=7, dtype=dtype)
    mapping = torch.tensor([3, -1, 0, 5])
    arguments["expanded_idx_mapping"] = mapping.int()
    cache = torch.zeros(SLOTS, 3, 1040, dtype=dtype)
    column = torch.tensor([2, 0, 1, 1]) if per_token else torch.tensor(1)
    options = {"logits_cache": cache, "logits_cache_col": column}
    _, launches = sample(arguments, apply_temperature=True, **options)
    after = check(launches[0])["logits_cache_ptr"]
    expected = torch.zeros_like(cache)
    for row, slot in enumerate(mapping.tolist()):
        if slot >= 0:
            at = int(column[row]) if per_token else 1
            expected[slot, at, :1030] = arguments["logits"][row]
    assert torch.equal(after, expected)


def test_a_seed_gives_the_same_token_in_any_batch():
    arguments = batch(4, 1500, seed=1)
    arguments["expanded_idx_mapping"] = torch.arange(4).int()
    arguments["temperature"][:] = 1.3
    together, _ = sample(arguments)
    for row in range(4):
        alone = arguments | {
            name: arguments[name][row : row + 1]
            for name in ("logits", "expanded_idx_mapping", "pos")
        }
        assert sample(alone)[0].item() == together[row]


@pytest.mark.parametrize("use_fp64", [False, True])
def test_sampling_follows_softmax(use_fp64):
    """40,000 seeds at temperature 1 against softmax, by chi-square."""
    count, vocab = 40_000, 40
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(0))
    sampled, _ = sample(
        {
            "logits": logits.repeat(count, 1),
            "expanded_idx_mapping": torch.arange(count).int(),
            "temperature": torch.ones(count),
            "seed": torch.arange(count) * 7919,
            "pos": torch.full((count,), 11),
        },
        use_fp64=use_fp64,
    )
    assert p_value(sampled, logits.softmax(-1)) > 0.01


def test_positions_of_one_request_draw_independently():
    """Pairs of tokens at adjacent positions against the product of probabilities."""
    count, vocab = 40_000, 4
    logits = torch.tensor([0.0, 0.5, 1.0, -0.5])
    sampled, _ = sample(
        {
            "logits": logits.repeat(count, 1),
            "expanded_idx_mapping": torch.zeros(count).int(),
            "temperature": torch.ones(1),
            "seed": torch.tensor([42]),
            "pos": torch.arange(count),
        }
    )
    pairs = sampled[::2] * vocab + sampled[1::2]
    p = logits.softmax(-1)
    assert p_value(pairs, torch.outer(p, p).flatten()) > 0.01


def test_a_draft_draws_other_noise_than_its_verification():
    many = {
        "logits": torch.zeros(64, 1024),
        "expanded_idx_mapping": torch.zeros(64).int(),
        "temperature": torch.ones(1),
        "seed": torch.tensor([2]),
        "pos": torch.arange(64),
    }
    verified, _ = sample(many)
    drafted, _ = sample(many, is_drafting=True)
    assert (verified == drafted).sum() < 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "temperatures", [(0.5, 2.0, 0.3), (0.0, 1.0, 0.7), (1.0, 1.0, 0.0)]
)
def test_temperature_leaves_the_bits_of_the_kernel(temperatures, dtype):
    logits = batch(4, 8200, seed=5, dtype=dtype)["logits"]
    logits[1, 17] = -torch.inf
    mapping = torch.tensor([2, 0, 1, 2]).int()
    launches = record(
        lambda: upstream.apply_temperature(logits, mapping, torch.tensor(temperatures)),
        TEMPERATURE,
    )
    check(launches[0])


def test_temperature_rounds_bfloat16_to_nearest():
    """As a GPU does; the interpreter truncates, so torch is the oracle."""
    logits = batch(2, 500, seed=6, dtype=torch.bfloat16)["logits"]
    temperature = torch.tensor([0.7, 1.0])
    expected = logits.clone()
    expected[0] = (logits[0].float() / 0.7).bfloat16()
    record(
        lambda: upstream.apply_temperature(
            logits, torch.tensor([0, 1]).int(), temperature
        ),
        TEMPERATURE,
    )
    assert torch.equal(logits, expected)
