"""What vLLM's speculators ask of a draft and of its target, asked of ours."""

import ast
import inspect
import json
import logging
from pathlib import Path
from types import MethodType, SimpleNamespace

import pytest
import torch
import vllm
from adapters import (
    DSPARK,
    MTP,
    DraftRun,
    TargetRun,
    build,
    configuration,
    during,
    share,
)
from engines import SMALL, prompt
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.model_executor.models.registry import ModelRegistry
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator
from vllm.v1.worker.gpu.spec_decode.utils import get_drafter_hidden_states

from atom_vllm_bridge.checkpoint.make import make
from atom_vllm_bridge.dspark import AtomDSparkDraftModel
from atom_vllm_bridge.models.deepseek_v4.config import DeepseekV4Config
from atom_vllm_bridge.models.deepseek_v4.loading import iterate, load
from atom_vllm_bridge.models.deepseek_v4.local_state import LocalState
from atom_vllm_bridge.models.deepseek_v4.model import DeepseekV4Model
from atom_vllm_bridge.models.ops import registry
from atom_vllm_bridge.mtp import AtomDeepseekV4MTP
from atom_vllm_bridge.platforms.refusal import Refused
from atom_vllm_bridge.target import AtomDeepseekV4ForCausalLM

SPECULATORS = Path(vllm.__file__).parent / "v1/worker/gpu/spec_decode"
# Asked for only with an option that is off, and that vLLM refuses for a model without them.
OPTIONAL = {
    "get_top_tokens": "use_local_argmax_reduction",
    "apply_markov_bias_gathered": "dspark_draft_topk",
}
VOCABULARY = 1024
SETTINGS = settings(max_examples=12, deadline=None, derandomize=True, database=None)


@pytest.fixture(scope="module", autouse=True)
def default_ops_afterwards():
    yield
    registry.configure("")


@pytest.fixture(scope="module")
def dspark(small_dspark):
    """(target, draft) with weights, on ops that any device has."""
    config = configuration(small_dspark, DSPARK)
    target = build(AtomDeepseekV4ForCausalLM, config, small_dspark)
    draft = build(AtomDSparkDraftModel, config, small_dspark)
    share(draft, target)
    return target, draft


@pytest.fixture(scope="module")
def mtp(small_mtp):
    config = configuration(small_mtp, MTP)
    target = build(AtomDeepseekV4ForCausalLM, config, small_mtp)
    draft = build(AtomDeepseekV4MTP, config, small_mtp)
    share(draft, target)
    return target, draft


# Members and their signatures


def uses(source: str) -> dict[str, list[tuple[int, list[str | None]]]]:
    """Members of `self.model` that a speculator's source reads → of each call, positional arguments and keywords."""
    found: dict[str, list[tuple[int, list[str | None]]]] = {}
    called: dict[int, ast.Call] = {}
    tree = ast.parse((SPECULATORS / source).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called[id(node.func)] = node
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        if ast.unparse(node) == "self.model" and id(node) in called:
            name = "forward"
        elif ast.unparse(node.value) in ("self.model", "model"):
            name = node.attr
        else:
            continue
        calls = found.setdefault(name, [])
        call = called.get(id(node))
        if call is not None:
            keywords = [word.arg for word in call.keywords]
            # A dict of keywords is looked at in a test of its own.
            if None not in keywords:
                calls.append((len(call.args), keywords))
    return found


@pytest.mark.parametrize(
    ("draft", "sources"),
    [
        (
            AtomDSparkDraftModel,
            ("dspark/speculator.py", "dflash/speculator.py", "speculator.py"),
        ),
        (
            AtomDeepseekV4MTP,
            (
                "mtp/speculator.py",
                "target_dependent_ar/speculator.py",
                "speculator.py",
            ),
        ),
    ],
)
def test_every_member_that_a_speculator_uses_is_there_with_its_signature(
    draft, sources, request
):
    _, built = request.getfixturevalue(
        "dspark" if draft is AtomDSparkDraftModel else "mtp"
    )
    members: dict[str, list] = {}
    for source in sources:
        for name, calls in uses(source).items():
            members.setdefault(name, []).extend(calls)
    expected = {"forward", "compute_logits", "model"}
    unasked = set(OPTIONAL)
    if draft is AtomDeepseekV4MTP:
        # It is fed the target's streams as they are.
        unasked.add("combine_hidden_states")
    else:
        expected |= {
            "combine_hidden_states",
            "precompute_and_store_context_kv",
            "get_draft_kv_cache_layer_names",
            "get_draft_attn_causal",
            "compute_draft_logits",
            "markov_embed",
            "markov_bias",
            "map_draft_to_target",
            "compute_confidence",
            "draft_id_to_target_id",
        }
    assert expected <= members.keys()
    for name, calls in members.items():
        if name in unasked:
            continue
        assert hasattr(built, name), name
        for positional, keywords in calls:
            # Only multimodal targets hand over embeddings.
            words = [w for w in keywords if w and "multimodal" not in w]
            inspect.signature(getattr(built, name)).bind(
                *[None] * positional, **dict.fromkeys(words)
            )


def test_forward_takes_the_keywords_of_autoregressive_drafting():
    """Which vLLM collects in a dict."""
    inspect.signature(AtomDeepseekV4MTP.forward).bind(
        None, input_ids=0, positions=0, hidden_states=0, inputs_embeds=None
    )


def test_dspark_says_what_vllm_reads_off_it(dspark):
    _, draft = dspark
    assert draft.draft_id_to_target_id is None
    assert draft.model.confidence_head is not None
    assert draft.get_draft_attn_causal() == [False] * 3
    names = draft.get_draft_kv_cache_layer_names()
    assert names == [f"model.layers.{6 + i}.attn.window" for i in range(3)]
    ids = torch.tensor([3, 1, 2])
    assert torch.equal(draft.map_draft_to_target(ids), ids)
    assert not hasattr(draft, "has_own_lm_head")
    assert not hasattr(draft, "has_own_embed_tokens")


def test_the_target_says_what_vllm_reads_off_it(dspark, mtp):
    target, _ = dspark
    assert supports_eagle3(target)
    hidden = torch.zeros(3, 4)
    assert get_drafter_hidden_states(target, hidden) is hidden
    target, _ = mtp
    streams = get_drafter_hidden_states(target, hidden)
    assert streams.shape == (3, 4 * SMALL["hidden_size"])
    assert streams.data_ptr() == target.mtp_streams.data_ptr()


@pytest.mark.parametrize(
    ("architecture", "cls"),
    [
        ("DeepseekV4ForCausalLM", AtomDeepseekV4ForCausalLM),
        ("DSparkDraftModel", AtomDSparkDraftModel),
        ("DeepSeekV4MTPModel", AtomDeepseekV4MTP),
    ],
)
def test_vllms_names_resolve_to_our_classes(architecture, cls, dspark):
    assert ModelRegistry.models[architecture].load_model_cls() is cls


# Taps


@pytest.fixture
def untapped(small_dspark):
    return build(AtomDeepseekV4ForCausalLM, configuration(small_dspark, DSPARK))


@pytest.mark.parametrize("layers", [(0,), (0, 3), (7,), (3, 7), (-1,), ()])
def test_taps_before_the_first_and_beyond_the_last_layer_are_refused(untapped, layers):
    with pytest.raises(ValueError, match="must lie between 1 and 6"):
        untapped.set_aux_hidden_state_layers(layers)
    assert untapped.aux_layers is None


def test_taps_are_fixed_when_the_model_is_loaded(untapped):
    untapped.set_aux_hidden_state_layers((6, 2, 2))
    assert untapped.aux_layers == (2, 6)
    untapped.set_aux_hidden_state_layers((2, 6))
    for other in ((2,), (2, 5), (1, 2, 6)):
        with pytest.raises(RuntimeError, match="cannot become"):
            untapped.set_aux_hidden_state_layers(other)
    assert untapped.aux_layers == (2, 6)


def test_without_taps_in_the_config_it_is_said(untapped):
    with pytest.raises(ValueError, match="dspark_target_layer_ids is missing"):
        untapped.get_eagle3_default_aux_hidden_state_layers()


def cut(checkpoint, depth):
    """The target with its first `depth` layers alone."""
    hf = json.loads((checkpoint / "config.json").read_text())
    hf |= {
        "num_hidden_layers": depth,
        "compress_ratios": hf["compress_ratios"][:depth],
        "num_hash_layers": min(depth, hf["num_hash_layers"]),
    }
    model = DeepseekV4Model(DeepseekV4Config.from_hf(hf), dtype=torch.float32)
    gone = tuple(f"layers.{i}." for i in range(depth, 6))
    load(
        model.weight_slots(),
        iterate(checkpoint, progress=False),
        ignore=lambda name: name.startswith(("mtp.", *gone)),
    )
    return model


def test_a_tap_is_the_mean_over_the_streams_after_its_layer(small_dspark, dspark):
    """For every layer: what a model that ends there has in its streams. Two requests, the second of one token."""
    chunks, ids = [(0, 0, 150), (1, 0, 1)], torch.tensor(prompt(151))
    tapped = build(
        AtomDeepseekV4ForCausalLM, configuration(small_dspark, DSPARK), small_dspark
    )
    tapped.set_aux_hidden_state_layers((6, 5, 4, 3, 2, 1))
    hidden, taps = TargetRun(tapped).step(ids, chunks)
    assert len(taps) == 6
    assert hidden.shape == taps[0].shape == (151, SMALL["hidden_size"])
    for depth, tap in enumerate(taps, 1):
        model = cut(small_dspark, depth)
        batch, states = LocalState(model.config, 2, 512, model.codec).step(chunks)
        with torch.inference_mode():
            streams, _ = model(ids, batch, states)
        assert torch.equal(tap, streams.mean(1)), depth
    few = build(
        AtomDeepseekV4ForCausalLM, configuration(small_dspark, DSPARK), small_dspark
    )
    few.set_aux_hidden_state_layers((2, 6))
    again, (second, sixth) = TargetRun(few).step(ids, chunks)
    assert torch.equal(again, hidden)
    assert torch.equal(second, taps[1])
    assert torch.equal(sixth, taps[5])


# Placeholder ids


def placeholders(size):
    """Ids of which some are negative."""
    return st.lists(
        st.one_of(st.just(-1), st.integers(0, VOCABULARY - 1)),
        min_size=size,
        max_size=size,
    ).map(torch.tensor)


@SETTINGS
@given(ids=placeholders(9))
def test_placeholder_ids_count_as_zero_in_the_target(mtp, ids):
    """In its embedding and in the tables of its hash layers."""
    target, _ = mtp
    assert {layer.ffn.tid2eid is not None for layer in target.model.layers} == {
        True,
        False,
    }
    zeros = ids.clamp(min=0)
    chunks = [(0, 0, 5), (1, 0, 4)]
    got, want = (TargetRun(target).step(x, chunks) for x in (ids, zeros))
    assert torch.equal(got, want)
    assert torch.equal(target.embed_input_ids(ids), target.embed_input_ids(zeros))


@SETTINGS
@given(ids=placeholders(10))
def test_placeholder_ids_count_as_zero_in_dspark(dspark, ids):
    _, draft = dspark
    zeros = ids.clamp(min=0)
    outcomes = []
    for x in (ids, zeros):
        run = DraftRun(draft, draft.windows)
        positions, metadata = run.prepare([(0, 130, 5), (1, 3, 5)])
        with during(metadata), torch.inference_mode():
            hidden = draft(input_ids=x, positions=positions, inputs_embeds=None)
            markov = draft.markov_embed(x)
            outcomes.append((hidden, markov, draft.markov_bias(markov)))
    for got, want in zip(*outcomes, strict=True):
        assert torch.equal(got, want)


@SETTINGS
@given(ids=placeholders(7))
def test_placeholder_ids_count_as_zero_in_mtp(mtp, ids):
    _, draft = mtp
    streams = torch.randn(7, 4 * SMALL["hidden_size"])
    outcomes = []
    for x in (ids, ids.clamp(min=0)):
        run = DraftRun(draft, [draft.window])
        positions, metadata = run.prepare([(0, 2, 4), (1, 0, 3)])
        with during(metadata), torch.inference_mode():
            outcomes.append(draft(x, positions, streams, inputs_embeds=None))
    assert torch.equal(*outcomes)


# The context's keys


def context(draft, count, seed=0):
    g = torch.Generator().manual_seed(seed)
    taps = torch.randn(count, 3 * SMALL["hidden_size"], generator=g)
    return draft.combine_hidden_states(taps)


def test_context_without_slots_is_written_nowhere(dspark):
    _, draft = dspark
    run = DraftRun(draft, draft.windows)
    states, positions = context(draft, 6), torch.arange(6)
    nowhere = torch.full((6,), -1)
    with torch.inference_mode():
        for slots in (None, [None] * 3, nowhere, [nowhere] * 3, [None, nowhere, None]):
            draft.precompute_and_store_context_kv(states, positions, slots)
            assert not run.memory().any()
        draft.precompute_and_store_context_kv(states, positions)
        assert not run.memory().any()


def test_context_without_caches_is_computed_and_dropped(small_dspark):
    """vLLM profiles before there are any."""
    draft = build(AtomDSparkDraftModel, configuration(small_dspark, DSPARK))
    for parameter in draft.parameters():
        parameter.fill_(0.1)
    assert {window.kv_cache.numel() for window in draft.windows} == {0}
    draft.precompute_and_store_context_kv(context(draft, 6), torch.arange(6), None)


def test_one_slot_mapping_serves_all_stages_and_a_list_each_its_own(dspark):
    _, draft = dspark
    states, positions = context(draft, 6), torch.arange(6)
    slots = DraftRun(draft, draft.windows).slots([(1, 0, 6)])
    outcomes = []
    with torch.inference_mode():
        for given_ in (slots, [slots] * 3, [slots[:6] for _ in range(3)]):
            run = DraftRun(draft, draft.windows)
            draft.precompute_and_store_context_kv(states, positions, given_)
            outcomes.append(run.memory())
        assert (outcomes[0].flatten(0, 2).any(-1)).sum() == 3 * 6
        assert all(torch.equal(outcome, outcomes[0]) for outcome in outcomes)
        run = DraftRun(draft, draft.windows)
        draft.precompute_and_store_context_kv(states, positions, [None, slots, None])
        found = run.memory()
    assert torch.equal(found[1], outcomes[0][1])
    assert not found[[0, 2]].any()


# Sampling


class Sampler:
    """As much of vLLM's speculator as its own sampling loop reads."""

    _sample_sequential = DSparkSpeculator._sample_sequential
    _sample_logits = DSparkSpeculator._sample_logits
    _draft_topk = draft_logits = None
    use_confidence_head = True

    def __init__(self, draft, ids, k):
        requests = len(ids) // k
        self.model, self.num_speculative_steps = draft, k
        rows = torch.arange(len(ids))
        self.sample_indices = self.sample_idx_mapping = self.sample_pos = rows
        self._step_cols = torch.arange(k, dtype=torch.int32)
        self._anchor_idx = torch.arange(requests) * k
        self.input_buffers = SimpleNamespace(input_ids=ids)
        self.draft_tokens = torch.full((requests, k), -7)
        self.draft_token_confidence_probs = torch.full((requests, k), torch.nan)

    def _maybe_predict_acceptance(self, *_):
        """There is a confidence head."""


@pytest.mark.parametrize("k", [1, 3, 5, 8])
def test_vllms_greedy_sampling_is_the_explicit_loop(dspark, k):
    _, draft = dspark
    ids = torch.full((2 * k,), 1023, dtype=torch.int32)
    ids[::k] = torch.tensor([17, 400], dtype=torch.int32)
    hidden = torch.randn(
        2 * k, SMALL["hidden_size"], generator=torch.Generator().manual_seed(k)
    )
    sampler = Sampler(draft, ids, k)
    with torch.inference_mode():
        sampler._sample_sequential(2, hidden)
    W1, W2 = draft.model.markov_w1, draft.model.markov_w2
    w = draft.model.confidence_head
    for request, anchor in enumerate((17, 400)):
        previous = anchor
        for step in range(k):
            h = hidden[request * k + step : request * k + step + 1]
            logits = draft.compute_draft_logits(h)[0] + W1[previous] @ W2
            chance = torch.sigmoid(w @ torch.cat((h[0], W1[previous])))
            got = sampler.draft_token_confidence_probs[request, step]
            assert abs(got - chance) <= 1e-5
            previous = int((logits == logits.max()).nonzero()[0])
            best = logits.topk(2).values
            assert best[0] - best[1] > 1e-5
            assert sampler.draft_tokens[request, step] == previous


def test_a_tie_takes_the_lowest_id(dspark):
    _, draft = dspark
    logits = torch.zeros(2, VOCABULARY)
    logits[1, [900, 301, 302]] = 1.0
    sampler = Sampler(draft, torch.zeros(2, dtype=torch.int32), 1)
    got = MethodType(DSparkSpeculator._sample_logits, sampler)(logits, None, None, 0)
    assert got.tolist() == [0, 301]


# What the checkpoint holds


def checkpoint_of(tmp_path, **overrides):
    return make(
        tmp_path / "checkpoint",
        layout="bf16",
        overrides=SMALL | {"num_hidden_layers": 3} | overrides,
    )


def test_without_its_confidence_head_the_draft_does_without(tmp_path, caplog):
    directory = checkpoint_of(tmp_path, enable_confidence_head=False)
    hf = json.loads((directory / "config.json").read_text())
    # What counts is the index, not what the config promises.
    hf["enable_confidence_head"] = True
    (directory / "config.json").write_text(json.dumps(hf))
    config = configuration(directory, DSPARK)
    logger = logging.getLogger("vllm.atom_vllm_bridge")
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.INFO, logger.name):
            draft = build(AtomDSparkDraftModel, config, directory)
    finally:
        logger.removeHandler(caplog.handler)
    assert draft.model.confidence_head is None
    lines = [m for m in caplog.messages if "confidence" in m]
    assert len(set(lines)) == 1
    assert "no confidence head" in lines[0]
    assert all(p.isfinite().all() for p in draft.parameters())


def test_with_a_confidence_head_nothing_is_said(small_dspark, caplog):
    logger = logging.getLogger("vllm.atom_vllm_bridge")
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.INFO, logger.name):
            build(AtomDSparkDraftModel, configuration(small_dspark, DSPARK))
    finally:
        logger.removeHandler(caplog.handler)
    assert not [m for m in caplog.messages if "confidence" in m]


@pytest.mark.parametrize("stages", [2, 4])
def test_stages_are_those_of_the_index_whatever_the_config_says(tmp_path, stages):
    directory = checkpoint_of(tmp_path, n_mtp_layers=stages)
    hf = json.loads((directory / "config.json").read_text())
    del hf["n_mtp_layers"]
    (directory / "config.json").write_text(json.dumps(hf))
    draft = build(AtomDSparkDraftModel, configuration(directory, DSPARK), directory)
    assert len(draft.model.stages) == len(draft.windows) == stages
    names = [f"model.layers.{3 + i}.attn.window" for i in range(stages)]
    assert draft.get_draft_kv_cache_layer_names() == names
    assert draft.get_draft_attn_causal() == [False] * stages


def test_a_missing_stage_is_named_before_anything_is_loaded(tmp_path):
    directory = checkpoint_of(tmp_path)
    (shard,) = directory.glob("*.safetensors")
    tensors = {n: t for n, t in load_file(shard).items() if "mtp.1." not in n}
    save_file(tensors, shard, metadata={"format": "pt"})
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] = dict.fromkeys(tensors, shard.name)
    index.write_text(json.dumps(content))
    with pytest.raises(Refused, match=r"mtp\.1 is missing, though mtp\.2 is there"):
        configuration(directory, DSPARK)
