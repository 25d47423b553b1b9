"""Engines in this process, and the rule by which two runs are the same."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar
from unittest.mock import patch

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
# One layer of each attention kind, where many engines run the same prompts.
SHALLOW = SMALL | {
    "num_hidden_layers": 3,
    "compress_ratios": [0, 4, 128],
    "num_hash_layers": 1,
    "hc_sinkhorn_iters": 4,
    "vocab_size": 512,
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


def difference(
    reference: Answer, other: Answer, tolerance: float = TOLERANCE
) -> Difference:
    """Compare two answers; fail where they differ beyond rounding.

    Log-probabilities of both must agree within the tolerance up to the first differing token, which is let pass, and counted,
    only where the reference's two likeliest tokens lie within it (float32 products of fewer than 8 rows round differently).
    """
    found = Difference()
    for step, worst, gap in steps(reference, other):
        found.logprob = max(found.logprob, worst)
        assert worst <= tolerance, f"log-probability off by {worst:.2e} at {step}"
        found.compared += 1
        if gap is not None:
            assert gap <= tolerance, (
                f"token {step} is {other.tokens[step]}, expected "
                f"{reference.tokens[step]}, at a gap of {gap:.2e}"
            )
            found.near_ties += 1
            found.gaps.append(gap)
    return found


def steps(
    reference: Answer, other: Answer
) -> Iterator[tuple[int, float, float | None]]:
    """Each step up to the first at which the texts part: its number, how far log-probabilities are apart, and, where they part,
    how far the reference's two likeliest tokens are."""
    pairs = zip(reference.logprobs, other.logprobs, strict=True)
    for step, (ours, theirs) in enumerate(pairs):
        common = ours.keys() & theirs.keys()
        worst = max(abs(ours[token] - theirs[token]) for token in common)
        if reference.tokens[step] != other.tokens[step]:
            best, second = sorted(ours.values(), reverse=True)[:2]
            yield step, worst, best - second
            return
        yield step, worst, None


class Engine:
    """vLLM's engine in this process, with a look at what its scheduler did."""

    running: ClassVar[list["Engine"]] = []
    # Features of engines that were asked for an answer, in the words of tests/features.py; conftest.py compares them with marks.
    asked: ClassVar[list[dict[str, str]]] = []

    def __init__(self, checkpoint, **options):
        from vllm import LLM

        # A start and an end collect garbage ten times, and what is there already need not be looked through each time. What
        # an engine holds stays out of that, or it would never be freed.
        if not self.running:
            gc.freeze()
        self.running.append(self)
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
        with patch.object(gc, "freeze"):
            self.llm = LLM(str(checkpoint), **(settings | options))

    @property
    def core(self):
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self):
        return self.core.scheduler

    @property
    def runner(self):
        return self.core.model_executor.driver_worker.worker.model_runner

    @property
    def model(self):
        return self.runner.model

    @property
    def features(self) -> dict[str, str]:
        """What this engine runs, in the words of tests/features.py."""
        config, parallel = self.runner.vllm_config, self.runner.parallel_config
        codec = self.model.model.codec.name
        return {
            "spec": _draft(config.speculative_config),
            "caching": "on" if config.cache_config.enable_prefix_caching else "off",
            "layout": _layout(self.runner.kv_cache_config),
            "scheduling": ("sync", "async")[config.scheduler_config.async_scheduling],
            "graphs": _graphs(config.compilation_config),
            "ranks": "+".join(
                ["TP"] * (parallel.tensor_parallel_size > 1)
                + ["DP"] * (parallel.data_parallel_size > 1)
                + ["EP"] * parallel.enable_expert_parallel
            )
            or "one",
            "kv": "fp8" if codec == "fp8_ds_mla" else codec,
        }

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
        self.asked.append(self.features)
        outputs = self.llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts],
            _params(max_tokens, **sampling),
            use_tqdm=False,
        )
        return [_answer(output) for output in outputs]

    def generate_over_time(
        self, prompts, at_once: int, max_tokens: int = 8, **sampling
    ) -> list[Answer]:
        """The same, but only `at_once` requests are there at the start; one more comes before each step."""
        self.asked.append(self.features)
        params = _params(max_tokens, **sampling)
        engine, waiting = self.llm.llm_engine, list(enumerate(prompts))
        done: dict[str, Any] = {}
        while waiting or engine.has_unfinished_requests():
            count = 1 if engine.has_unfinished_requests() else at_once
            arriving, waiting = waiting[:count], waiting[count:]
            for number, ids in arriving:
                engine.add_request(str(number), {"prompt_token_ids": list(ids)}, params)
            done |= {out.request_id: out for out in engine.step() if out.finished}
        return [_answer(done[str(number)]) for number in range(len(prompts))]

    def close(self) -> None:
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        with patch.object(gc, "unfreeze"):
            self.llm.llm_engine.engine_core.shutdown()
            del self.llm
            self.running.remove(self)
            cleanup_dist_env_and_memory()
        gc.collect()


def _draft(speculative) -> str:
    if speculative is None:
        return "off"
    adaptive = speculative.enable_adaptive_verification
    return "adaptive" if adaptive else speculative.method


def _layout(cache) -> str:
    from atom_vllm_bridge.kv_cache import RingSpec, spec_of_group

    specs = [spec_of_group(group) for group in cache.kv_cache_groups]
    return "ring" if any(isinstance(spec, RingSpec) for spec in specs) else "paged"


def _graphs(compilation) -> str:
    """vLLM is told that a CPU has graphs where adaptive verification asks for them; none is captured there."""
    from vllm.platforms import current_platform

    full = compilation.cudagraph_mode.has_full_cudagraphs()
    return "decode" if full and not current_platform.is_cpu() else "none"


def _params(max_tokens: int, **sampling):
    from vllm import SamplingParams

    settings = {"temperature": 0.0, "logprobs": 8, "ignore_eos": True}
    return SamplingParams(
        max_tokens=max_tokens, detokenize=False, **(settings | sampling)
    )


def _answer(output) -> Answer:
    return Answer(
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
