"""A request gives the same, whatever its chunks, its company, its hits and its preemptions (float32)."""

from functools import partial

import pytest
from engines import difference, prompt, running

CHUNKS = [1, 63, 64, 65, 127, 128, 129, 256]
TAILS = [1, 127, 128, 129, 255, 256, 384, 511, 512, 513]
# The longest prefix takes seconds for each tail.
PREFIXES = {2048: TAILS, 6144: TAILS, 17408: TAILS[::3]}

covers = partial(
    pytest.mark.covers,
    spec="off",
    layout="paged",
    graphs="none",
    ranks="one",
    kv="float32",
)


@pytest.fixture(scope="module")
def engine(small_checkpoint):
    with running(
        small_checkpoint,
        max_model_len=18432,
        max_num_batched_tokens=1024,
        kv_cache_memory_bytes=1 << 29,
    ) as engine:
        yield engine


def cold(engine, prompts, **sampling):
    """Each alone, without a hit."""
    answers = []
    for ids in prompts:
        engine.reset_prefix_cache()
        answers += engine.generate([ids], **sampling)
        assert answers[-1].cached == 0
    return answers


@pytest.mark.parametrize("chunk", CHUNKS)
def test_any_chunk_size_gives_the_same(engine, chunk):
    ids = prompt(700, seed=chunk)
    (reference,) = cold(engine, [ids])
    with engine.chunks_of(chunk):
        (chunked,) = cold(engine, [ids])
    difference(reference, chunked)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_short_last_chunk_after_a_long_prefix_gives_the_same(engine, prefix):
    """Cold: the prefix in chunks of 1,024, the tail in a chunk of its own. Hit: only the tail, after a hit of the prefix."""
    whole = prompt(prefix + max(TAILS), seed=prefix)
    for tail in PREFIXES[prefix]:
        ids = whole[: prefix + tail]
        engine.reset_prefix_cache()
        (first,) = engine.generate([ids], max_tokens=4)
        (hit,) = engine.generate([ids], max_tokens=4)
        assert first.cached == 0
        assert hit.cached == (len(ids) - 1) // 128 * 128
        difference(first, hit)


@covers(caching="on", scheduling="async")
def test_hits_land_on_128_tokens(engine):
    for shared, expected in ((130, 128), (640, 640), (900, 896)):
        prefix = prompt(shared, seed=shared)
        first, second = prefix + prompt(40, seed=1), prefix + prompt(40, seed=2)
        (reference,) = cold(engine, [second])
        engine.reset_prefix_cache()
        engine.generate([first])
        (hit,) = engine.generate([second])
        assert hit.cached == expected
        difference(reference, hit)


def test_batch_mates_of_every_kind_change_nothing(engine):
    """A long prefill in chunks, short prompts, a hit, and decodes of different lengths, all at once."""
    lengths = [1, 3, 4, 5, 63, 64, 127, 128, 129, 300, 511, 1500]
    prompts = [prompt(length, seed=length) for length in lengths]
    alone = cold(engine, prompts, max_tokens=16)
    engine.reset_prefix_cache()
    engine.generate([prompts[-2]], max_tokens=1)
    with engine.chunks_of(200):
        together = engine.generate(prompts, max_tokens=16)
    assert together[-2].cached == 384
    for reference, answer in zip(alone, together, strict=True):
        difference(reference, answer)


def test_more_requests_over_time_than_slots(small_checkpoint):
    prompts = [prompt(20 + 37 * i % 300, seed=i) for i in range(24)]
    with running(small_checkpoint, max_num_seqs=4) as engine:
        alone = cold(engine, prompts)
        engine.reset_prefix_cache()
        together = engine.generate(prompts)
    for reference, answer in zip(alone, together, strict=True):
        difference(reference, answer)


@pytest.mark.parametrize(
    "caching",
    [
        pytest.param(True, marks=covers(caching="on")),
        pytest.param(False, marks=covers(caching="off")),
    ],
)
def test_a_preempted_request_resumes_as_if_nothing_had_happened(
    small_checkpoint, caching
):
    """Ten requests start in few blocks, and cannot all grow past their first 128 tokens in them."""
    prompts = [prompt(40, seed=i) for i in range(10)]
    options = {
        "max_model_len": 512,
        "max_num_batched_tokens": 256,
        "enable_prefix_caching": caching,
    }
    with running(small_checkpoint, **options) as engine:
        alone = [engine.generate([ids], max_tokens=100)[0] for ids in prompts]
        assert engine.counter("vllm:num_preemptions") == 0
    with running(small_checkpoint, num_gpu_blocks_override=225, **options) as engine:
        together = engine.generate(prompts, max_tokens=100)
        assert engine.counter("vllm:num_preemptions") > 0
    for reference, answer in zip(alone, together, strict=True):
        difference(reference, answer)


def test_a_freed_block_may_be_reused_at_once(small_checkpoint):
    """Without prefix caching vLLM hands out the blocks freed last; whatever they hold must not be read."""
    first, second = prompt(700, seed=1), prompt(500, seed=2)
    with running(small_checkpoint, enable_prefix_caching=False) as engine:
        (reference,) = engine.generate([second])
        engine.generate([first])
        (after,) = engine.generate([second])
        assert after.cached == 0
    assert after.tokens == reference.tokens
    difference(reference, after)


def test_a_hit_right_after_its_blocks_were_freed_and_reused(small_checkpoint):
    """The pool is small, so that a new request takes blocks of the old one: a hit may be short, never wrong."""
    shared = prompt(640, seed=3)
    with running(
        small_checkpoint,
        max_model_len=768,
        max_num_batched_tokens=256,
        num_gpu_blocks_override=260,
    ) as engine:
        (reference,) = engine.generate([[*shared, 5]])
        hits = []
        for seed in range(8):
            engine.generate([prompt(400, seed=100 + seed)])
            (answer,) = engine.generate([[*shared, 5]])
            difference(reference, answer)
            hits.append(answer.cached)
    assert set(hits) <= {0, 128, 256, 384, 512, 640}
    assert any(hits)
