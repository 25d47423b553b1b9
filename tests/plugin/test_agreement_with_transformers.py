"""vLLM with the bridge against transformers' DeepseekV4ForCausalLM, eager, float32, on the same checkpoint."""

from dataclasses import dataclass

import pytest
import torch
from engines import SMALL, prompt, running
from torch.utils._python_dispatch import TorchDispatchMode

from atom_vllm_bridge.checkpoint.make import make

LENGTHS = (24, 200, 600, 3000)
NEW = 64
# Index scores closer than this are equal in float32, and either entry may be selected.
TIE = 1e-6


class SelectionGaps(TorchDispatchMode):
    """Watches the reference's indexer: how far its last selected score lies above the first that it leaves out."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k, self.smallest = k, None

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if (
            function is torch.ops.aten.topk.default
            and args[1] == self.k
            and args[0].shape[-1] > self.k
        ):
            best = function(args[0], self.k + 1)[0][0]
            gap = torch.nan_to_num(best[:, -2] - best[:, -1], nan=torch.inf)
            self.smallest = (
                gap if self.smallest is None else torch.minimum(self.smallest, gap)
            )
        return function(*args, **(kwargs or {}))


@dataclass
class Reference:
    """transformers' answer to one prompt.

    Attributes:
        tokens: greedy continuation.
        logprobs: [prompt + new, V] float32, of the next token at each position.
        tied: [prompt + new] bool, positions at which the indexer of some layer chose between equal scores.
    """

    tokens: list[int]
    logprobs: torch.Tensor
    tied: torch.Tensor


def transformers_says(checkpoint, prompts, new=NEW) -> list[Reference]:
    """Greedy tokens and the log-probabilities of every position, prompt and continuation."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    # By name: vLLM registers a configuration class of its own for AutoConfig.
    model = DeepseekV4ForCausalLM.from_pretrained(
        checkpoint,
        config=DeepseekV4Config.from_pretrained(checkpoint),
        dtype=torch.float32,
        attn_implementation="eager",
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
            with SelectionGaps(model.config.index_topk) as gaps:
                logprobs = model(whole[:, :-1]).logits[0].log_softmax(-1)
            tied = torch.zeros(len(logprobs), dtype=torch.bool)
            if gaps.smallest is not None:
                tied = gaps.smallest < TIE
            references.append(Reference(whole[0, len(ids) :].tolist(), logprobs, tied))
    return references


def bridge_says(checkpoint, prompts, new=NEW, **options):
    with running(checkpoint, max_logprobs=20, **options) as engine:
        return [
            engine.generate([ids], max_tokens=new, logprobs=20, prompt_logprobs=20)[0]
            for ids in prompts
        ]


@dataclass
class Agreement:
    """Over every position's 20 likeliest tokens.

    Attributes:
        worst: largest |Δ log-probability| where the indexer had a choice to make, or none to make.
        mean: over all positions.
        argmax: share of positions with the same likeliest token.
        tied: positions at which the reference's indexer chose between equal scores.
        worst_tied: largest |Δ| at those.
    """

    worst: float
    mean: float
    argmax: float
    tied: int
    worst_tied: float


def compare(answer, reference) -> Agreement:
    """Prompt and continuation, up to the first differing token."""
    steps = (answer.prompt_logprobs or []) + answer.logprobs
    pairs = list(zip(answer.tokens, reference.tokens, strict=False))
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs) - 1)
    length = len(steps) - len(answer.logprobs)
    worst, total, agree = [], [], 0
    for position, step in enumerate(steps[: length + same + 1]):
        expected = reference.logprobs[position]
        ids = torch.tensor(list(step))
        delta = (torch.tensor(list(step.values())) - expected[ids]).abs()
        worst.append(float(delta.max()))
        total.append(float(delta.mean()))
        agree += max(step, key=step.__getitem__) == int(expected.argmax())
    tied = reference.tied[: len(worst)]
    worst = torch.tensor(worst)
    return Agreement(
        worst=float(worst[~tied].max()),
        mean=sum(total) / len(total),
        argmax=agree / len(total),
        tied=int(tied.sum()),
        worst_tied=float(worst[tied].max()) if tied.any() else 0.0,
    )


def check_exact(name, answers, references):
    """float32: every greedy token, every log-probability to a thousandth, ties of the indexer counted and bounded."""
    for answer, reference in zip(answers, references, strict=True):
        found = compare(answer, reference)
        print(f"{name} {len(answer.prompt_logprobs) + 1} tokens: {found}")
        assert answer.tokens == reference.tokens
        assert found.worst <= 1e-3
        assert found.worst_tied <= 2e-2
        assert found.tied <= 0.01 * len(reference.logprobs)


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
    check_exact(layout, answers, references)


def test_all_fp8_gives_the_reference_to_a_thousandth(tmp_path):
    checkpoint = make(tmp_path / "c", layout="fp8", draft="none")
    prompts = [prompt(length, seed=length) for length in LENGTHS]
    references = transformers_says(checkpoint, prompts)
    answers = bridge_says(checkpoint, prompts, kv_cache_memory_bytes=1 << 29)
    check_exact("fp8", answers, references)


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
        answer.logprobs, answer.tokens = answer.logprobs[:1], answer.tokens[:1]
        found = compare(answer, reference)
        print(f"{name} {len(ids)} tokens: {found}")
        assert found.mean <= mean
        agreed += found.argmax * len(ids)
        total += len(ids)
    assert agreed / total >= agreement


def test_the_clamp_of_swiglu_bites_and_agrees(tmp_path):
    """Gate and up inputs far beyond swiglu_limit, in routed and shared experts."""
    gains = {"w1": 40.0, "w3": 40.0}
    checkpoint = make(
        tmp_path / "c", layout="bf16", draft="none", overrides=SMALL, gains=gains
    )
    prompts = [prompt(200, seed=1)]
    (reference,) = transformers_says(checkpoint, prompts)
    check_exact("clamped", bridge_says(checkpoint, prompts), [reference])
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
    references = transformers_says(checkpoint, prompts, new=16)
    answers = bridge_says(checkpoint, prompts, new=16, max_model_len=8192)
    check_exact(f"index_topk {topk}", answers, references)
