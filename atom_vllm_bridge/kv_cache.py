"""The cache groups of both state layouts.

`paged`: every state of a layer in an official, block-keyed group of vLLM's.

| role             | rows                                     | block | prefix hits |
|------------------|------------------------------------------|-------|-------------|
| window           | KV of the last `sliding_window` tokens   | 64    | the window's blocks |
| compressed       | one entry for 4 or 128 tokens            | 128   | all blocks  |
| index            | one indexer entry for 4 tokens           | 128   | all blocks  |
| compressor (CSA) | inputs of the last 8 tokens, float32     | 4     | the last 2 blocks |
| compressor (HCA) | inputs of the last 128 tokens, float32   | 8     | none: a hit ends on a multiple of 128, where it is empty |
| draft window     | a draft stage's KV of the last `sliding_window` tokens | 64 | the window's blocks, so that drafts are as good after a hit |

`ring`: window, draft window and the compressors of CSA layers have one block a request instead, which vLLM's own kind for
that, the circular buffer, allocates and never shares; models/deepseek_v4/ring.py says how it is used, and rollback.py what a
prefix hit costs. The others stay as they are.

vLLM groups sliding-window specs by their window alone, and circular buffers all together. Ours are grouped by exact type,
one type a role, so that each role keeps its block size and its own rule for prefix hits, and each ring's type its page size.
"""

import os
from dataclasses import dataclass, replace

import torch
from torch import nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    CircularBufferSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
)

from atom_vllm_bridge.attention import AtomBackend
from atom_vllm_bridge.models.deepseek_v4.config import DeepseekV4Config
from atom_vllm_bridge.models.deepseek_v4.ring import in_ring
from atom_vllm_bridge.models.deepseek_v4.state import CacheRole, CacheShape
from atom_vllm_bridge.rollback import rollback_tokens
from atom_vllm_bridge.settings import Settings

WINDOW_BLOCK = 64
# In name only, for a ring is one state; it must divide the others.
RING_BLOCK = 4
# Small blocks, since at most a few of these rows outlive a step; more rows a block would widen the stride of the pool.
COMPRESSOR_BLOCK = {4: 4, 128: 8}


class _ByType:
    """Grouped with its own type alone."""

    def is_uniform_with_collection(
        self, kv_cache_specs: dict[str, KVCacheSpec]
    ) -> bool:
        return all(type(spec) is type(self) for spec in kv_cache_specs.values())


class _ByRole(_ByType, SlidingWindowMLASpec):
    """A window in blocks."""


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


@dataclass(frozen=True, kw_only=True)
class RingSpec(_ByType, CircularBufferSpec):
    """A request's ring of one layer, the whole of it one state of one block.

    Attributes:
        rows: how many tokens it holds.
        reach: tokens before its own that a token reads.
        replay: tokens of a prefix hit that are computed again to fill it.
    """

    rows: int
    reach: int
    replay: int

    @property
    def state_content_size_bytes(self) -> int:
        return int(self.rows * self.head_size * self.dtype.itemsize)

    @property
    def prefix_replay_tokens(self) -> int:
        return self.replay


class WindowRing(RingSpec):
    """The sliding window."""


class DraftWindowRing(RingSpec):
    """The window of a draft stage."""


class CompressorRing(RingSpec):
    """Rolling inputs of a CSA layer's own compressor."""


class IndexCompressorRing(RingSpec):
    """Rolling inputs of the compressor of its indexer."""


@dataclass(frozen=True)
class Rings:
    """What rings are sized by.

    Attributes:
        drafts: tokens that a step may verify beside its own.
        replay: tokens of a prefix hit that are computed again.
    """

    drafts: int
    replay: int

    def spec(self, kind: type[RingSpec], shape: CacheShape) -> RingSpec:
        """A ring of one layer's state."""
        assert shape.window is not None
        return kind(
            block_size=RING_BLOCK,
            tokens_per_state=RING_BLOCK,
            num_kv_heads=1,
            max_tp_shards=1,
            head_size=shape.width,
            head_size_v=0,
            dtype=shape.dtype,
            rows=shape.window + self.drafts,
            reach=shape.window - 1,
            replay=self.replay,
        )


def rings_of(vllm_config: VllmConfig, config: DeepseekV4Config) -> Rings | None:
    """None: the state is paged.

    Raises:
        ValueError: `prefix_rollback` is less than a window.
    """
    settings = Settings.read(vllm_config.additional_config, os.environ)
    if settings.state_layout != "ring":
        return None
    drafts = vllm_config.num_speculative_tokens
    return Rings(drafts, rollback_tokens(settings.prefix_rollback, config, drafts))


_RING_OF_ROLE = {
    CacheRole.WINDOW: WindowRing,
    CacheRole.COMPRESSOR: CompressorRing,
    CacheRole.INDEX_COMPRESSOR: IndexCompressorRing,
}

ROLE_OF_SPEC: dict[type[KVCacheSpec], str] = {
    WindowSpec: "window",
    MLAAttentionSpec: "compressed",
    CompressorSpec: "CSA compressor",
    HeavyCompressorSpec: "HCA compressor",
    DraftWindowSpec: "draft window",
    WindowRing: "window ring",
    CompressorRing: "CSA compressor ring",
    IndexCompressorRing: "indexer compressor ring",
    DraftWindowRing: "draft window ring",
}
"""What the cache groups are called where they are shown."""


def spec_of_group(group: KVCacheGroupSpec) -> KVCacheSpec:
    """The spec that stands for a group of vLLM's, whose layers may differ in width."""
    spec = group.kv_cache_spec
    return spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def replayed_tokens(cache: KVCacheConfig) -> int:
    """Tokens of a prefix hit that vLLM has computed again; 0: none."""
    groups = cache.kv_cache_groups
    return max(group.kv_cache_spec.prefix_replay_tokens for group in groups)


def cache_spec(
    role: CacheRole, shape: CacheShape, block_size: int, rings: Rings | None = None
) -> AttentionSpec:
    """The vLLM spec of one layer's cache.

    Args:
        role: what the rows hold.
        shape: width, dtype, tokens a row and, for windows, the number of tokens kept.
        block_size: vLLM's block size, a multiple of 128; that of the compressed groups.
        rings: for the state that rolls; None: in blocks.
    """
    if rings is not None and in_ring(shape):
        return rings.spec(_RING_OF_ROLE[role], shape)
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


def draft_spec(shape: CacheShape, rings: Rings | None = None) -> AttentionSpec:
    """The vLLM spec of a draft stage's window, whose `shape` is that of a sliding layer of the target."""
    if rings is not None:
        return rings.spec(DraftWindowRing, shape)
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

    def __init__(self, name: str, spec: AttentionSpec) -> None:
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
        """Take vLLM's view [blocks, 1, rows, width], of a ring [blocks, 1, 1, rows · width]; called again when a profiling cache
        gives way to the real one."""
        rows = kv_cache.squeeze(1)
        if isinstance(self.spec, RingSpec):
            rows = rows.squeeze(1).unflatten(-1, (self.rows, self.spec.head_size))
        self.kv_cache = rows

    def get_attn_backend(self) -> type[AtomBackend]:
        return AtomBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        if isinstance(self.spec, CompressorSpec):
            return replace(self.spec, drafts=vllm_config.num_speculative_tokens)
        return self.spec

    def no_rows(self, device: torch.device) -> torch.Tensor:
        """[1, rows, width]: the null block alone, for a run without caches."""
        spec = self.spec
        shape = (1, self.rows, spec.head_size)
        return torch.zeros(shape, dtype=spec.dtype, device=device)

    @property
    def rows(self) -> int:
        """Rows of a block."""
        ring = isinstance(self.spec, RingSpec)
        return self.spec.rows if ring else self.spec.num_states

    @property
    def tokens_per_row(self) -> int:
        return 1 if isinstance(self.spec, RingSpec) else int(self.spec.tokens_per_state)
