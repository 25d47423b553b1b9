"""The forward against transformers' own DeepSeek-V4, in float32 and eagerly."""

from functools import cache

import pytest
import torch
import transformers.models.deepseek_v4.modeling_deepseek_v4 as theirs
from harness import VOCABULARY, checkpoint, chunked, model, one_shot, tokens
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

CLAMPED = (("w1", 12.0), ("w3", 12.0))


@cache
def oracle(directory):
    # By name: vLLM, once imported, has registered a configuration class of its own.
    return DeepseekV4ForCausalLM.from_pretrained(
        directory,
        config=DeepseekV4Config.from_pretrained(directory),
        dtype=torch.float32,
        attn_implementation="eager",
    ).eval()


class Ties:
    """Positions at which transformers' indexer chose between scores that float32 cannot tell apart.

    Which of two equal entries is taken is nobody's mistake, so these positions (and only these) are left out.
    """

    def __init__(self, monkeypatch):
        self.positions: set[int] = set()
        score = theirs.DeepseekV4IndexerScorer.forward
        forward = theirs.DeepseekV4Indexer.forward
        scores = []

        def record(module, *args, **kwargs):
            scores.append(score(module, *args, **kwargs))
            return scores[-1]

        def select(module, *args, **kwargs):
            chosen = forward(module, *args, **kwargs)
            scored, k = scores.pop()[0], module.index_topk
            if scored.shape[1] > k:
                seen = (torch.arange(len(scored)) + 1) // module.compress_rate
                entry = torch.arange(scored.shape[1])
                scored = scored.masked_fill(entry >= seen[:, None], -torch.inf)
                best = scored.topk(k + 1).values
                near = best[:, k - 1] - best[:, k] <= 2e-6 * best[:, 0].abs()
                self.positions |= set((near & (seen > k)).nonzero().flatten().tolist())
            return chosen

        monkeypatch.setattr(theirs.DeepseekV4IndexerScorer, "forward", record)
        monkeypatch.setattr(theirs.DeepseekV4Indexer, "forward", select)


@torch.inference_mode()
def reference(directory, ids):
    return oracle(directory)(ids[None]).logits[0].log_softmax(-1)


@pytest.mark.parametrize("length", [1, 3, 24, 200, 600, 3000])
def test_prompts_agree(length, monkeypatch):
    directory, ids = checkpoint(), tokens(length, seed=length)
    ties = Ties(monkeypatch)
    want = reference(directory, ids)
    got = one_shot(model(directory), ids)
    kept = [p for p in range(length) if p not in ties.positions]
    # A query may also attend to a neighbour that chose differently, hence not exactly the rounding.
    assert len(kept) >= 0.99 * length
    assert (got - want)[kept].abs().max() <= 1e-3
    assert torch.equal(got[kept].argmax(-1), want[kept].argmax(-1))


def test_decoding_agrees_token_by_token():
    directory, ids = checkpoint(), tokens(150, seed=5)
    got = chunked(model(directory), ids, [130, *range(131, 150)])
    assert (got - reference(directory, ids)).abs().max() <= 1e-3


@pytest.mark.parametrize(
    "overrides",
    [
        {"compress_ratios": (0, 0, 0, 0, 0), "num_hash_layers": 5},
        {"compress_ratios": (4, 4, 4, 4, 4), "num_hash_layers": 0},
        {"compress_ratios": (128, 128, 128, 128, 128), "hc_mult": 2},
        {"index_topk": 1, "sliding_window": 4, "o_groups": 4},
        {"head_dim": 48, "qk_rope_head_dim": 16, "n_routed_experts": 7},
    ],
    ids=str,
)
def test_dimensions_come_from_the_config(overrides, monkeypatch):
    directory, ids = checkpoint(**overrides), tokens(300, seed=9)
    ties = Ties(monkeypatch)
    want = reference(directory, ids)
    got = one_shot(model(directory), ids)
    kept = [p for p in range(300) if p not in ties.positions]
    assert len(kept) >= 285
    assert (got - want)[kept].abs().max() <= 1e-3


def test_swiglu_clamp_bites_where_weights_are_large():
    ids = tokens(200, seed=3)
    clamped, free = (
        checkpoint(gains=CLAMPED, swiglu_limit=limit) for limit in (10.0, 1e9)
    )
    want = reference(clamped, ids)
    assert (want - reference(free, ids)).abs().max() > 0.05
    assert (one_shot(model(clamped), ids) - want).abs().max() <= 1e-3


def test_bfloat16_is_as_close_as_bfloat16_can_be():
    directory, ids = checkpoint(), tokens(600, seed=4)
    want = reference(directory, ids)
    got = one_shot(model(directory, torch.bfloat16), ids)
    assert (got - want).abs().mean() <= 0.06
    assert (got.argmax(-1) == want.argmax(-1)).float().mean() >= 0.97


def test_fp8_cache_costs_no_more_than_its_three_fraction_bits():
    """Keys are off by up to 1/16 of each value, so log-probabilities by a few hundredths on average."""
    directory, ids = checkpoint(), tokens(600, seed=4)
    want = reference(directory, ids)
    got = one_shot(model(directory, codec="fp8"), ids)
    error = (got - want).abs()
    assert 1e-5 < error.mean() <= 0.05
    assert (got.argmax(-1) == want.argmax(-1)).float().mean() >= 0.95


def test_the_vocabulary_is_reached():
    ids = tokens(600, seed=4)
    assert ids.unique().numel() > 0.9 * VOCABULARY
