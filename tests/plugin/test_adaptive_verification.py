"""A budget splits drafts over requests on the device, and every request says what it says alone."""

import numpy as np
import pytest
import torch
from drafts import watching
from engines import SHALLOW, difference, prompt, running
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from vllm.config import set_current_vllm_config
from vllm.config.compilation import CUDAGraphMode
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.worker.gpu.spec_decode import adaptive_verification

from atom_vllm_bridge import metrics
from atom_vllm_bridge.attention import AtomBackend
from atom_vllm_bridge.attention.backend import AtomMetadataBuilder
from atom_vllm_bridge.platforms.refusal import Refused
from atom_vllm_bridge.workers.cpu import AtomCpuWorker
from atom_vllm_bridge.workers.step_costs import HostTimes, every_count, sizes

VOCABULARY = SHALLOW["vocab_size"]
DRAFTS = 7
# Every residue around the boundaries of entries and windows, so that a split crosses them anywhere.
LENGTHS = [*range(120, 136), *range(250, 258), *range(60, 68), *range(1, 33)]
PROMPTS = [prompt(length, i, VOCABULARY) for i, length in enumerate(LENGTHS)]
TOKENS = 40
FEW = slice(0, 64, 5)


def adaptive(drafts: int = DRAFTS, **more) -> dict:
    draft = {"method": "dspark", "num_speculative_tokens": drafts}
    return {
        "speculative_config": {**draft, "enable_adaptive_verification": True, **more}
    }


@pytest.fixture(scope="module")
def expected(agreeing_dspark):
    """Without drafts."""
    with running(agreeing_dspark, max_num_seqs=64) as engine:
        return engine.generate(PROMPTS, max_tokens=TOKENS)


def covers(layout, caching="on", scheduling="async", kv="float32"):
    return pytest.mark.covers(
        spec="adaptive",
        caching=caching,
        layout=layout,
        scheduling=scheduling,
        graphs="none",
        ranks="one",
        kv=kv,
    )


@pytest.fixture(
    scope="module",
    params=[pytest.param(layout, marks=covers(layout)) for layout in ("paged", "ring")],
)
def engine(request, expected, agreeing_dspark):
    with running(
        agreeing_dspark,
        max_num_seqs=64,
        additional_config={"atom": {"state_layout": request.param}},
        **adaptive(),
    ) as engine:
        yield engine


@pytest.fixture
def splits(engine, monkeypatch):
    """(the host's tokens of each request, the device's, drafts verified) of the steps with drafts."""
    found = []
    state = engine.runner.model_state
    preprocess = state.preprocess_state

    def noting(batch, *args):
        if batch.num_draft_tokens_per_req is not None:
            found.append(
                (
                    np.diff(batch.query_start_loc_np).tolist(),
                    batch.query_start_loc.diff().tolist(),
                    batch.num_draft_tokens,
                )
            )
        preprocess(batch, *args)

    monkeypatch.setattr(state, "preprocess_state", noting)
    return found


def uneven(splits) -> int:
    """Steps in which the device split tokens otherwise than the host's evenly spread ones; their sums are the same."""
    assert all(sum(host) == sum(device) for host, device, _ in splits)
    return sum(host != device for host, device, _ in splits)


def agree(expected, answers) -> None:
    for pair in zip(expected, answers, strict=True):
        difference(*pair)


def test_texts_are_those_without_drafts(engine, expected, splits):
    answers = engine.generate(PROMPTS, max_tokens=TOKENS)
    agree(expected, answers)
    accepted = engine.counter("vllm:spec_decode_num_accepted_tokens")
    print(
        f"\n{uneven(splits)} of {len(splits)} steps split unevenly; {accepted:.0f} drafts accepted"
    )
    assert uneven(splits) > 0
    assert accepted > 0


@settings(max_examples=10, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 10**6))
def test_any_split_of_any_budget_gives_the_same_text(engine, expected, seed):
    """Splits that no confidence would give: the largest drafts to the last requests, all to one, none at all."""
    draw = np.random.default_rng(seed)
    manager = engine.runner.adaptive_verification
    get_num_tokens = manager.get_num_tokens
    chosen = []

    def any_budget(tokens, drafts):
        get_num_tokens(tokens, drafts)
        offered, others, _ = manager._batch_budget
        budget = int(draw.integers(0, sum(offered.values()) + 1))
        manager._batch_budget = offered, others, budget
        return sum(others.values()) + budget

    def any_split(confidences, idx_mapping, capacities, budget, steps):
        slots = np.repeat(np.arange(len(capacities)), capacities.numpy())
        taken = draw.choice(slots, budget, replace=False)
        if draw.random() < 0.3:
            taken = slots[-budget:]
        counts = np.bincount(taken, minlength=len(capacities))
        chosen.append(counts.tolist())
        capacities.copy_(torch.from_numpy(counts))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager, "get_num_tokens", any_budget)
        patch.setattr(
            adaptive_verification, "_assign_draft_token_budget_compiled", any_split
        )
        engine.reset_prefix_cache()
        answers = engine.generate(PROMPTS[FEW], max_tokens=TOKENS)
    agree(expected[FEW], answers)
    assert any(len(set(counts)) > 2 for counts in chosen)


def test_confidence_is_set_beside_the_verdict(engine, splits):
    """What was offered, admitted and kept adds up to what went through the runner."""
    engine.runner.model_state.verdicts.show()
    before = sums()
    engine.reset_prefix_cache()
    with watching(engine) as watch:
        engine.generate(PROMPTS[FEW], max_tokens=TOKENS)
    verified = sum(drafts for _, _, drafts in splits)
    # They are shown when requests are taken off the worker, which is before the next one.
    engine.generate(PROMPTS[:1], max_tokens=1)
    found = {name: after - before[name] for name, after in sums().items()}
    assert found["offered"] == sum(row.drafts for row in watch.rows)
    assert found["kept"] == sum(row.sampled - 1 for row in watch.rows if row.sampled)
    assert found["admitted"] == verified
    assert 0 < found["kept"] <= found["admitted"] < found["offered"]
    assert 0 < found["expected"] < found["admitted"]


def sums() -> dict[str, float]:
    page = metrics_page()
    return {
        series.name.removeprefix("atom_bridge:").removesuffix("_draft_tokens"): sum(
            sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name == series.sample
        )
        for series in (
            metrics.OFFERED,
            metrics.ADMITTED,
            metrics.EXPECTED,
            metrics.KEPT,
        )
    }


def metrics_page() -> str:
    from prometheus_client import REGISTRY, generate_latest

    return generate_latest(REGISTRY).decode()


def configuration(checkpoint, **options):
    args = {"max_model_len": 1024, "dtype": "float32", "enforce_eager": True}
    return EngineArgs(str(checkpoint), **(args | options)).create_engine_config()


@pytest.mark.parametrize(
    ("kv", "layout", "caching", "scheduling"),
    [
        pytest.param(*case, marks=covers(*case[1:], kv=case[0]), id="-".join(case))
        for case in (
            ("fp8", "paged", "off", "sync"),
            ("bfloat16", "ring", "on", "sync"),
        )
    ],
)
def test_texts_are_those_without_drafts_from_rows_of_any_dtype(
    agreeing_dspark, kv, layout, caching, scheduling
):
    prompts = [prompt(n, seed=n, vocabulary=VOCABULARY) for n in (700, 30, 1100, 126)]
    rows = {"max_num_seqs": 4, "kv_cache_dtype": kv}
    with running(agreeing_dspark, enable_prefix_caching=False, **rows) as engine:
        plain = engine.generate(prompts, max_tokens=24)
    with running(
        agreeing_dspark,
        enable_prefix_caching=caching == "on",
        async_scheduling=scheduling == "async",
        additional_config={"atom": {"state_layout": layout}},
        **rows,
        **adaptive(),
    ) as engine:
        answers = [engine.generate(prompts, max_tokens=24) for _ in range(2)]
        assert engine.counter("vllm:spec_decode_num_accepted_tokens") > 0
    agree(plain, answers[0])
    agree(plain, answers[1])
    hits = (640, 0, 1024, 0) if caching == "on" else (0,) * 4
    assert tuple(answer.cached for answer in answers[1]) == hits


@pytest.mark.parametrize("on", [True, False])
def test_what_it_needs_is_declared_only_where_it_is_asked_for(agreeing_dspark, on):
    config = configuration(agreeing_dspark, **adaptive(enable_adaptive_verification=on))
    with set_current_vllm_config(config):
        assert AtomBackend.supports_device_cpu_query_lens_mismatch() is on
    assert AtomMetadataBuilder.get_varlen_cudagraph_max_query_len(config, None) == (
        DRAFTS + 1 if on else None
    )
    support = AtomMetadataBuilder.get_cudagraph_support(config, None)
    assert support.name == "UNIFORM_BATCH"
    graphs, worker = (
        config.compilation_config.cudagraph_mode,
        config.parallel_config.worker_cls,
    )
    assert graphs is (CUDAGraphMode.FULL_DECODE_ONLY if on else CUDAGraphMode.NONE)
    assert worker.endswith(".AtomCpuWorker" if on else ".CPUWorker")


def test_another_worker_is_refused(agreeing_dspark):
    with pytest.raises(Refused, match=r"--worker-cls some\.Worker does not"):
        configuration(agreeing_dspark, worker_cls="some.Worker", **adaptive())


def test_a_head_that_is_asked_for_and_absent_is_refused(headless_dspark):
    with pytest.raises(
        Refused, match=r"no mtp\.1\.confidence_head\.proj\.weight\. Pass --hf-overrides"
    ):
        configuration(
            headless_dspark, hf_overrides={"enable_confidence_head": True}, **adaptive()
        )


def test_without_a_head_acceptance_is_estimated(headless_dspark, expected):
    with running(headless_dspark, max_num_seqs=64, **adaptive()) as engine:
        assert engine.runner.speculator.acceptance_estimator is not None
        answers = engine.generate(PROMPTS[FEW], max_tokens=TOKENS)
        assert engine.counter("vllm:spec_decode_num_accepted_tokens") > 0
    agree(expected[FEW], answers)


def test_steps_are_timed_with_the_context_that_is_asked_for(
    agreeing_dspark, monkeypatch
):
    monkeypatch.setenv("VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN", "300")
    seen = []
    load = AtomCpuWorker.load_model

    def watched(self, *args, **options):
        load(self, *args, **options)
        forward = self.model_runner.model.forward

        def noting(*args, **options):
            from vllm.forward_context import get_forward_context

            group = next(iter(get_forward_context().attn_metadata.values()))
            seen.append((len(options["positions"]), int(group.seq_lens.max())))
            return forward(*args, **options)

        self.model_runner.model.forward = noting

    monkeypatch.setattr(AtomCpuWorker, "load_model", watched)
    with running(
        agreeing_dspark, max_num_seqs=4, max_num_batched_tokens=128, **adaptive()
    ) as engine:
        draft, verify = engine.runner.adaptive_verification.cost_tables
    assert {tokens for tokens, _ in seen} == set(sizes(4 * (DRAFTS + 1), 128))
    assert all(300 < length <= 300 + 128 for _, length in seen)
    assert (len(draft), len(verify)) == (5, 129)
    assert (draft > 0).all()
    assert (verify > 0).all()
    assert verify[128] > verify[1]


def test_costs_between_timed_sizes_lie_on_the_line():
    curve = every_count({2: [5.0, 4.0, 9.0], 6: [8.0]}, 8)
    assert curve == [(1, 4), (2, 4), (3, 5), (4, 6), (5, 7), (6, 8), (7, 8), (8, 8)]


def test_a_size_costs_no_more_than_a_larger_one():
    """As where the machine did something else whenever the smaller one was timed."""
    curve = every_count({1: [90.0, 80.0], 3: [4.0, 7.0]}, 3)
    assert curve == [(1, 4), (2, 4), (3, 4)]


def test_the_sizes_that_are_timed_are_dense_where_drafts_are_verified():
    assert sizes(24, 1024) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 1024]


def test_the_host_s_clock_prices_a_step(monkeypatch):
    class Batch:
        num_tokens, num_reqs = 12, 3

    clock = iter([0.5, 1.0, 1.25, 2.0])
    monkeypatch.setattr(
        "atom_vllm_bridge.workers.step_costs.time.perf_counter", lambda: next(clock)
    )
    times = HostTimes()

    def step():
        times.record_batch(Batch, False)
        times.forward_start()
        times.forward_end()
        times.drafter_start()
        times.drafter_end()

    times.step(step)
    assert times.forward_ms == {12: [250.0]}
    assert times.other_ms == {3: [1250.0]}
