"""`state_layout="ring"`: the same answers as from paged state, hits that are rolled back exactly, and blocks that stay what they were (float32)."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from drafts import watching
from engines import difference, prompt, running

from atom_vllm_bridge.checkpoint.presets import build_config
from atom_vllm_bridge.kv_cache import RingSpec, spec_of_group
from atom_vllm_bridge.models.deepseek_v4.config import DeepseekV4Config
from atom_vllm_bridge.rollback import rollback_tokens

LONG = {
    "max_model_len": 18432,
    "max_num_batched_tokens": 1024,
    "kv_cache_memory_bytes": 1 << 29,
}

covers = partial(
    pytest.mark.covers, layout="ring", graphs="none", ranks="one", kv="float32"
)


def ring(policy: str | int = "exact") -> dict:
    return {
        "additional_config": {
            "atom": {"state_layout": "ring", "prefix_rollback": policy}
        }
    }


def rings_of(engine) -> list[RingSpec]:
    specs = map(spec_of_group, engine.runner.kv_cache_config.kv_cache_groups)
    return [spec for spec in specs if isinstance(spec, RingSpec)]


@pytest.fixture(scope="module")
def paged_engine(small_checkpoint):
    with running(small_checkpoint, **LONG) as engine:
        yield engine


@pytest.fixture(scope="module")
def paged(paged_engine):
    """The reference: cold answers from paged state."""

    def answer(ids, **sampling):
        paged_engine.reset_prefix_cache()
        (cold,) = paged_engine.generate([ids], **sampling)
        assert cold.cached == 0
        return cold

    return answer


@pytest.fixture(scope="module")
def engine(small_checkpoint, paged_engine):
    with running(small_checkpoint, **LONG, **ring()) as engine:
        yield engine


@pytest.fixture(scope="module")
def replay(engine):
    """Tokens that an exact hit costs."""
    (tokens,) = {spec.replay for spec in rings_of(engine)}
    return tokens


@contextmanager
def starts(engine) -> Iterator[list[tuple[int, int]]]:
    """Of each request that starts: its first token to compute, and where its replay begins."""
    seen: list[tuple[int, int]] = []
    model_state = engine.runner.model_state
    add = model_state.add_request

    def noted(slot, request):
        seen.append((request.num_computed_tokens, request.replay_start))
        add(slot, request)

    model_state.add_request = noted
    try:
        yield seen
    finally:
        del model_state.add_request


@pytest.mark.parametrize("chunk", [1, 63, 129, 256, 0])
def test_any_chunk_size_gives_what_paged_state_gives(engine, paged, chunk):
    ids = prompt(300 if chunk == 1 else 700, seed=chunk)
    engine.reset_prefix_cache()
    with engine.chunks_of(chunk):
        (answer,) = engine.generate([ids])
    difference(paged(ids), answer)


@covers(spec="off", caching="on", scheduling="async")
@pytest.mark.parametrize(
    ("prefix", "tail"),
    [
        *((2048, tail) for tail in (1, 127, 128, 129, 256, 513)),
        *((6144, tail) for tail in (1, 129)),
        (17408, 129),
    ],
)
def test_a_hit_is_rolled_back_and_gives_what_a_cold_run_gives(
    engine, paged, replay, prefix, tail
):
    ids = prompt(prefix + tail, seed=tail)
    hit = (len(ids) - 1) // 128 * 128
    engine.reset_prefix_cache()
    (cold,) = engine.generate([ids])
    with starts(engine) as seen:
        (after,) = engine.generate([ids])
    assert (cold.cached, after.cached) == (0, hit)
    assert seen == [(hit - replay, hit - replay)]
    reference = paged(ids)
    difference(reference, cold)
    difference(reference, after)


def test_a_replay_in_small_chunks_sees_nothing_from_before_it(engine, paged):
    ids = prompt(1500, seed=5)
    engine.reset_prefix_cache()
    engine.generate([ids])
    with engine.chunks_of(40):
        (after,) = engine.generate([ids])
    assert after.cached == 1408
    difference(paged(ids), after)


def test_a_hit_that_costs_all_it_saves_is_not_used(engine, replay):
    ids = prompt(replay + 10, seed=6)
    engine.reset_prefix_cache()
    engine.generate([ids])
    (again,) = engine.generate([ids])
    assert again.cached == 0


def test_a_replay_leaves_the_shared_pages_as_they_are(engine):
    """Two requests share a prefix; the second replays its end, and writes only into blocks of its own."""
    shared = prompt(1536, seed=8)
    engine.reset_prefix_cache()
    before: dict[str, torch.Tensor] = {}
    caches = {
        layer.name: layer.kv_cache
        for layer in engine.runner.model.modules()
        if hasattr(layer, "kv_cache") and not isinstance(layer.spec, RingSpec)
    }

    engine.generate([shared + prompt(30, seed=1)])
    groups = engine.runner.kv_cache_config.kv_cache_groups
    cached = {
        block.block_id
        for block in engine.scheduler.kv_cache_manager.block_pool.blocks
        if block.block_hash is not None
    }
    assert cached
    blocks = torch.tensor(sorted(cached))
    for group in groups:
        for name in group.layer_names:
            if name in caches:
                before[name] = caches[name][blocks].clone()
    (hit,) = engine.generate([shared + prompt(30, seed=2)])
    assert hit.cached == 1536
    for name, rows in before.items():
        assert torch.equal(caches[name][blocks], rows), name


def test_every_layer_is_in_one_group_and_rings_fill_their_blocks(engine):
    groups = engine.runner.kv_cache_config.kv_cache_groups
    names = [name for group in groups for name in group.layer_names]
    specs = engine.runner.get_kv_cache_spec()
    assert sorted(names) == sorted(specs)
    for group in groups:
        assert len({type(specs[name]) for name in group.layer_names}) == 1
    rings = [g for g in groups if isinstance(spec_of_group(g), RingSpec)]
    block = max(group.kv_cache_spec.page_size_bytes for group in groups)
    held = sum(group.kv_cache_spec.page_size_bytes for group in rings)
    assert len(rings) * block < 2 * held


def alone_from_blocks(checkpoint, prompts, **sampling):
    """Each alone, from paged state, for tests whose engine is not the module's: two that come and go disturb each other."""
    with running(checkpoint, enable_prefix_caching=False) as engine:
        return [engine.generate([ids], **sampling)[0] for ids in prompts]


def test_less_than_exact_is_an_approximation(small_checkpoint):
    """Without this the tests above would hold for any number of tokens."""
    ids = prompt(2100, seed=7)
    with running(
        small_checkpoint, kv_cache_memory_bytes=1 << 28, **ring("window")
    ) as engine:
        (cold,) = engine.generate([ids])
        (hit,) = engine.generate([ids])
        assert (cold.cached, hit.cached) == (0, 2048)
    worst = max(
        abs(cold.logprobs[0][token] - hit.logprobs[0][token])
        for token in cold.logprobs[0].keys() & hit.logprobs[0].keys()
    )
    assert worst > 1e-3


def test_company_and_more_requests_than_slots_change_nothing(small_checkpoint):
    lengths = [1, 5, 64, 129, 300, 700, 1500, 40, 90, 1300]
    prompts = [prompt(length, seed=length) for length in lengths]
    with (
        running(
            small_checkpoint, max_num_seqs=3, kv_cache_memory_bytes=1 << 28, **ring()
        ) as engine,
        engine.chunks_of(200),
    ):
        together = engine.generate(prompts, max_tokens=12)
    alone = alone_from_blocks(small_checkpoint, prompts, max_tokens=12)
    for reference, answer in zip(alone, together, strict=True):
        difference(reference, answer)


@pytest.mark.parametrize(
    "caching",
    [
        pytest.param(True, marks=covers(spec="off", caching="on")),
        pytest.param(False, marks=covers(spec="off", caching="off")),
    ],
)
def test_a_preempted_request_fills_its_rings_again(small_checkpoint, caching):
    prompts = [prompt(40, seed=i) for i in range(10)]
    options = {
        "max_model_len": 512,
        "max_num_batched_tokens": 256,
        "enable_prefix_caching": caching,
    }
    with running(
        small_checkpoint, num_gpu_blocks_override=130, **options, **ring()
    ) as engine:
        together = engine.generate(prompts, max_tokens=100)
        assert engine.counter("vllm:num_preemptions") > 0
    alone = alone_from_blocks(small_checkpoint, prompts, max_tokens=100)
    for reference, answer in zip(alone, together, strict=True):
        difference(reference, answer)


def test_a_hit_whose_end_was_evicted_is_rolled_back_from_where_it_ends_now(
    small_checkpoint,
):
    ids = prompt(2048 + 65, seed=9)
    with running(
        small_checkpoint,
        max_model_len=2304,
        max_num_batched_tokens=128,
        num_gpu_blocks_override=95,
        **ring(),
    ) as engine:
        (cold,) = engine.generate([ids])
        hits = []
        for others in (2, 3):
            for seed in range(others):
                engine.generate([prompt(1100, seed=10 * others + seed)], max_tokens=1)
            (hit,) = engine.generate([ids])
            difference(cold, hit)
            hits.append(hit.cached)
    (reference,) = alone_from_blocks(small_checkpoint, [ids])
    difference(reference, cold)
    assert hits[0] > hits[1] > 0


def test_a_long_request_that_is_preempted_replays_the_end_of_its_prefix(
    small_checkpoint,
):
    shared = prompt(2048, seed=10)
    prompts = [shared + prompt(65, seed=seed) for seed in range(8)]
    options = {"max_model_len": 2304, "max_num_batched_tokens": 128}
    with (
        running(
            small_checkpoint, num_gpu_blocks_override=130, **options, **ring()
        ) as engine,
        starts(engine) as seen,
    ):
        together = engine.generate(prompts, max_tokens=150)
        assert engine.counter("vllm:num_preemptions") > 0
    assert sum(replay > 0 for _, replay in seen) > len(prompts) - 1
    alone = alone_from_blocks(small_checkpoint, prompts, max_tokens=150)
    for reference, answer in zip(alone, together, strict=True):
        difference(reference, answer)


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(name, marks=covers(spec=name, caching="on"))
        for name in ("dspark", "mtp")
    ],
)
def test_drafts_change_no_text_and_are_accepted_as_with_paged_state(request, method):
    """Rejected drafts never take the place of a row that is still to be read; after a hit a draft sees what it saw."""
    checkpoint = request.getfixturevalue(f"agreeing_{method}")
    speculative = {"method": method, "num_speculative_tokens": 5}
    prompts = [prompt(n, seed=n, vocabulary=500) for n in (700, 30, 1100, 126)]
    found = {}
    for layout, options in (("paged", {}), ("ring", ring())):
        with running(
            checkpoint,
            speculative_config=speculative,
            kv_cache_memory_bytes=1 << 28,
            **options,
        ) as engine:
            with watching(engine) as watch:
                cold = engine.generate(prompts, max_tokens=60)
                hits = engine.generate(prompts, max_tokens=60)
            accepted = [(row.start, row.accepted) for row in watch.rows if row.drafts]
            found[layout] = cold, hits, watch.acceptance(), accepted
            if layout == "ring":
                assert [hit.cached for hit in hits] == [
                    640,
                    0,
                    1024,
                    0,
                ]
    with running(checkpoint, kv_cache_memory_bytes=1 << 28) as engine:
        plain = engine.generate(prompts, max_tokens=60)
    for cold, hits, _, _ in found.values():
        for reference, *others in zip(plain, cold, hits, strict=True):
            for other in others:
                difference(reference, other)
    assert found["ring"][2] == pytest.approx(found["paged"][2], abs=0.02)
    assert 0.1 < found["ring"][2] < 1


@pytest.mark.parametrize(
    ("policy", "drafts", "tokens"),
    [
        ("exact", 0, 5504),
        ("exact", 5, 5632),
        ("atom", 0, 512),
        ("atom", 5, 512),
        ("window", 5, 128),
        ("300", 5, 384),
    ],
)
def test_policies_say_how_many_tokens(policy, drafts, tokens):
    """Of Flash: 43 · 127 = 5,461, and 128 more with a draft."""
    flash = build_config("flash-shaped", layers=43)
    config = DeepseekV4Config.from_hf(flash)
    assert rollback_tokens(policy, config, drafts) == tokens


def test_a_rollback_shorter_than_the_window_is_refused(small_checkpoint):
    few = "less than the sliding window of 128 tokens"
    with (
        pytest.raises(ValueError, match=few),
        running(small_checkpoint, **ring(100)),
    ):
        pass
