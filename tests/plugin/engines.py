"""Engines in this process, and the rule by which two runs are the same."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
)

import torch

# All three attention kinds, hash and noaux layers, in dimensions at which thousands of tokens cost seconds.
SMALL = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 64,
    "o_groups": 2,
    "o_lora_rank": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    # With few heads many entries score exactly 0 (every relu at 0), and equal scores may be selected in any order.
    "index_n_heads": 32,
    "index_head_dim": 32,
    "index_topk": 16,
    "max_position_embeddings": 32768,
}
TOLERANCE = 1e-3


@dataclass
class Answer:
    """What one request gave.

    Attributes:
        tokens: generated ids.
        logprobs: at each generated token, id → log-probability of the likeliest.
        cached: prompt tokens that a prefix hit spared.
        prompt_logprobs: at each prompt token but the first, id → log-probability; None if not asked for.
    """

    tokens: list[int]
    logprobs: list[dict[int, float]]
    cached: int
    prompt_logprobs: list[dict[int, float]] | None = None


@dataclass
class Difference:
    """How far a run is from its reference."""

    logprob: float = 0.0
    near_ties: int = 0
    compared: int = 0
    gaps: list[float] = field(default_factory=list)


def difference(reference: Answer, other: Answer) -> Difference:
    """Compare two answers; fail where they differ beyond rounding.

    Log-probabilities of both must agree within 1e-3 up to the first differing token, which is let pass, and counted, only
    where the reference's two likeliest tokens lie within 1e-3 (float32 products of fewer than 8 rows round differently).
    """
    found = Difference()
    pairs = zip(reference.logprobs, other.logprobs, strict=True)
    for step, (ours, theirs) in enumerate(pairs):
        common = ours.keys() & theirs.keys()
        worst = max(abs(ours[token] - theirs[token]) for token in common)
        found.logprob = max(found.logprob, worst)
        assert worst <= TOLERANCE, f"log-probability off by {worst:.2e} at {step}"
        found.compared += 1
        if reference.tokens[step] != other.tokens[step]:
            best, second = sorted(ours.values(), reverse=True)[:2]
            gap = best - second
            assert gap <= TOLERANCE, (
                f"token {step} is {other.tokens[step]}, expected "
                f"{reference.tokens[step]}, at a gap of {gap:.2e}"
            )
            found.near_ties += 1
            found.gaps.append(gap)
            break
    return found


class Engine:
    """vLLM's engine in this process, with a look at what its scheduler did."""

    def __init__(self, checkpoint, **options):
        from vllm import LLM

        settings = {
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 4096,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 1000,
            "kv_cache_memory_bytes": 1 << 28,
            "seed": 0,
            "disable_log_stats": False,
        }
        self.llm = LLM(str(checkpoint), **(settings | options))

    @property
    def core(self):
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self):
        return self.core.scheduler

    @property
    def model(self):
        return self.core.model_executor.driver_worker.worker.model_runner.model

    def counter(self, name: str) -> float:
        """The sum of a vLLM counter, such as vllm:num_preemptions."""
        return sum(
            metric.value for metric in self.llm.get_metrics() if metric.name == name
        )

    def reset_prefix_cache(self) -> None:
        assert self.llm.reset_prefix_cache()

    @contextmanager
    def chunks_of(self, tokens: int) -> Iterator[None]:
        """Prefill at most `tokens` of a request a step."""
        config = self.scheduler.scheduler_config
        before = config.long_prefill_token_threshold
        config.long_prefill_token_threshold = tokens
        try:
            yield
        finally:
            config.long_prefill_token_threshold = before

    def generate(self, prompts, max_tokens: int = 8, **sampling) -> list[Answer]:
        """Greedy by default; the eight likeliest log-probabilities at each token."""
        from vllm import SamplingParams

        settings = {"temperature": 0.0, "logprobs": 8, "ignore_eos": True}
        params = SamplingParams(
            max_tokens=max_tokens, detokenize=False, **(settings | sampling)
        )
        outputs = self.llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts],
            params,
            use_tqdm=False,
        )
        return [
            Answer(
                tokens=list(output.outputs[0].token_ids),
                logprobs=[
                    {token: entry.logprob for token, entry in step.items()}
                    for step in output.outputs[0].logprobs or ()
                ],
                cached=output.num_cached_tokens,
                prompt_logprobs=output.prompt_logprobs
                and [
                    {token: entry.logprob for token, entry in step.items()}
                    for step in output.prompt_logprobs[1:]
                ],
            )
            for output in outputs
        ]

    def close(self) -> None:
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        cleanup_dist_env_and_memory()
        gc.collect()


@contextmanager
def running(checkpoint, **options) -> Iterator[Engine]:
    engine = Engine(checkpoint, **options)
    try:
        yield engine
    finally:
        engine.close()


def prompt(length: int, seed: int = 0, vocabulary: int = 1000) -> list[int]:
    """Random ids, the same for the same seed; a longer prompt begins with the shorter one."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocabulary, (length,), generator=generator).tolist()
