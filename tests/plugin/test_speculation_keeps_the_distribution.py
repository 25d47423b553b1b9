"""Drafts do not bend what is sampled at temperature 1: the tokens have the target's distribution, and the drafts have another."""

import json
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from drafts import Watch, watching
from engines import SHALLOW, prompt, running

from atom_vllm_bridge.models.deepseek_v4.config import DeepseekV4Config
from atom_vllm_bridge.models.deepseek_v4.loading import iterate, load
from atom_vllm_bridge.models.deepseek_v4.local_state import LocalState
from atom_vllm_bridge.models.deepseek_v4.model import DeepseekV4Model

VOCABULARY = 32
DIMENSIONS = SHALLOW | {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 32,
    "o_lora_rank": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "index_n_heads": 8,
    "index_head_dim": 16,
}
# Fewer than 20 % of flatter drafts would be accepted where they are not sampled.
GAINS = {"head": 3.0}
# The drafts are for positions 3 and 4, on both sides of an entry of 4 tokens.
PROMPT = prompt(2, 1, VOCABULARY)
TOKENS = 3
DRAFTS = 2
REQUESTS = 5000


covers = partial(
    pytest.mark.covers,
    caching="off",
    layout="paged",
    scheduling="async",
    graphs="none",
    ranks="one",
    kv="float32",
)


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=covers(spec=name)) for name in ("dspark", "mtp")],
)
def method(request):
    return request.param


@pytest.fixture(scope="module")
def checkpoint(method, tmp_path_factory):
    from atom_vllm_bridge.checkpoint.make import make

    own = {"n_mtp_layers": 2, "dspark_markov_rank": 16} if method == "dspark" else {}
    return make(
        tmp_path_factory.mktemp("checkpoints") / method,
        preset="agreeing",
        layout="bf16",
        draft=method,
        overrides=DIMENSIONS | own,
        gains=GAINS,
        tokenizer=False,
    )


@pytest.fixture(scope="module")
def target(checkpoint):
    return joint(checkpoint)


@torch.inference_mode()
def joint(checkpoint) -> torch.Tensor:
    """[V, V, V] float64, the probability of every three tokens after the prompt, by the model alone."""
    hf = json.loads((checkpoint / "config.json").read_text())
    config = DeepseekV4Config.from_hf(hf)
    model = DeepseekV4Model(config, dtype=torch.float32)
    load(
        model.weight_slots(),
        iterate(checkpoint, progress=False),
        ignore=lambda name: name.startswith("mtp."),
    )
    v, length = VOCABULARY, len(PROMPT) + TOKENS - 1
    # One request for each pair that may come first.
    pairs = torch.cartesian_prod(torch.arange(v), torch.arange(v))
    ids = torch.cat((torch.tensor(PROMPT).expand(len(pairs), -1), pairs), 1)
    state = LocalState(config, len(pairs), length, model.codec)
    batch, caches = state.step([(r, 0, length) for r in range(len(pairs))])
    streams, _ = model(ids.flatten(), batch, caches)
    logits = model.logits(model.reduce(streams)).double()
    chance = logits.softmax(-1).view(v, v, length, v)[:, :, -TOKENS:]
    # Request (a, b) tells the chance of a first token, of one after a, and of one after a and b.
    first, second, third = chance[0, 0, 0], chance[:, 0, 1], chance[:, :, 2]
    return first[:, None, None] * second[:, :, None] * third


def p_value(draws: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Pearson's chi-square test: how likely cells [n] fit probabilities [C] no better than these do.

    Cells expected fewer than five times are one cell, for which the approximation holds.
    """
    probabilities = probabilities.flatten()
    observed = draws.bincount(minlength=len(probabilities)).double()
    expected = probabilities * len(draws)
    rare = expected < 5
    observed, expected = (
        torch.cat((x[~rare], x[rare].sum().unsqueeze(0))) for x in (observed, expected)
    )
    kept = expected >= 5
    observed, expected = observed[kept], expected[kept]
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor(len(expected) - 1).double()
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


def marginal(probabilities: torch.Tensor, *tokens: int) -> torch.Tensor:
    """Of the tokens of these places alone."""
    others = [place for place in range(TOKENS) if place not in tokens]
    return probabilities.sum(others) if others else probabilities


def cells(draws: torch.Tensor, *tokens: int) -> torch.Tensor:
    """[n, TOKENS] → [n], the cell of `marginal` into which each draw falls."""
    cell = torch.zeros(len(draws), dtype=torch.int64)
    for place in tokens:
        cell = cell * VOCABULARY + draws[:, place]
    return cell


@pytest.mark.parametrize("sampled", ["greedy", "probabilistic"])
def test_what_is_sampled_has_the_target_s_distribution(
    sampled, method, checkpoint, target
):
    """Drafts are the draft's likeliest token, or sampled from its distribution; the target's is kept either way."""
    check(checkpoint, target, method, draft_sample_method=sampled)


@covers(spec="adaptive")
@pytest.mark.parametrize("method", ["dspark"], scope="module")
def test_a_budget_of_drafts_keeps_the_distribution(method, checkpoint, target):
    """Which drafts are verified hangs on what was drafted, and so on the tokens before, but not on their verdict."""
    watch, verified = check(
        checkpoint, target, method, enable_adaptive_verification=True
    )
    offered = sum(row.drafts for row in watch.rows)
    print(f"{verified} of {offered} drafts verified")
    assert 0.2 * offered < verified < 0.9 * offered


def check(checkpoint, target, method, **drafting) -> tuple[Watch, int]:
    """Sample, and compare with the target's distribution; the steps, and how many drafts were verified."""
    from vllm import SamplingParams

    with running(
        checkpoint,
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_seqs=1024,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
        speculative_config={
            "method": method,
            "num_speculative_tokens": DRAFTS,
            **drafting,
        },
    ) as engine:
        params = SamplingParams(
            n=REQUESTS,
            temperature=1.0,
            seed=20000,
            max_tokens=TOKENS,
            ignore_eos=True,
            detokenize=False,
        )
        if adaptive := engine.runner.adaptive_verification:
            # A full batch of 1,024 requests has room for a quarter of its drafts; more would cost too much.
            draft, verify = adaptive.cost_tables
            tokens = np.arange(len(verify))
            adaptive.cost_tables = draft, np.where(tokens <= 1536, 1.0, 1000.0)
        verified = []
        preprocess = engine.runner.model_state.preprocess_state

        def noting(batch, *args):
            verified.append(batch.num_draft_tokens)
            preprocess(batch, *args)

        engine.runner.model_state.preprocess_state = noting
        with watching(engine) as watch:
            engine.asked.append(engine.features)
            (output,) = engine.llm.generate(
                [{"prompt_token_ids": PROMPT}], params, use_tqdm=False
            )
    draws = torch.tensor([list(one.token_ids) for one in output.outputs])
    assert draws.shape == (REQUESTS, TOKENS)
    fits = {
        tokens: p_value(cells(draws, *tokens), marginal(target, *tokens))
        for tokens in [(0,), (1,), (2,), *pairwise(range(TOKENS))]
    }
    # What is proposed for the second token, after the prompt has given the first.
    prefills = [row for row in watch.rows if row.prefilling and row.sampled]
    drafted = torch.tensor([row.proposed[0] for row in prefills])
    draft_fits = p_value(drafted, marginal(target, 1))
    print(
        f"\n{method}, {drafting}: {watch.acceptance():.0%} accepted; p of tokens "
        + ", ".join(f"{tokens} {p:.2f}" for tokens, p in fits.items())
        + f"; of the drafts {draft_fits:.0e}"
    )
    assert 0.2 < watch.acceptance() < 0.8
    assert len(drafted) == REQUESTS
    assert min(fits.values()) > 0.01
    assert draft_fits < 1e-6
    return watch, sum(verified)
