"""What a forward step reads and writes besides weights: block-keyed caches and the batch that walks them.

A cache row holds one state: the KV of one token (window), one compressed entry, one indexer entry, or one token's
compressor inputs. Rows live in blocks; a request finds its blocks through a block table. Nothing here is per request on
the host: every index is derived, on the device, from `query_start_loc`, `seq_lens`, `positions` and block tables, so that
padding, adaptive splits of a batch and graph replay are right by construction.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TypeVar

import torch

from atom_vllm_bridge.models.deepseek_v4.config import CSA, DeepseekV4Config
from atom_vllm_bridge.models.ops.blocks import Blocks
from atom_vllm_bridge.models.ops.ragged import Ragged
from atom_vllm_bridge.models.ops.registry import resolved
from atom_vllm_bridge.models.ops.rows import pitch
from atom_vllm_bridge.models.quantization.kv_codecs import KVCodec

T = TypeVar("T")


class CacheRole(StrEnum):
    """What a cache's rows hold; the field names of `LayerState`."""

    WINDOW = "window"
    COMPRESSED = "compressed"
    COMPRESSOR = "compressor"
    INDEX = "index"
    INDEX_COMPRESSOR = "index_compressor"


@dataclass(frozen=True)
class CacheShape:
    """One row of a cache, for whoever allocates it.

    Attributes:
        width: elements a row.
        dtype: storage dtype of an element.
        tokens_per_row: tokens a row stands for.
        window: tokens whose rows must be kept; None: all of the sequence.
        ratio: compression ratio of the layer that the cache belongs to (1: none).
    """

    width: int
    dtype: torch.dtype
    tokens_per_row: int = 1
    window: int | None = None
    ratio: int = 1


@dataclass
class BlockTable:
    """The blocks of one cache group in this batch; shared by all layers of the group.

    Attributes:
        blocks: [R, W] int32, block ids of each request, in order of position; beyond the sequence: any valid id.
        slots: [T] int64, where each token's own state goes, `block · block_size + position % block_size`;
            −1: write nothing (padding, an idle rank, a replayed token).
        block_size: tokens a block.
        tokens_per_row: tokens a row stands for (1, or the compression ratio).
        lists: of a window's group, the slots that each query sees, where they have been made before the step for kernels
            that read lists (`Plan.window_lists`).
    """

    blocks: torch.Tensor
    slots: torch.Tensor
    block_size: int
    tokens_per_row: int = 1
    lists: Ragged | None = None
    _derived: dict[str, object] = field(default_factory=dict, repr=False)

    @property
    def rows_per_block(self) -> int:
        return self.block_size // self.tokens_per_row

    def holds(self, query_len: int) -> bool:
        """Whether a step of so many tokens a request may write them all before it reads."""
        return True

    def addresses(self, pitch: int, parts: int) -> Blocks:
        """Where the rows of the group lie in caches of this pitch; a row is cut into `parts` of theirs."""
        return Blocks(self.blocks, self.rows_per_block, pitch, parts)

    def derive(self, name: str, make: Callable[[], T]) -> T:
        """Index tensors that all layers of the group share are made once a step."""
        if name not in self._derived:
            self._derived[name] = make()
        return self._derived[name]  # type: ignore[return-value]


@dataclass
class Cache:
    """One layer's rows in one group.

    Attributes:
        rows: [B, N, C], blocks × rows a block × row width, in the codec's storage dtype; the stride between blocks is free.
        table: the group's block table.
    """

    rows: torch.Tensor
    table: BlockTable

    @property
    def pitch(self) -> int:
        """Row ids from one block to the next; layers of a group may differ (`ops/rows.py`)."""
        return pitch(self.rows)

    def blocks(self, parts: int = 1) -> Blocks:
        """Where the group's rows, by their order in a request (position // tokens_per_row), lie in `rows`.

        Args:
            parts: into how many rows of `rows` a row of the group is cut.
        """
        return self.table.addresses(self.pitch, parts)

    def listed(self, lists: int, most: int) -> Ragged | None:
        """The group's lists as ids of rows: the first `lists`, of at most `most` rows each; None: there are none."""
        table, pitch_ = self.table, self.pitch
        if table.lists is None:
            return None
        given = Ragged(
            table.lists.indices[: lists * most], table.lists.indptr[: lists + 1]
        )
        # Where blocks of the group are all that there is, a slot's number is its row's id.
        if pitch_ == table.block_size:
            return given

        def make() -> Ragged:
            slot = given.indices
            block = torch.div(slot, table.block_size, rounding_mode="floor")
            return Ragged(block * pitch_ + slot % table.block_size, given.indptr)

        return table.derive(f"lists {lists} {most} {pitch_}", make)

    def slot_ids(self) -> torch.Tensor:
        """[T] int64, ids of the rows to which tokens belong; −1: the token writes nothing."""
        table, pitch_ = self.table, self.pitch
        slots, per_row = table.slots, table.tokens_per_row
        slot_rows = resolved("slot_rows", slots.device)
        return table.derive(
            f"slots {pitch_}",
            lambda: slot_rows(slots, table.block_size, per_row, pitch_),
        )


@dataclass
class LayerState:
    """The caches of one decoder layer; what its attention kind does not use is None."""

    window: Cache
    compressed: Cache | None = None
    compressor: Cache | None = None
    index: Cache | None = None
    index_compressor: Cache | None = None


@dataclass
class Batch:
    """One step's tokens, flattened over requests.

    Attributes:
        positions: [T] int64, absolute position of each token in its request.
        query_start_loc: [R + 1] int32, request r owns tokens query_start_loc[r] … query_start_loc[r + 1] − 1.
        seq_lens: [R] int32, tokens of each request, these included.
        max_query_len, max_seq_len: upper bounds known to the host; they size index tensors and decide nothing else.
        visible_from: [R] int64, raw keys before this position are not there: of a request that replays the end of a prefix
            hit, the position where it began to. None: all are there.
    """

    positions: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    max_query_len: int
    max_seq_len: int
    visible_from: torch.Tensor | None = None

    @cached_property
    def request_of_token(self) -> torch.Tensor:
        """[T] int64. Tokens past the last request's (padding) count to the last request."""
        look_up = resolved("request_of_token", self.positions.device)
        return look_up(self.query_start_loc, self.positions.numel())


def window_cache(config: DeepseekV4Config, codec: KVCodec) -> CacheShape:
    """The cache of raw keys that every layer of the target and every draft stage needs."""
    return CacheShape(codec.kv.width, codec.kv.dtype, window=config.sliding_window)


def layer_caches(
    config: DeepseekV4Config, layer: int, codec: KVCodec
) -> dict[CacheRole, CacheShape]:
    """The caches that a decoder layer of the target needs.

    A compressor row is float32 [kv | score]: one token's inputs, two parts each where groups overlap (CSA).
    """
    kv, index = codec.kv, codec.index
    caches = {CacheRole.WINDOW: window_cache(config, codec)}
    ratio = config.ratio(layer)
    if not ratio:
        return caches
    sparse = config.layer_types[layer] == CSA
    parts = 2 if sparse else 1

    def rolling(dim: int) -> CacheShape:
        width = 2 * parts * dim
        return CacheShape(width, torch.float32, window=parts * ratio, ratio=ratio)

    caches[CacheRole.COMPRESSED] = CacheShape(kv.width, kv.dtype, ratio, None, ratio)
    caches[CacheRole.COMPRESSOR] = rolling(config.head_dim)
    if sparse:
        caches[CacheRole.INDEX] = CacheShape(
            index.width, index.dtype, ratio, None, ratio
        )
        caches[CacheRole.INDEX_COMPRESSOR] = rolling(config.index_head_dim)
    return caches
