"""Asynchronous scheduling and idle ranks: nothing is torn, nothing is written for nobody, and the text stays the same."""

import re
from collections import deque
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import difference, prompt, running
from startup_logs import startup_table
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.worker.gpu import buffer_utils

from atom_vllm_bridge.attention import AtomMetadata

PACKAGE = Path(__file__).resolve().parents[2] / "atom_vllm_bridge"
LENGTH = 512
OPTIONS = {
    "max_model_len": LENGTH,
    # As few as the requests that run at once: the slots of an idle rank's batch are then those of live requests.
    "max_num_seqs": 3,
    "max_num_batched_tokens": 256,
    "kv_cache_memory_bytes": 1 << 26,
}
DRAFTS = {"dspark": {"method": "dspark"}, "mtp": {"method": "mtp"}}
LIVE = [prompt(30, seed=1), prompt(131, seed=2), prompt(5, seed=3)]
WORDS = StructuredOutputsParams(regex=r"[a-z]{3,6}( [a-z]{3,6}){4}\.")


class DelayedCopy:
    """A staging buffer of vLLM's pool before a slow copy engine: what is handed out is read when the device gets to it."""

    def __init__(self, size, dtype):
        self.cpu = torch.zeros(size, dtype=dtype)
        self.np = self.cpu.numpy()

    def uva(self, n=None):
        return lambda: self.cpu[:n].clone()


def torn_steps(monkeypatch, depth: int, in_flight: int) -> list[int]:
    """Steps whose copy delivered another step's values, with `in_flight` steps begun before the first has been copied."""
    for name in ("UvaBuffer", "NonUvaBuffer"):
        monkeypatch.setattr(buffer_utils, name, DelayedCopy)
    pool = buffer_utils.UvaBufferPool(8, torch.int32, max_concurrency=depth)
    begun, torn = deque(), []
    for step in range(20):
        begun.append((step, pool.copy_to_uva(np.full(8, step, dtype=np.int32))))
        if len(begun) == in_flight:
            done, copy = begun.popleft()
            if set(copy().tolist()) != {done}:
                torn.append(done)
    return torn


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_a_pool_as_deep_as_the_steps_in_flight_is_never_torn(monkeypatch, in_flight):
    assert torn_steps(monkeypatch, in_flight, in_flight) == []


@pytest.mark.parametrize("in_flight", [2, 3])
def test_without_that_depth_every_late_copy_is_torn(monkeypatch, in_flight):
    torn = torn_steps(monkeypatch, in_flight - 1, in_flight)
    assert torn == list(range(20 - in_flight + 1))


def test_the_package_stages_nothing_itself():
    """What reaches the device goes through vLLM's pools, or is there already."""
    staging = re.compile(r"pin_memory|non_blocking|cuda\.Stream")
    sources = {path: path.read_text() for path in PACKAGE.rglob("*.py")}
    assert sources
    assert [str(path) for path, text in sources.items() if staging.search(text)] == []


def work(engine) -> dict:
    """Requests of many kinds, as many at once as there are slots."""
    several = [prompt(length, seed=length) for length in (1, 4, 129, 300)]
    words = {"structured_outputs": WORDS, "ignore_eos": False, "logprobs": 1}
    done = {"several": engine.generate(several, max_tokens=16)}
    for tokens in (1, 2, 7):
        done[f"{tokens} tokens"] = engine.generate([prompt(40, seed=4)], tokens)
    for left in (9, 2, 1):
        ids = prompt(LENGTH - left, seed=5)
        done[f"{left} tokens left"] = engine.generate([ids], max_tokens=left)
    done["words"] = engine.generate([prompt(20, seed=6)], max_tokens=64, **words)
    return done


def same(expected: dict, found: dict) -> None:
    for what, answers in expected.items():
        for reference, answer in zip(answers, found[what], strict=True):
            if what == "words":
                assert answer.tokens == reference.tokens
            else:
                assert len(answer.tokens) == len(reference.tokens)
                difference(reference, answer)


@contextmanager
def drafts_scheduled(engine):
    """How many drafts each decoding request was given to verify, step by step."""
    counts = []
    scheduler = engine.scheduler

    def schedule(*args, **kwargs):
        output = type(scheduler).schedule(scheduler, *args, **kwargs)
        drafted = output.scheduled_spec_decode_tokens
        counts.extend(len(drafted.get(r, ())) for r in output.num_scheduled_tokens)
        return output

    scheduler.schedule = schedule
    try:
        yield counts
    finally:
        del scheduler.schedule


@pytest.fixture(scope="module")
def checkpoints(small_dspark, small_mtp):
    return {"dspark": small_dspark, "mtp": small_mtp}


@pytest.fixture(scope="module")
def without_drafts(small_checkpoint):
    with running(small_checkpoint, **OPTIONS) as engine:
        done = work(engine)
        tokenizer = engine.llm.get_tokenizer()
        text = tokenizer.decode(done["words"][0].tokens, skip_special_tokens=True)
        assert re.fullmatch(WORDS.regex, text.strip())
        return done


@pytest.fixture(scope="module", params=list(DRAFTS))
def engine(request, checkpoints, without_drafts):
    """With a draft of the trained length, scheduled asynchronously."""
    method = request.param
    options = OPTIONS | {"speculative_config": DRAFTS[method]}
    with running(checkpoints[method], **options) as engine:
        yield engine


def config_of(engine):
    return engine.llm.llm_engine.vllm_config


def layers_of(engine):
    return config_of(engine).compilation_config.static_forward_context


def memory_of(engine) -> torch.Tensor:
    """All caches' bytes: they share one allocation."""
    (storage,) = {
        layer.kv_cache.untyped_storage().data_ptr(): layer.kv_cache.untyped_storage()
        for layer in layers_of(engine).values()
    }.values()
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def pools_within(owner, seen: set[int]) -> list[buffer_utils.UvaBufferPool]:
    """The staging pools that the runner's objects hold."""
    found = []
    for value in vars(owner).values():
        ours = type(value).__module__.startswith("vllm.v1.worker.gpu.")
        if ours and hasattr(value, "__dict__") and id(value) not in seen:
            seen.add(id(value))
            if isinstance(value, buffer_utils.UvaBufferPool):
                found.append(value)
            found += pools_within(value, seen)
    return found


def test_vllms_pools_are_as_deep_as_the_batches_in_flight(engine):
    config = config_of(engine)
    assert config.scheduler_config.async_scheduling
    assert engine.core.batch_queue_size == config.max_concurrent_batches == 2
    pools = pools_within(engine.runner, set())
    assert len(pools) > 10
    assert min(pool.max_concurrency for pool in pools) >= config.max_concurrent_batches


IDS = torch.tensor([5, -1, 7, -1])
ZEROS = IDS.clamp(min=0)
# The last of a group of 4 and of one of 128 tokens among them.
POSITIONS = torch.arange(124, 128)


@contextmanager
def step_of_four(engine, slots):
    """A forward of one request, 4 tokens of 128, over blocks that are in use."""
    metadata = {
        name: AtomMetadata(
            query_start_loc=torch.tensor([0, 4], dtype=torch.int32),
            seq_lens=torch.tensor([128], dtype=torch.int32),
            block_table=torch.arange(1, 33, dtype=torch.int32).unsqueeze(0),
            slot_mapping=torch.tensor(slots),
            max_query_len=4,
            max_seq_len=128,
            block_size=layer.spec.block_size,
        )
        for name, layer in layers_of(engine).items()
    }
    with (
        torch.inference_mode(),
        set_forward_context(metadata, config_of(engine), num_tokens=4),
    ):
        yield


def outputs(engine, ids, slots) -> list[torch.Tensor]:
    """Everything that target and draft make of `ids`."""
    draft, found = engine.runner.speculator.model, []
    with step_of_four(engine, slots):
        hidden = engine.model(ids, POSITIONS)
        hidden, taps = hidden if isinstance(hidden, tuple) else (hidden, None)
        found += [hidden, engine.model.embed_input_ids(ids), draft.embed_input_ids(ids)]
        if taps is None:
            streams = engine.model.get_mtp_target_hidden_states()[:4].clone()
            found.append(draft(ids, POSITIONS, streams))
            found.append(draft.compute_logits(found[-1]))
        else:
            context = draft.combine_hidden_states(torch.cat(taps, -1))
            each = [torch.tensor(slots)] * len(draft.windows)
            for to in (torch.tensor(slots), each, None):
                draft.precompute_and_store_context_kv(context, POSITIONS, to)
            found.append(draft(ids, POSITIONS))
            found.append(draft.compute_logits(found[-1]))
            found.append(draft.markov_bias(draft.markov_embed(ids)))
    return found


def poison(engine) -> torch.Tensor:
    memory = memory_of(engine)
    memory.view(torch.float32).normal_(generator=torch.Generator().manual_seed(0))
    return memory.clone()


def test_a_placeholder_is_read_as_token_0(engine):
    poison(engine)
    found = outputs(engine, IDS, [-1] * 4)
    for placeholder, zero in zip(found, outputs(engine, ZEROS, [-1] * 4), strict=True):
        assert placeholder.isfinite().all()
        torch.testing.assert_close(placeholder, zero, rtol=0, atol=0)


def test_without_slots_no_byte_of_any_cache_changes(engine):
    before = poison(engine)
    outputs(engine, IDS, [-1] * 4)
    assert torch.equal(memory_of(engine), before)


def test_among_slots_a_placeholder_writes_nothing(engine):
    before = poison(engine)
    windows = {n: c for n, c in layers_of(engine).items() if n.endswith(".window")}
    old = {name: layer.kv_cache.clone() for name, layer in windows.items()}
    # Rows 60 and 62 of block 2 of the windows; in blocks of 4, 8 and 128 tokens, of one pool, the same slots.
    slots = [2 * 64 + 60, -1, 2 * 64 + 62, -1]
    outputs(engine, IDS, slots)
    touched = {slots[0] // size for size in (4, 8, 64, 128)}
    assert not torch.equal(memory_of(engine), before)
    for name, layer in windows.items():
        changed = (layer.kv_cache != old[name]).any(-1).nonzero().tolist()
        assert {block for block, _ in changed} <= touched, name
        assert [row for block, row in changed if block == 2] == [60, 62], name
    engine.reset_prefix_cache()


class IdleSteps:
    """What the runner's own dummy decodes do, when they run between the steps of live requests."""

    def __init__(self, engine, requests: int):
        self.engine, self.runner, self.requests = engine, engine.runner, requests
        self.real_step = engine.core.step_fn
        self.query = 1 + config_of(engine).num_speculative_tokens
        self.aliased, self.metadata, self.drafts, self.run = [], [], [], 0

    def step(self):
        live = set(self.runner.req_states.req_id_to_index.values())
        self.aliased.append(live & set(range(self.requests)))
        states = self.runner.req_states
        kept = (memory_of(self.engine), states.draft_tokens, states.last_sampled_tokens)
        before = [tensor.clone() for tensor in kept]
        with self.watched():
            if self.requests == 1:
                self.engine.core.execute_dummy_batch()
            else:
                tokens = self.requests * self.query
                self.runner._dummy_run(tokens, uniform_decode=True)
        for tensor, was in zip(kept, before, strict=True):
            assert torch.equal(tensor, was)
        self.run += 1
        return self.real_step()

    @contextmanager
    def watched(self):
        """Keep the metadata that target and draft run with."""
        handles = [
            module.register_forward_pre_hook(
                lambda *_, to=to: to.append(get_forward_context().attn_metadata)
            )
            for module, to in (
                (self.runner.model, self.metadata),
                (self.runner.speculator.model, self.drafts),
            )
        ]
        yield
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("requests", [1, 3])
def test_an_idle_ranks_batch_leaves_caches_and_live_requests_alone(engine, requests):
    """One request, as an idle rank runs it, and as many as there are live ones, whose slots it then numbers as its own."""
    engine.reset_prefix_cache()
    expected = engine.generate(LIVE, max_tokens=10)
    engine.reset_prefix_cache()
    idle = IdleSteps(engine, requests)
    engine.core.step_fn = idle.step
    try:
        found = engine.generate(LIVE, max_tokens=10)
    finally:
        engine.core.step_fn = idle.real_step
    for reference, answer in zip(expected, found, strict=True):
        assert answer.tokens == reference.tokens
        assert answer.logprobs == reference.logprobs
    assert idle.run >= 5
    assert set(range(requests)) in idle.aliased
    assert len(idle.metadata) == idle.run
    targets = layers_of(engine).keys() - engine.runner.speculator.draft_attn_layer_names
    for by_layer in idle.metadata:
        assert by_layer.keys() >= targets
        for of in by_layer.values():
            assert of.query_start_loc.tolist() == [
                i * idle.query for i in range(requests + 1)
            ]
            assert of.seq_lens.tolist() == [idle.query] * requests
            assert of.max_query_len == idle.query
    for by_layer in idle.metadata + idle.drafts:
        for of in by_layer.values():
            assert not of.block_table.any()
            assert (of.slot_mapping == -1).all()


def test_asynchronous_drafting_gives_the_text_without_drafts(engine, without_drafts):
    engine.reset_prefix_cache()
    with drafts_scheduled(engine) as counts:
        found = work(engine)
    same(without_drafts, found)
    drafted = engine.counter("vllm:spec_decode_num_draft_tokens")
    accepted = engine.counter("vllm:spec_decode_num_accepted_tokens")
    assert accepted < drafted
    # None in a prefill and with one token left; fewer where less than a block is left; else all.
    length = config_of(engine).num_speculative_tokens
    assert {0, length} <= set(counts) <= set(range(length + 1))
    if length > 1:
        assert set(counts) & set(range(1, length))


OTHER_LENGTHS = {
    "dspark, 3 of 5": (
        {"method": "dspark", "num_speculative_tokens": 3},
        "dspark, K = 3 (trained for 5; drafts of another length are accepted less)",
    ),
    "mtp, 3 of 1": (
        {"method": "mtp", "num_speculative_tokens": 3},
        "mtp, K = 3 (trained for 1; drafts of another length are accepted less)",
    ),
    "dspark, 7, 2 or 0 of 5": (
        {
            "method": "dspark",
            "num_speculative_tokens": 7,
            "num_speculative_tokens_per_batch_size": [(1, 1, 7), (2, 2, 2), (3, 3, 0)],
        },
        "dspark, K = 7 (trained for 5; drafts of another length are accepted less)",
    ),
}


@pytest.mark.parametrize("which", OTHER_LENGTHS)
def test_another_length_gives_the_same_text_and_the_table_says_so(
    checkpoints, without_drafts, which
):
    """Those of one length are scheduled synchronously, so that both kinds of scheduling are compared with no drafts."""
    speculative, said = OTHER_LENGTHS[which]
    by_size = "num_speculative_tokens_per_batch_size" in speculative
    options = {"speculative_config": speculative, "async_scheduling": by_size}
    with ExitStack() as stack:
        with startup_table() as table:
            other = running(checkpoints[speculative["method"]], **OPTIONS, **options)
            engine = stack.enter_context(other)
        with drafts_scheduled(engine) as counts:
            same(without_drafts, work(engine))
    assert table["speculation"] == said
    assert table["async scheduling"] == ("on" if by_size else "off")
    assert {0, speculative["num_speculative_tokens"]} <= set(counts)
    if by_size:
        assert 2 in counts
