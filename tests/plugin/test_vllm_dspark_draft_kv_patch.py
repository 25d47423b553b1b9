"""The draft's cache: a group of its own beside the target's, as good after a prefix hit as before, in every process the same."""

import importlib
import pickle
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from engines import SMALL, prompt, running
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core import kv_cache_utils as planner
from vllm.v1.kv_cache_layout import KVCacheLayout

from atom_vllm_bridge.attention import AtomBackend, AtomMetadata
from atom_vllm_bridge.attention.backend import AtomMetadataBuilder
from atom_vllm_bridge.checkpoint.presets import DSPARK_STAGES, build_config
from atom_vllm_bridge.dspark import AtomDSparkDraftModel
from atom_vllm_bridge.kv_cache import (
    CompressorSpec,
    DraftWindowSpec,
    HeavyCompressorSpec,
    WindowSpec,
    cache_spec,
    draft_spec,
    spec_of_group,
)
from atom_vllm_bridge.model_state import AtomModelState
from atom_vllm_bridge.models.deepseek_v4.config import DeepseekV4Config
from atom_vllm_bridge.models.deepseek_v4.dspark import DSparkConfig
from atom_vllm_bridge.models.deepseek_v4.state import (
    CacheShape,
    layer_caches,
    window_cache,
)
from atom_vllm_bridge.models.quantization.kv_codecs import kv_codec
from atom_vllm_bridge.mtp import AtomDeepseekV4MTP
from atom_vllm_bridge.platforms.cpu import AtomCpuPlatform
from atom_vllm_bridge.platforms.refusal import Refused
from atom_vllm_bridge.settings import Settings
from atom_vllm_bridge.target import AtomDeepseekV4ForCausalLM
from atom_vllm_bridge.weights import CheckpointFormat

BLOCK = 128
STAGES = [f"model.layers.{6 + stage}.attn.window" for stage in range(DSPARK_STAGES)]
DSPARK = {"method": "dspark", "num_speculative_tokens": 5}
MTP = {"method": "mtp", "num_speculative_tokens": 1}
# Prompt tokens that two requests share → how many of them the second is spared.
HITS = {130: 128, 640: 640, 900: 896}
HITS_WITH_MTP = {130: 0, 640: 512, 900: 768}


def configuration(checkpoint, speculative):
    config = EngineArgs(
        model=str(checkpoint),
        max_model_len=2048,
        max_num_batched_tokens=1000,
        enforce_eager=True,
        speculative_config=speculative,
    ).create_engine_config()
    config.cache_config.kv_cache_layout = KVCacheLayout.BLHNC.name
    return config


def layers_of(config):
    return config.compilation_config.static_forward_context


def test_the_stages_get_their_caches_when_the_draft_is_built_and_not_before(
    small_dspark,
):
    config = configuration(small_dspark, DSPARK)
    with set_current_vllm_config(config):
        AtomDeepseekV4ForCausalLM(vllm_config=config)
        targets = dict(layers_of(config))
        assert not {type(layer.spec) for layer in targets.values()} & {DraftWindowSpec}
        draft = AtomDSparkDraftModel(vllm_config=config)
    added = {k: v for k, v in layers_of(config).items() if k not in targets}
    assert list(added) == STAGES == draft.get_draft_kv_cache_layer_names()
    assert {type(layer.spec) for layer in added.values()} == {DraftWindowSpec}


def specs_of(preset, layers, overrides, codec_name, dtype):
    hf = build_config(preset, layers=layers, draft="dspark", overrides=overrides)
    config = DeepseekV4Config.from_hf(hf)
    codec = kv_codec(codec_name, dtype, config)
    depth = config.num_hidden_layers
    target = {
        f"model.layers.{layer}.attn.{role}": cache_spec(role, shape, BLOCK)
        for layer in range(depth)
        for role, shape in layer_caches(config, layer, codec).items()
    }
    window = draft_spec(window_cache(config, codec))
    draft = {
        f"model.layers.{depth + stage}.attn.window": window
        for stage in range(DSPARK_STAGES)
    }
    return target, draft


@pytest.fixture(scope="module")
def drafting(small_dspark):
    return configuration(small_dspark, DSPARK)


@pytest.mark.parametrize(
    ("preset", "layers", "overrides"),
    [("tiny", None, SMALL), ("tiny", None, None), ("flash-shaped", 43, None)],
    ids=["small", "tiny", "flash of 43 layers"],
)
@pytest.mark.parametrize(
    ("codec", "dtype"),
    [
        ("auto", torch.float32),
        ("bfloat16", torch.bfloat16),
        ("fp8", torch.bfloat16),
    ],
    ids=["float32", "bfloat16", "fp8"],
)
def test_the_stages_form_one_group_of_64_beside_the_targets(
    drafting, preset, layers, overrides, codec, dtype
):
    target, draft = specs_of(preset, layers, overrides, codec, dtype)
    groups = planner.get_kv_cache_groups(drafting, target | draft)
    names = [name for group in groups for name in group.layer_names]
    assert sorted(names) == sorted(target | draft)
    (own,) = [g for g in groups if type(spec_of_group(g)) is DraftWindowSpec]
    assert sorted(own.layer_names) == sorted(draft)
    sizes = {
        type(spec_of_group(g)).__name__: g.kv_cache_spec.block_size for g in groups
    }
    assert sizes == {
        "WindowSpec": 64,
        "MLAAttentionSpec": 128,
        "CompressorSpec": 4,
        "HeavyCompressorSpec": 8,
        "DraftWindowSpec": 64,
    }
    assert not any(group.is_eagle_group for group in groups)
    made = planner.get_kv_cache_config_from_groups(drafting, groups, 1 << 32)
    assert planner.resolve_kv_cache_block_sizes(made, drafting) == (128, 4)


def test_the_draft_makes_no_block_of_the_pool_wider(drafting):
    target, draft = specs_of("flash-shaped", 43, None, "fp8", torch.bfloat16)

    def stride(specs):
        groups = planner.get_kv_cache_groups(drafting, specs)
        return max(group.kv_cache_spec.page_size_bytes for group in groups)

    assert stride(target | draft) == stride(target)


def eagle_groups(engine):
    groups = engine.scheduler.kv_cache_config.kv_cache_groups
    return [type(spec_of_group(g)) for g in groups if g.is_eagle_group]


def hits(engine):
    """How many prompt tokens a second request is spared, by how many it shares with the first."""
    found = {}
    for shared in HITS:
        prefix = prompt(shared, seed=shared)
        engine.reset_prefix_cache()
        engine.generate([prefix + prompt(40, seed=1)], max_tokens=2)
        (second,) = engine.generate([prefix + prompt(40, seed=2)], max_tokens=2)
        found[shared] = second.cached
    return found


@pytest.fixture(scope="module")
def hits_without_a_draft(small_checkpoint):
    with running(small_checkpoint) as engine:
        return hits(engine)


@pytest.fixture(scope="module")
def hits_with_mtp(small_mtp):
    with running(small_mtp, speculative_config=MTP) as engine:
        assert eagle_groups(engine) == [DraftWindowSpec]
        return hits(engine)


@pytest.fixture(scope="module")
def engine(hits_without_a_draft, hits_with_mtp, small_dspark):
    """With DSpark; the others' engines are gone by now."""
    with running(small_dspark, speculative_config=DSPARK) as engine:
        yield engine


def test_vllm_takes_exactly_the_stages_for_the_drafts(engine):
    runner = engine.runner
    assert runner.speculator.draft_attn_layer_names == set(STAGES)
    layers = layers_of(engine.llm.llm_engine.vllm_config)
    marked = [n for n, layer in layers.items() if getattr(layer, "is_draft_layer", 0)]
    assert sorted(marked) == STAGES
    (group,) = runner.speculator.draft_kv_cache_group_ids
    assert engine.scheduler.kv_cache_config.kv_cache_groups[group].layer_names == STAGES


def test_a_hit_is_as_long_with_the_draft_as_without(engine, hits_without_a_draft):
    assert eagle_groups(engine) == []
    assert hits(engine) == hits_without_a_draft == HITS


def test_mtp_recomputes_128_tokens_of_a_hit_and_no_more(hits_with_mtp):
    """An MTP row holds the next token too, so that vLLM drops the last block of the draft's group, and of no other.

    A hit ends at the same token in all groups: on the multiple of 128 before.
    """
    assert hits_with_mtp == HITS_WITH_MTP
    assert all(HITS[k] - 128 <= hit <= HITS[k] for k, hit in hits_with_mtp.items())


@contextmanager
def drafts_of(engine):
    """{tokens known: the block drafted for what follows}, of one request alone."""
    speculator = engine.runner.speculator
    drafts = {}

    def propose(*args, **kwargs):
        drafted = type(speculator).propose(speculator, *args, **kwargs)
        known = int(speculator.input_buffers.seq_lens[0]) - drafted.shape[1]
        drafts[known] = drafted[0].tolist()
        return drafted

    speculator.propose = propose
    try:
        yield drafts
    finally:
        del speculator.propose


def drafted(engine, ids):
    with drafts_of(engine) as drafts:
        (answer,) = engine.generate([ids], max_tokens=12)
    return answer, {known: d for known, d in drafts.items() if known >= len(ids)}


def write_garbage(engine):
    """Other requests take and free blocks."""
    engine.generate([prompt(300, seed=50 + i) for i in range(4)], max_tokens=3)


@pytest.mark.parametrize("shared", HITS)
def test_after_a_hit_the_drafts_are_those_of_a_cold_start(engine, shared):
    prefix = prompt(shared, seed=shared)
    ids = prefix + prompt(40, seed=2)
    engine.reset_prefix_cache()
    cold, expected = drafted(engine, ids)
    engine.reset_prefix_cache()
    engine.generate([prefix + prompt(40, seed=1)], max_tokens=2)
    write_garbage(engine)
    hit, found = drafted(engine, ids)
    assert (cold.cached, hit.cached) == (0, HITS[shared])
    assert hit.tokens == cold.tokens
    assert len(expected) > 1
    assert found == expected


def test_a_stale_window_would_be_seen_in_the_drafts(engine):
    """The control of the test before: other rows in the stages' window, and the same hit drafts something else."""
    ids = prompt(900, seed=900) + prompt(5, seed=2)
    engine.reset_prefix_cache()
    engine.generate([ids], max_tokens=1)
    good, expected = drafted(engine, ids)
    runner = engine.runner
    (group,) = runner.speculator.draft_kv_cache_group_ids
    # The two blocks of 64 before token 896; other groups' blocks are in the same pool and must stay as they are.
    window = runner.block_tables.input_block_tables[group][0, 12:14].long()
    assert window.all()
    for name in STAGES:
        rows = layers_of(engine.llm.llm_engine.vllm_config)[name].kv_cache
        rows[window] = torch.randn(
            rows[window].shape, generator=torch.Generator().manual_seed(0)
        )
    stale, found = drafted(engine, ids)
    engine.reset_prefix_cache()
    assert good.cached == stale.cached == 896
    assert good.tokens == stale.tokens
    assert found != expected


def things_that_travel():
    """What vLLM sends between processes, or finds by name in each: instances and classes."""
    shape = CacheShape(64, torch.float32, window=128)
    target, draft = specs_of("tiny", None, SMALL, "auto", torch.float32)
    hf = build_config("tiny", draft="dspark", overrides=SMALL)
    tensors = [torch.zeros(2, dtype=torch.int32)] * 4
    instances = [
        *{type(spec): spec for spec in (target | draft).values()}.values(),
        shape,
        DeepseekV4Config.from_hf(hf),
        DSparkConfig.from_hf(hf),
        AtomMetadata(*tensors, max_query_len=1, max_seq_len=2, block_size=64),
        Settings(),
        Refused("a line"),
        CheckpointFormat(),
    ]
    classes = [
        AtomBackend,
        AtomMetadataBuilder,
        AtomModelState,
        AtomCpuPlatform,
        AtomDeepseekV4ForCausalLM,
        AtomDSparkDraftModel,
        AtomDeepseekV4MTP,
        WindowSpec,
        DraftWindowSpec,
        CompressorSpec,
        HeavyCompressorSpec,
    ]
    return instances, classes


CHILD = """
import importlib, pickle, sys
instances, classes = pickle.load(sys.stdin.buffer)
for kind in [*map(type, instances), *classes]:
    found = importlib.import_module(kind.__module__)
    for part in kind.__qualname__.split("."):
        found = getattr(found, part)
    assert found is kind, kind
sys.stdout.buffer.write(pickle.dumps(([(type(i), i) for i in instances], classes)))
"""


def test_classes_are_the_same_objects_after_a_trip_through_a_spawned_interpreter():
    instances, classes = things_that_travel()
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=pickle.dumps((instances, classes)),
        capture_output=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    back, classes_back = pickle.loads(done.stdout)
    for ours, (kind, theirs) in zip(instances, back, strict=True):
        assert kind is type(theirs) is type(ours)
        assert getattr(importlib.import_module(kind.__module__), kind.__name__) is kind
    assert all(a is b for a, b in zip(classes, classes_back, strict=True))
    specs = [i for i in instances if type(i) in (WindowSpec, DraftWindowSpec)]
    assert specs == [theirs for kind, theirs in back if kind in map(type, specs)]
