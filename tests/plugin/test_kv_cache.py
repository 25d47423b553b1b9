"""vLLM's planner on the bridge's cache groups: DeepSeek-V4-Flash's 43 layers, and the tiny preset's six."""

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core import kv_cache_utils as planner
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs
from vllm.v1.kv_cache_layout import KVCacheLayout

from atom_vllm_bridge.attention import AtomBackend
from atom_vllm_bridge.checkpoint.presets import build_config
from atom_vllm_bridge.kv_cache import (
    CacheLayer,
    CompressorSpec,
    HeavyCompressorSpec,
    WindowSpec,
    cache_spec,
)
from atom_vllm_bridge.models.deepseek_v4.config import DeepseekV4Config
from atom_vllm_bridge.models.deepseek_v4.state import (
    CacheRole,
    CacheShape,
    layer_caches,
)
from atom_vllm_bridge.models.quantization.kv_codecs import kv_codec

BLOCK = 128


def specs_of(preset: str, codec_name: str, layers: int | None = None):
    hf = build_config(preset, layers=layers, draft=None)
    config = DeepseekV4Config.from_hf(hf)
    codec = kv_codec(codec_name, torch.bfloat16, config)
    return {
        f"model.layers.{layer}.attn.{role}": cache_spec(role, shape, BLOCK)
        for layer in range(config.num_hidden_layers)
        for role, shape in layer_caches(config, layer, codec).items()
    }


@pytest.fixture(scope="module")
def configured(small_checkpoint):
    def configured_for(max_model_len: int):
        config = EngineArgs(
            model=str(small_checkpoint),
            max_model_len=max_model_len,
            max_num_batched_tokens=1000,
            enforce_eager=True,
        ).create_engine_config()
        config.cache_config.kv_cache_layout = KVCacheLayout.BLHNC.name
        return config

    return configured_for


def plan(config, specs):
    groups = planner.get_kv_cache_groups(config, specs)
    stride = max(group.kv_cache_spec.page_size_bytes for group in groups)
    return groups, stride


def cached_blocks(groups, tokens: int = BLOCK) -> int:
    """Blocks that keep a prefix of one scheduler block for later hits."""
    blocks = 0
    for group in groups:
        spec = group.kv_cache_spec
        if not spec.prefix_cacheable:
            continue
        first = spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec
        window = getattr(first, "sliding_window", None)
        kept = tokens if window is None else min(window - 1, tokens)
        blocks += -(-kept // spec.block_size)
    return blocks


@pytest.mark.parametrize(
    ("preset", "layers", "codec"),
    [
        ("tiny", None, "bfloat16"),
        ("tiny", None, "fp8"),
        ("flash-shaped", 43, "bfloat16"),
        ("flash-shaped", 43, "fp8"),
    ],
)
def test_every_layer_is_in_exactly_one_group(configured, preset, layers, codec):
    specs = specs_of(preset, codec, layers)
    groups, stride = plan(configured(4096), specs)
    names = [name for group in groups for name in group.layer_names]
    assert sorted(names) == sorted(specs)
    for group in groups:
        kinds = {type(specs[name]) for name in group.layer_names}
        assert len(kinds) == 1
    sizes = {group.kv_cache_spec.block_size for group in groups}
    assert sizes == {64, 128, 4, 8}
    per_token = cached_blocks(groups) * stride / BLOCK
    print(
        f"{preset} {codec}: {len(groups)} groups, {stride} bytes a block, "
        f"{cached_blocks(groups)} blocks and {per_token / 1024:.1f} KiB a cached token"
    )


def test_a_cached_token_of_flash_costs_no_more_than_46_kib(configured):
    """The stock specs take 870,912 bytes a block and 23 blocks for 128 tokens."""
    groups, stride = plan(configured(4096), specs_of("flash-shaped", "fp8", 43))
    assert stride <= 870_912
    assert cached_blocks(groups) == 7
    assert cached_blocks(groups) * stride / BLOCK <= 46 * 1024


def test_capacity_does_not_depend_on_the_longest_context(configured):
    specs = specs_of("tiny", "bfloat16")
    memory = 1 << 30
    blocks = []
    for length in (4096, 16384, 32768):
        config = configured(length)
        groups = planner.get_kv_cache_groups(config, specs)
        made = planner.get_kv_cache_config_from_groups(config, groups, memory)
        blocks.append(made.num_blocks)
    stride = plan(configured(4096), specs)[1]
    assert set(blocks) == {memory // stride}


def test_hits_are_found_on_128_tokens(configured):
    config = configured(4096)
    groups = planner.get_kv_cache_groups(config, specs_of("tiny", "bfloat16"))
    made = planner.get_kv_cache_config_from_groups(config, groups, 1 << 28)
    assert planner.resolve_kv_cache_block_sizes(made, config) == (128, 4)


def test_each_role_has_its_spec():
    def spec(role, **shape):
        return cache_spec(role, CacheShape(64, torch.float32, **shape), BLOCK)

    window = spec(CacheRole.WINDOW, window=128)
    assert (type(window), window.block_size) == (WindowSpec, 64)
    entries = spec(CacheRole.COMPRESSED, tokens_per_row=4, ratio=4)
    assert (entries.block_size, entries.num_states) == (128, 32)
    rolling = spec(CacheRole.COMPRESSOR, window=8, ratio=4)
    assert (type(rolling), rolling.block_size) == (CompressorSpec, 4)
    heavy = spec(CacheRole.COMPRESSOR, window=128, ratio=128)
    assert (type(heavy), heavy.block_size) == (HeavyCompressorSpec, 8)
    assert rolling.prefix_cacheable
    assert not heavy.prefix_cacheable


def test_blocks_are_outermost_so_that_small_groups_keep_their_block_size():
    layouts = AtomBackend.supported_kv_cache_layouts()
    assert all(layout.is_block_outermost for layout in layouts)


def test_a_layer_goes_on_with_the_cache_that_it_was_given_last(configured):
    """vLLM profiles with a small cache, which the real one replaces."""
    (name, spec), *_ = specs_of("tiny", "bfloat16").items()
    with set_current_vllm_config(configured(512)):
        layer = CacheLayer(name, spec)
    for blocks in (2, 9):
        given = torch.zeros(blocks, 1, spec.block_size, spec.head_size)
        layer.bind_kv_cache(given)
        assert layer.kv_cache.shape == (blocks, spec.block_size, spec.head_size)
        layer.kv_cache[1, 0, 0] = 1
        assert given[1, 0, 0, 0] == 1
