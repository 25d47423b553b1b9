"""How vLLM's own planner lays out the caches of a checkpoint, in both state layouts, without building the model."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.registry import ModelRegistry
from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheSpec

from atom_vllm_bridge import compat, kv_cache, plugin, snapshots
from atom_vllm_bridge.attention import AtomBackend
from atom_vllm_bridge.models.deepseek_v4 import checkpoint
from atom_vllm_bridge.models.deepseek_v4.config import DeepseekV4Config
from atom_vllm_bridge.models.deepseek_v4.state import layer_caches, window_cache
from atom_vllm_bridge.models.quantization.kv_codecs import kv_codec
from atom_vllm_bridge.platforms.refusal import Refused
from atom_vllm_bridge.settings import SECTION, STATE_LAYOUTS

# Tokens of the requests whose number is told, beside the longest that the model takes.
LENGTHS = (4096, 32768)


def plan(model: str, speculative: str, memory: int) -> dict[str, Any]:
    """The plan of each state layout.

    Args:
        model: a directory, or a name in the hub's cache.
        speculative: a JSON object as in vLLM's --speculative-config; "{}": no draft.
        memory: bytes of KV cache; 0: blocks and capacity are not told.

    Returns:
        refusal: the line with which the start would end, or None.
        classes: architecture → "module:Class", of ours, as vLLM's registry has them.
        layouts: name → groups, bytes a block, and of `memory` blocks and requests at once by their tokens.
    """
    answer: dict[str, Any] = {"refusal": None, "classes": {}, "layouts": {}}
    try:
        for layout in STATE_LAYOUTS:
            answer["layouts"][layout] = _planned(model, speculative, memory, layout)
    except Refused as refusal:
        answer["refusal"] = str(refusal)
    for architecture in plugin.MODELS:
        known = ModelRegistry.models.get(architecture)
        module, name = (
            getattr(known, f"{of}_name", None) for of in ("module", "class")
        )
        answer["classes"][architecture] = f"{module}:{name}"
    return answer


def _planned(model: str, speculative: str, memory: int, layout: str) -> dict[str, Any]:
    config = EngineArgs(
        model=str(snapshots.directory_of(model) or model),
        skip_tokenizer_init=True,
        speculative_config=json.loads(speculative) or None,
        additional_config={SECTION: {"state_layout": layout}},
    ).create_engine_config()
    config.cache_config.kv_cache_layout = AtomBackend.supported_kv_cache_layouts()[
        0
    ].name
    planner, specs = compat.cache_planner(), dict(_specs(config))
    groups = planner.get_kv_cache_groups(config, specs)
    found: dict[str, Any] = {
        "groups": [_group(group) for group in groups],
        "block_bytes": max(group.kv_cache_spec.page_size_bytes for group in groups),
        "replayed_tokens": max(g.kv_cache_spec.prefix_replay_tokens for g in groups),
        "blocks": None,
        "capacity": None,
    }
    if memory:
        made = planner.get_kv_cache_config_from_groups(config, groups, memory)
        found["blocks"], longest = made.num_blocks, config.model_config.max_model_len
        found["capacity"] = {}
        for length in sorted({*(n for n in LENGTHS if n < longest), longest}):
            config.model_config.max_model_len = length
            requests = get_max_concurrency_for_kv_cache_config(config, made)
            found["capacity"][str(length)] = round(requests, 2)
    return found


def _group(group: KVCacheGroupSpec) -> dict[str, Any]:
    """One group; a ring's block has all tokens that it holds."""
    spec = kv_cache.spec_of_group(group)
    ring = isinstance(spec, kv_cache.RingSpec)
    return {
        "role": kv_cache.ROLE_OF_SPEC[type(spec)],
        "tokens": spec.rows if ring else spec.block_size,
        "layers": len(group.layer_names),
    }


def _specs(vllm_config: VllmConfig) -> Iterator[tuple[str, KVCacheSpec]]:
    """Of every cache layer, as target and draft register them."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    hf = model.hf_config.to_dict()
    config = DeepseekV4Config.from_hf(hf)
    codec = kv_codec(cache.cache_dtype, model.dtype, config)
    rings, drafts = (
        kv_cache.rings_of(vllm_config, config),
        vllm_config.num_speculative_tokens,
    )
    depth = config.num_hidden_layers
    for layer in range(depth):
        for role, shape in layer_caches(config, layer, codec).items():
            spec = kv_cache.cache_spec(role, shape, cache.block_size, rings)
            if isinstance(spec, kv_cache.CompressorSpec):
                spec = replace(spec, drafts=drafts)
            yield f"model.layers.{layer}.attn.{role.value}", spec
    stages = checkpoint.draft_stages(hf) if drafts else 0
    draft = kv_cache.draft_spec(window_cache(config, codec), rings)
    for stage in range(stages):
        yield f"model.layers.{depth + stage}.attn.window", draft
