"""vLLM with the bridge against transformers' DeepseekV4ForCausalLM, eager, float32, on the same checkpoint."""

from dataclasses import dataclass

import pytest
import torch
from conftest import SMALL, prompt, running

from atom_vllm_bridge.checkpoint.make import make

LENGTHS = (24, 200, 600, 3000)
NEW = 64


@dataclass
class Reference:
    """transformers' answer to one prompt.

    Attributes:
        tokens: greedy continuation.
        logprobs: [prompt + new, V] float32, of the next token at each position.
    """

    tokens: list[int]
    logprobs: torch.Tensor


def transformers_says(checkpoint, prompts, new=NEW) -> list[Reference]:
    """Greedy tokens and the log-probabilities of every position, prompt and continuation."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    ).float()
    references = []
    with torch.inference_mode():
        for ids in prompts:
            given = torch.tensor([ids])
            whole = model.generate(
                given,
                attention_mask=torch.ones_like(given),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                pad_token_id=0,
            )
            logprobs = model(whole[:, :-1]).logits[0].log_softmax(-1)
            references.append(Reference(whole[0, len(ids) :].tolist(), logprobs))
    return references


def bridge_says(checkpoint, prompts, new=NEW, **options):
    with running(checkpoint, max_logprobs=20, **options) as engine:
        return [
            engine.generate([ids], max_tokens=new, logprobs=20, prompt_logprobs=20)[0]
            for ids in prompts
        ]


def compare(answer, reference, length) -> tuple[float, float, float]:
    """Largest and mean |Δ log-probability| over every position's 20 likeliest tokens, and the share of equal argmaxes."""
    steps = answer.prompt_logprobs + answer.logprobs
    same = next(
        (
            step
            for step in range(len(answer.tokens))
            if answer.tokens[step] != reference.tokens[step]
        ),
        len(answer.tokens),
    )
    deltas, agree = [], []
    for position, step in enumerate(steps[: length + same]):
        expected = reference.logprobs[position]
        ids = torch.tensor(list(step))
        deltas.append((torch.tensor(list(step.values())) - expected[ids]).abs())
        agree.append(max(step, key=step.__getitem__) == int(expected.argmax()))
    flat = torch.cat(deltas)
    return float(flat.max()), float(flat.mean()), sum(agree) / len(agree)


@pytest.fixture(scope="module")
def tiny_reference(tiny_checkpoint):
    prompts = [prompt(length, seed=length) for length in LENGTHS]
    return prompts, transformers_says(tiny_checkpoint, prompts)


@pytest.mark.parametrize("layout", ["mxfp4", "bf16"])
def test_float32_gives_the_reference_to_a_thousandth(
    layout, tiny_checkpoint, tiny_reference, tmp_path
):
    """The bf16 layout of a seed holds the dequantised values of mxfp4, so that one reference serves both."""
    prompts, references = tiny_reference
    checkpoint = (
        tiny_checkpoint if layout == "mxfp4" else make(tmp_path / "c", layout=layout)
    )
    answers = bridge_says(checkpoint, prompts, kv_cache_memory_bytes=1 << 29)
    for answer, reference, ids in zip(answers, references, prompts, strict=True):
        worst, mean, _ = compare(answer, reference, len(ids))
        print(f"{layout} {len(ids)}: max {worst:.1e}, mean {mean:.1e}")
        assert answer.tokens == reference.tokens
        assert worst <= 1e-3


def test_all_fp8_gives_the_reference_to_a_thousandth(tmp_path):
    checkpoint = make(tmp_path / "c", layout="fp8", draft="none")
    prompts = [prompt(length, seed=length) for length in LENGTHS[:3]]
    references = transformers_says(checkpoint, prompts)
    answers = bridge_says(checkpoint, prompts, kv_cache_memory_bytes=1 << 29)
    for answer, reference, ids in zip(answers, references, prompts, strict=True):
        worst, mean, _ = compare(answer, reference, len(ids))
        print(f"fp8 {len(ids)}: max {worst:.1e}, mean {mean:.1e}")
        assert answer.tokens == reference.tokens
        assert worst <= 1e-3


def test_bfloat16_stays_within_its_rounding(tiny_checkpoint, tiny_reference):
    prompts, references = tiny_reference
    answers = bridge_says(
        tiny_checkpoint, prompts, dtype="bfloat16", kv_cache_memory_bytes=1 << 29
    )
    check_rounding("bfloat16", answers, references, prompts, mean=0.06, agreement=0.97)


def test_fp8_cache_stays_within_its_rounding(tiny_checkpoint, tiny_reference):
    """e4m3 keeps 3 bits of mantissa: a relative error of at most 2⁻⁴ on each of 448 values (of 512) of each row.

    Those errors are independent and enter through dot products over hundreds of rows, so that they average out: over
    bfloat16 (8 bits, 2⁻⁹) the mean grows by less than the mean of bfloat16 itself.
    """
    prompts, references = tiny_reference
    answers = bridge_says(
        tiny_checkpoint,
        prompts,
        kv_cache_dtype="fp8",
        kv_cache_memory_bytes=1 << 29,
    )
    check_rounding("fp8 cache", answers, references, prompts, mean=0.06, agreement=0.97)


def check_rounding(name, answers, references, prompts, *, mean, agreement):
    """Over prompt positions: each prompt's mean, and the argmaxes of all of them together."""
    agreed = total = 0.0
    for answer, reference, ids in zip(answers, references, prompts, strict=True):
        prompt_only = len(ids) - 1
        answer.prompt_logprobs = answer.prompt_logprobs[:prompt_only]
        answer.logprobs = answer.logprobs[:1]
        worst, found, share = compare(answer, reference, len(ids))
        print(f"{name} {len(ids)}: max {worst:.1e}, mean {found:.1e}, {share:.1%}")
        assert found <= mean
        agreed += share * len(ids)
        total += len(ids)
    assert agreed / total >= agreement


def test_the_clamp_of_swiglu_bites_and_agrees(tmp_path):
    """Gate and up inputs far beyond swiglu_limit, in routed and shared experts."""
    gains = {"w1.weight": 40.0, "w3.weight": 40.0}
    checkpoint = make(
        tmp_path / "c", layout="bf16", draft="none", overrides=SMALL, gains=gains
    )
    prompts = [prompt(200, seed=1)]
    (reference,) = transformers_says(checkpoint, prompts)
    (answer,) = bridge_says(checkpoint, prompts)
    worst, _, _ = compare(answer, reference, 200)
    assert answer.tokens == reference.tokens
    assert worst <= 1e-3
    unclamped = make(
        tmp_path / "u",
        layout="bf16",
        draft="none",
        overrides=SMALL | {"swiglu_limit": 1e9},
        gains=gains,
    )
    (other,) = transformers_says(unclamped, prompts, new=1)
    assert (other.logprobs[:200] - reference.logprobs[:200]).abs().max() > 0.1


@pytest.mark.parametrize("topk", [16, 512, 1024])
def test_contexts_beyond_what_the_indexer_keeps_agree(topk, tmp_path):
    """More than 4 × index_topk tokens: the indexer chooses, and must choose as the reference does."""
    checkpoint = make(
        tmp_path / "c",
        layout="bf16",
        draft="none",
        overrides=SMALL | {"index_topk": topk},
    )
    length = 4 * topk + 300
    prompts = [prompt(length, seed=topk)]
    (reference,) = transformers_says(checkpoint, prompts, new=16)
    (answer,) = bridge_says(checkpoint, prompts, new=16, max_model_len=8192)
    worst, mean, _ = compare(answer, reference, length)
    print(f"index_topk {topk}, {length} tokens: max {worst:.1e}, mean {mean:.1e}")
    assert answer.tokens == reference.tokens
    assert worst <= 1e-3
