"""Two ranks, tensor-, data- or expert-parallel, give the text of one, and draft as one does."""

import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from engines import TOLERANCE, Engine, difference, prompt, running
from launched import prepare, two_ranks
from vllm.v1.worker.gpu.spec_decode import adaptive_verification

# More take minutes: PARALLEL_REQUESTS=500 pytest tests/plugin/test_parallel_ranks.py
REQUESTS = int(os.environ.get("PARALLEL_REQUESTS", "6"))
TOKENS = 8
OPTIONS: dict[str, Any] = {
    "max_model_len": 512,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 1 << 26,
}


def prompts() -> list[list[int]]:
    return [prompt(3 + 29 * i % 211, seed=i, vocabulary=512) for i in range(REQUESTS)]


@dataclass(frozen=True)
class Case:
    """How two ranks share the work.

    Attributes:
        ranks: "TP" or "DP", with "+EP" where experts are shared.
        draft: "dspark", "adaptive", "mtp" or None.
        layout: of the state.
        kv: dtype of cache rows; fp8 and bfloat16 without prefix caching.
        whole_draft: tensor-parallel ranks have all of the draft each.
    """

    ranks: str
    draft: str | None = None
    layout: str = "paged"
    kv: str = "float32"
    whole_draft: bool = False

    def __str__(self) -> str:
        named = (self.ranks, self.draft, self.layout, self.kv)
        return "-".join(filter(None, named)) + "-whole" * self.whole_draft

    @property
    def tensor(self) -> bool:
        return self.ranks.startswith("TP")

    @property
    def shared_experts(self) -> bool:
        return self.ranks.endswith("+EP")

    @property
    def tolerance(self) -> float:
        """Sums of two ranks round otherwise, and the least of it can move a number to fp8's next, 1/16 away."""
        return 1e-2 if self.kv == "fp8" else TOLERANCE

    @property
    def reference(self) -> tuple[str, str]:
        """The checkpoint, by its draft, and the dtype of rows."""
        return "mtp" if self.draft == "mtp" else "dspark", self.kv

    @property
    def covers(self) -> pytest.MarkDecorator:
        return pytest.mark.covers(
            spec=self.draft or "off",
            caching="on" if self.kv == "float32" else "off",
            layout=self.layout,
            # Ranks of vLLM's offline engine meet once a step; a step that only waits for an earlier one would miss the others.
            scheduling="async" if self.tensor and self.kv == "float32" else "sync",
            graphs="none",
            ranks=self.ranks,
            kv=self.kv,
        )

    def options(self) -> dict[str, Any]:
        speculative: dict[str, Any] | None = None
        if self.draft:
            speculative = {"method": self.reference[0]}
            if self.draft == "adaptive":
                speculative["enable_adaptive_verification"] = True
            if self.whole_draft:
                speculative["draft_tensor_parallel_size"] = 1
        size = "tensor_parallel_size" if self.tensor else "data_parallel_size"
        features = self.covers.mark.kwargs
        return {
            **OPTIONS,
            **rows(self.kv),
            "distributed_executor_backend": "external_launcher",
            size: 2,
            "async_scheduling": features["scheduling"] == "async",
            "enable_expert_parallel": self.shared_experts,
            "speculative_config": speculative,
            "additional_config": {"atom": {"state_layout": self.layout}},
        }


TENSOR = [
    Case("TP"),
    Case("TP", "dspark"),
    Case("TP", "mtp", "ring"),
    Case("TP", "dspark", whole_draft=True),
    Case("TP", "adaptive"),
    Case("TP", "dspark", "ring", kv="fp8"),
    Case("TP+EP", "dspark", kv="bfloat16"),
]
DATA = [
    Case("DP", "dspark", "ring"),
    Case("DP+EP"),
    Case("DP+EP", "dspark"),
    Case("DP+EP", "adaptive"),
    Case("DP", "mtp", kv="bfloat16"),
    Case("DP+EP", "mtp", "ring", kv="fp8"),
]


def rows(kv: str) -> dict[str, Any]:
    other = {"kv_cache_dtype": kv, "enable_prefix_caching": False}
    return {} if kv == "float32" else other


def marked(cases: list[Case]) -> list[Any]:
    return [pytest.param(case, marks=case.covers, id=str(case)) for case in cases]


def start(case: Case, checkpoints):
    """The engine of a case; what splits a budget runs as it is written, since compiling it takes half a minute in each process."""
    adaptive_verification._assign_draft_token_budget_compiled = (
        adaptive_verification._assign_draft_token_budget
    )
    return running(checkpoints[case.reference[0]], **case.options())


def counts(engine) -> tuple[float, float]:
    """Drafted and accepted tokens."""
    name = "vllm:spec_decode_num_{}_tokens"
    return tuple(engine.counter(name.format(kind)) for kind in ("draft", "accepted"))


def listen(engine) -> list[torch.Tensor]:
    """The confidence in every draft from now on, whatever is drafted."""
    draft, heard = engine.runner.speculator.model, []
    ask = draft.compute_draft_logits

    def asked(hidden):
        tokens = torch.arange(len(hidden), device=hidden.device)
        heard.append(draft.compute_confidence(hidden, draft.markov_embed(tokens)))
        return ask(hidden)

    draft.compute_draft_logits = asked
    return heard


def experts_held(engine) -> tuple[int, str]:
    """How many, and what the start-up table says of ranks."""
    from atom_vllm_bridge import startup

    runner = engine.runner
    rows = startup.table(runner.vllm_config, engine.model, runner.kv_cache_config)
    return engine.model.model.layers[0].ffn.w13.shape[0], dict(rows)["ranks"]


def state(engine) -> list[torch.Tensor]:
    """All cache rows of the target and the draft."""
    context = engine.runner.vllm_config.compilation_config.static_forward_context
    return [layer.kv_cache.clone() for layer in context.values()]


def tensor_parallel(rank, checkpoints, cases):
    results = []
    for case in cases:
        with start(case, checkpoints) as engine:
            heard = listen(engine) if case.draft == "dspark" else []
            answers = engine.generate(prompts(), max_tokens=TOKENS)
            experts = experts_held(engine)
            heard = torch.cat(heard) if heard else None
            seen = counts(engine), experts, heard, engine.features
            results.append((answers, *seen))
    return results


def data_parallel(rank, checkpoints, cases):
    """First rank 0 is busy and rank 1 idle; then both are busy with other halves; then rank 1, which hits what it has seen."""
    results, halves = [], (prompts()[::2], prompts()[1::2])
    for case in cases:
        with start(case, checkpoints) as engine:
            first = engine.generate(halves[rank], max_tokens=TOKENS)
            before = state(engine)
            idle = engine.generate(halves[0] if rank == 0 else [], max_tokens=TOKENS)
            after = state(engine)
            kept = [
                torch.equal(one.view(torch.uint8), two.view(torch.uint8))
                for one, two in zip(before, after, strict=True)
            ]
            again = engine.generate(halves[1] if rank else [], max_tokens=TOKENS)
            experts = experts_held(engine)
            seen = counts(engine), experts, engine.features
            results.append((first, idle, again, kept, *seen))
    return results


@pytest.fixture(scope="module")
def checkpoints(agreeing_dspark, agreeing_mtp):
    return {"dspark": agreeing_dspark, "mtp": agreeing_mtp}


@pytest.fixture(scope="module")
def one_rank(checkpoints):
    """By draft and dtype of rows: the answers, and what was drafted and accepted."""
    prepare()
    found = {}
    for draft, kv in dict.fromkeys(case.reference for case in TENSOR + DATA):
        with running(
            checkpoints[draft],
            speculative_config={"method": draft},
            **OPTIONS,
            **rows(kv),
        ) as engine:
            answers = engine.generate(prompts(), max_tokens=TOKENS)
            found[draft, kv] = answers, counts(engine)
    return found


@pytest.fixture(scope="module")
def tensor_ranks(one_rank, checkpoints):
    return two_ranks(tensor_parallel, checkpoints, TENSOR)


@pytest.fixture(scope="module")
def data_ranks(one_rank, checkpoints):
    return two_ranks(data_parallel, checkpoints, DATA)


@pytest.mark.parametrize("case", marked(TENSOR))
def test_two_tensor_parallel_ranks_give_the_text_of_one(case, one_rank, tensor_ranks):
    references, (drafted, accepted) = one_rank[case.reference]
    number = TENSOR.index(case)
    first, (others, *_) = (results[number] for results in tensor_ranks)
    answers, drafts, experts, _, features = first
    Engine.asked.append(features)
    assert experts == (
        4,
        "2 tensor-parallel · 1 data-parallel, 4 of 8 experts each",
    )
    for reference, answer, other in zip(references, answers, others, strict=True):
        difference(reference, answer, case.tolerance)
        assert answer.tokens == other.tokens
    if case.draft in ("dspark", "mtp"):
        # A draft that is cut wrongly gives the same text, with fewer accepted tokens.
        assert accepted > 0.2 * drafted
        assert drafts == pytest.approx((drafted, accepted), rel=0.02)


@pytest.mark.parametrize(
    "case", [case for case in TENSOR if case.draft == "dspark"], ids=str
)
def test_confidences_are_the_same_on_both_ranks_to_the_bit(case, tensor_ranks):
    one, other = (results[TENSOR.index(case)][3] for results in tensor_ranks)
    assert len(one) > REQUESTS
    assert one.std() > 0
    assert torch.equal(one, other)


@pytest.mark.parametrize("case", marked(DATA))
def test_data_parallel_ranks_give_the_text_of_one(case, one_rank, data_ranks):
    references, (drafted, accepted) = one_rank[case.reference]
    halves = references[::2], references[1::2]
    found = [results[DATA.index(case)] for results in data_ranks]
    for rank, (first, idle, again, _, drafts, experts, features) in enumerate(found):
        Engine.asked.append(features)
        ranks = "1 tensor-parallel · 2 data-parallel"
        split = (4, f"{ranks}, 4 of 8 experts each")
        assert experts == (split if case.shared_experts else (8, ranks))
        assert len(idle) == len(halves[0]) * (rank == 0)
        assert len(again) == len(halves[1]) * (rank == 1)
        for answers in (first, idle, again):
            for reference, answer in zip(halves[rank], answers, strict=False):
                difference(reference, answer, case.tolerance)
        if case.draft in ("dspark", "mtp"):
            assert drafts[1] / drafts[0] == pytest.approx(accepted / drafted, rel=0.5)


@pytest.mark.parametrize("case", DATA, ids=str)
def test_an_idle_rank_writes_no_state(case, data_ranks):
    kept = {rank: data_ranks[rank][DATA.index(case)][3] for rank in (0, 1)}
    assert all(kept[1])
    # The busy one wrote some, so that the comparison sees it.
    assert not all(kept[0])
