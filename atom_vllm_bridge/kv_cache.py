"""The cache groups of `state_layout="paged"`: every state of a layer in an official, block-keyed group of vLLM's.

| role             | rows                                     | block | prefix hits |
|------------------|------------------------------------------|-------|-------------|
| window           | KV of the last `sliding_window` tokens   | 64    | the window's blocks |
| compressed       | one entry for 4 or 128 tokens            | 128   | all blocks  |
| index            | one indexer entry for 4 tokens           | 128   | all blocks  |
| compressor (CSA) | inputs of the last 8 tokens, float32     | 4     | the last 2 blocks |
| compressor (HCA) | inputs of the last 128 tokens, float32   | 8     | none: a hit ends on a multiple of 128, where it is empty |
| draft window     | a draft stage's KV of the last `sliding_window` tokens | 64 | the window's blocks, so that drafts are as good after a hit |

vLLM groups sliding-window specs by their window alone. Ours are grouped by exact type, one type a role, so that each role
keeps its block size and its own rule for prefix hits.
"""

from dataclasses import dataclass, replace

import torch
from torch import nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import (
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
)

from atom_vllm_bridge.attention import AtomBackend
from atom_vllm_bridge.models.deepseek_v4.state import CacheRole, CacheShape

WINDOW_BLOCK = 64
# Small blocks, since at most a few of these rows outlive a step; more rows a block would widen the stride of the pool.
COMPRESSOR_BLOCK = {4: 4, 128: 8}


@dataclass(frozen=True, kw_only=True)
class _ByRole(SlidingWindowMLASpec):
    def is_uniform_with_collection(
        self, kv_cache_specs: dict[str, KVCacheSpec]
    ) -> bool:
        return all(type(spec) is type(self) for spec in kv_cache_specs.values())


class WindowSpec(_ByRole):
    """The sliding window."""


class DraftWindowSpec(_ByRole):
    """The window of a draft stage; it never shares blocks with the target's."""


@dataclass(frozen=True, kw_only=True)
class CompressorSpec(_ByRole):
    """Rolling inputs of the overlapping compressors (main and indexer), two blocks of 4 tokens.

    Attributes:
        drafts: tokens that a step may verify beside its own. vLLM frees what has left the window before it hashes what the
            step has verified, so that blocks which a later hit needs would be gone unhashed; so many tokens more are kept.
    """

    drafts: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        # The planner writes its own number into every spec, which is 0 for drafts of one layer or block.
        kept = max(self.extra_retained_tokens, self.drafts)
        object.__setattr__(self, "extra_retained_tokens", kept)


class HeavyCompressorSpec(_ByRole):
    """Rolling inputs of the compressor of 128 tokens, which does not overlap."""

    @property
    def prefix_cacheable(self) -> bool:
        # A hit ends on a multiple of 128 tokens: the group of 128 that it would continue has not begun.
        return False


ROLE_OF_SPEC: dict[type[KVCacheSpec], str] = {
    WindowSpec: "window",
    MLAAttentionSpec: "compressed",
    CompressorSpec: "CSA compressor",
    HeavyCompressorSpec: "HCA compressor",
    DraftWindowSpec: "draft window",
}
"""What the cache groups are called where they are shown."""


def spec_of_group(group: KVCacheGroupSpec) -> KVCacheSpec:
    """The spec that stands for a group of vLLM's, whose layers may differ in width."""
    spec = group.kv_cache_spec
    return spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def cache_spec(role: CacheRole, shape: CacheShape, block_size: int) -> KVCacheSpec:
    """The vLLM spec of one layer's cache.

    Args:
        role: what the rows hold.
        shape: width, dtype, tokens a row and, for windows, the number of tokens kept.
        block_size: vLLM's block size, a multiple of 128; that of the compressed groups.
    """
    common = {
        "num_kv_heads": 1,
        "max_tp_shards": 1,
        "head_size": shape.width,
        "dtype": shape.dtype,
    }
    if shape.window is None:
        return MLAAttentionSpec(
            block_size=block_size, tokens_per_state=shape.tokens_per_row, **common
        )
    if role is CacheRole.WINDOW:
        return WindowSpec(
            block_size=WINDOW_BLOCK, sliding_window=shape.window, **common
        )
    spec = CompressorSpec if shape.ratio == 4 else HeavyCompressorSpec
    return spec(
        block_size=COMPRESSOR_BLOCK[shape.ratio], sliding_window=shape.window, **common
    )


def draft_spec(shape: CacheShape) -> DraftWindowSpec:
    """The vLLM spec of a draft stage's window, whose `shape` is that of a sliding layer of the target."""
    return DraftWindowSpec(
        num_kv_heads=1,
        max_tp_shards=1,
        head_size=shape.width,
        dtype=shape.dtype,
        block_size=WINDOW_BLOCK,
        sliding_window=shape.window,
    )


class CacheLayer(nn.Module, AttentionLayerBase):
    """One cache of one decoder layer, as vLLM allocates and binds it. It computes nothing."""

    def __init__(self, name: str, spec: KVCacheSpec) -> None:
        """Register under `name`, which must hold exactly one number (the layer's).

        Raises:
            ValueError: another layer has the name already.
        """
        super().__init__()
        context = get_current_vllm_config().compilation_config.static_forward_context
        if name in context:
            raise ValueError(
                f"atom-vllm-bridge: two cache layers are called {name}; build the model once in a configuration."
            )
        context[name] = self
        self.name = name
        self.spec = spec
        self.kv_cache = torch.empty(0)

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """Take vLLM's view [blocks, 1, rows, width]; called again when a profiling cache gives way to the real one."""
        self.kv_cache = kv_cache.squeeze(1)

    def get_attn_backend(self) -> type[AtomBackend]:
        return AtomBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        if isinstance(self.spec, CompressorSpec):
            return replace(self.spec, drafts=vllm_config.num_speculative_tokens)
        return self.spec

    def no_rows(self, device: torch.device) -> torch.Tensor:
        """[1, rows, width]: the null block alone, for a run without caches."""
        spec = self.spec
        shape = (1, spec.num_states, spec.head_size)
        return torch.zeros(shape, dtype=spec.dtype, device=device)

    @property
    def tokens_per_row(self) -> int:
        return int(self.spec.tokens_per_state)
