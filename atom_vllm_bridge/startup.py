"""One table in the log of a start: what serves the model, and where something was asked for, what it became.

What was asked is noted when vLLM first shows its configuration, before anything is decided, and travels in
`additional_config` to the worker, which knows the cache groups and prints.
"""

import logging
import os
from collections.abc import Mapping
from typing import Any

from tabulate import tabulate
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig

from atom_vllm_bridge.kv_cache import (
    ROLE_OF_SPEC,
    RingSpec,
    replayed_tokens,
    spec_of_group,
)
from atom_vllm_bridge.models.ops import registry
from atom_vllm_bridge.patches.registry import DECLARED, load
from atom_vllm_bridge.platforms import rocm_variables
from atom_vllm_bridge.settings import Settings

logger = logging.getLogger("vllm.atom_vllm_bridge")

ASKED = "atom_asked"


def note_what_was_asked(vllm_config: VllmConfig) -> None:
    """Keep what the user, or vLLM's defaults, asked for; a copy of the configuration keeps what is noted."""
    additional = vllm_config.additional_config
    if not isinstance(additional, Mapping) or ASKED in additional:
        return
    compilation, kernels = vllm_config.compilation_config, vllm_config.kernel_config
    asked: dict[str, str] = {
        "batched tokens": str(vllm_config.scheduler_config.max_num_batched_tokens),
        "cache dtype": str(vllm_config.cache_config.cache_dtype),
    }
    if compilation.mode is not None:
        asked["compilation"] = compilation.mode.name
    if compilation.cudagraph_mode is not None:
        asked["graph mode"] = compilation.cudagraph_mode.name
    if kernels.moe_backend != "auto":
        asked["experts"] = f"--moe-backend {kernels.moe_backend}"
    if vllm_config.attention_config.backend is not None:
        asked["attention"] = vllm_config.attention_config.backend.name
    # A new object: the user may use theirs for another engine.
    vllm_config.additional_config = {**additional, ASKED: asked}


def log_table(vllm_config: VllmConfig, model: Any, cache: KVCacheConfig) -> None:
    """Print the table."""
    rows = table(vllm_config, model, cache)
    logger.info("DeepSeek-V4:\n%s", tabulate(rows, tablefmt="plain"))


def table(
    vllm_config: VllmConfig, model: Any, cache: KVCacheConfig
) -> list[tuple[str, str]]:
    """(what, value) rows.

    Args:
        vllm_config: as the worker has it.
        model: the target's adapter.
        cache: the groups that vLLM formed.
    """
    compilation = vllm_config.compilation_config
    scheduler = vllm_config.scheduler_config
    caching = vllm_config.cache_config.enable_prefix_caching
    settings = Settings.read(vllm_config.additional_config, os.environ)
    replayed = replayed_tokens(cache)
    providers = {choice.op: choice.provider for choice in registry.table()}
    got = {
        "architecture": ", ".join(vllm_config.model_config.architectures),
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "state layout": settings.state_layout,
        "cache groups": ", ".join(_groups(cache)),
        "cache dtype": model.model.codec.name,
        "prefix cache": "on, hits end on 128 tokens" if caching else "off",
        "prefix rollback": (
            f"{settings.prefix_rollback}: a hit costs {replayed} tokens, and is used if it is longer"
            if replayed
            else "none: paged state is exact"
        ),
        "speculation": _speculation(vllm_config),
        "ranks": _ranks(vllm_config, model),
        "compilation": compilation.mode.name,
        # Adaptive verification names graphs on a CPU too, where nothing is captured.
        "graph mode": (
            "NONE" if current_platform.is_cpu() else compilation.cudagraph_mode.name
        ),
        "batched tokens": str(scheduler.max_num_batched_tokens),
        "async scheduling": "on" if scheduler.async_scheduling else "off",
        "attention": f"sparse_attention of {providers['sparse_attention']}",
        "experts": f"experts of {providers['experts']}",
        "ops": _ops(providers),
        "patches": ", ".join(_patches()) or "none applied",
    }
    if current_platform.is_rocm():
        got |= rows_on_rocm(current_platform, os.environ)
    additional = vllm_config.additional_config
    asked = additional.get(ASKED, {}) if isinstance(additional, Mapping) else {}
    return [
        (
            name,
            (
                f"{asked[name]} → {value}"
                if asked.get(name, value) not in (value, "auto")
                else value
            ),
        )
        for name, value in got.items()
    ]


def rows_on_rocm(platform: Any, environ: Mapping[str, str]) -> dict[str, str]:
    """What only AMD GPUs have to say."""
    rows = {"environment": rocm_variables.said(environ) or "none of AMD's set"}
    if platform.left_to:
        rows["platform"] = (
            f"{platform.left_to} of ROCm/ATOM, which serves every other model"
        )
    return rows


def trained_length(hf_config: Any, method: str) -> int | None:
    """How many tokens a draft was trained to draft."""
    if method == "dspark":
        return getattr(hf_config, "dspark_block_size", None)
    return getattr(hf_config, "num_nextn_predict_layers", None)


def _groups(cache: KVCacheConfig) -> list[str]:
    """Each with its tokens a block, and rings with those of a request."""
    specs = [spec_of_group(group) for group in cache.kv_cache_groups]
    return [
        f"{ROLE_OF_SPEC[type(spec)]} {spec.rows if isinstance(spec, RingSpec) else spec.block_size}"
        for spec in specs
    ]


def _speculation(vllm_config: VllmConfig) -> str:
    speculative = vllm_config.speculative_config
    if speculative is None:
        return "off"
    method, length = speculative.method, speculative.num_speculative_tokens
    trained = trained_length(speculative.draft_model_config.hf_config, method)
    same = "" if length == trained else "; drafts of another length are accepted less"
    split = (
        ", as many verified as pay: adaptive"
        if speculative.enable_adaptive_verification
        else ""
    )
    return f"{method}, K = {length} (trained for {trained}{same}){split}"


def _ranks(vllm_config: VllmConfig, model: Any) -> str:
    parallel, place = vllm_config.parallel_config, model.model.parallel
    tensor, data = place.size, parallel.data_parallel_size
    if tensor == data == 1:
        return "1"
    among = tensor * place.replicas
    experts = model.config.n_routed_experts
    split = f", {experts // among} of {experts} experts each" if among > 1 else ""
    return f"{tensor} tensor-parallel · {data} data-parallel{split}"


def _ops(providers: Mapping[str, str]) -> str:
    """Every op, by its provider."""
    names: dict[str, list[str]] = {}
    for op, provider in providers.items():
        names.setdefault(provider, []).append(op)
    return "; ".join(f"{name}: {' '.join(ops)}" for name, ops in sorted(names.items()))


def _patches() -> list[str]:
    patches = load()
    states = {patch.id: patches.state(patch.id) for patch in patches}
    return [f"{id} {state}" for id, state in states.items() if state.name != DECLARED]
