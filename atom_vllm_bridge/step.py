"""What one forward of vLLM's runner means to a model: the batch, and where each cache layer's rows are in it."""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from vllm.forward_context import get_forward_context

from atom_vllm_bridge.attention import AtomMetadata
from atom_vllm_bridge.kv_cache import CacheLayer, RingSpec
from atom_vllm_bridge.models.deepseek_v4.ring import ring_table
from atom_vllm_bridge.models.deepseek_v4.state import Batch, BlockTable, Cache
from atom_vllm_bridge.models.ops.ragged import Ragged

CacheOf = Callable[[CacheLayer], Cache]


def current(
    positions: torch.Tensor, query_len: int | None = None
) -> tuple[Batch, CacheOf]:
    """The batch of the forward that is running.

    Args:
        positions: [T] int64.
        query_len: tokens a request, where the runner profiles and there is no metadata to tell; by default all T are one
            request's.
    """
    metadata = get_forward_context().attn_metadata
    if metadata is None:
        return without_caches(positions, query_len)
    return with_caches(positions, metadata)


def with_caches(
    positions: torch.Tensor, metadata: Mapping[str, AtomMetadata]
) -> tuple[Batch, CacheOf]:
    """A real step: what vLLM's metadata, by layer name, say."""
    first = next(iter(metadata.values()))
    batch = Batch(
        positions=positions,
        query_start_loc=first.query_start_loc,
        seq_lens=first.seq_lens,
        max_query_len=first.max_query_len,
        max_seq_len=first.max_seq_len,
        visible_from=first.visible_from,
    )
    tables: dict[tuple[int, int], BlockTable] = {}

    def cache(layer: CacheLayer) -> Cache:
        group = metadata[layer.name]
        # Layers of one group share one metadata object, hence one table and the indices derived from it. Two cache
        # shapes of one group (main and indexer entries) have the same tokens a row only if the ratio is the same.
        key = (id(group), layer.tokens_per_row)
        if key not in tables:
            slots = group.slot_mapping
            if len(slots) < len(positions):
                # A draft is padded to the longest of the data-parallel ranks', and its slots are not.
                slots = F.pad(slots, (0, len(positions) - len(slots)), value=-1)
            tables[key] = _table(
                layer,
                batch,
                group.block_table,
                slots,
                group.block_size,
                group.window_lists,
            )
        return Cache(rows=layer.kv_cache, table=tables[key])

    return batch, cache


def without_caches(
    positions: torch.Tensor, query_len: int | None = None
) -> tuple[Batch, CacheOf]:
    """vLLM's profiling run: requests over null blocks; nothing is written, memory is what it would be."""
    tokens, device = positions.numel(), positions.device
    query_len = query_len or tokens
    ends = torch.arange(0, tokens + 1, query_len, dtype=torch.int32, device=device)
    slots = torch.full((tokens,), -1, dtype=torch.int64, device=device)

    def cache(layer: CacheLayer) -> Cache:
        ring = isinstance(layer.spec, RingSpec)
        width = 1 if ring else -(-query_len // layer.spec.block_size)
        blocks = torch.zeros(len(ends) - 1, width, dtype=torch.int32, device=device)
        table = _table(layer, batch, blocks, slots, layer.spec.block_size)
        return Cache(rows=layer.no_rows(device), table=table)

    batch = Batch(
        positions=torch.arange(tokens, device=device) % query_len,
        query_start_loc=ends,
        seq_lens=torch.full_like(ends[1:], query_len),
        max_query_len=query_len,
        max_seq_len=query_len,
    )
    return batch, cache


def _table(
    layer: CacheLayer,
    batch: Batch,
    blocks: torch.Tensor,
    slots: torch.Tensor,
    block_size: int,
    lists: Ragged | None = None,
) -> BlockTable:
    """Where a layer's rows are: as vLLM says, or in rings, of which it says only the blocks."""
    spec = layer.spec
    if isinstance(spec, RingSpec):
        return ring_table(blocks, batch, spec.rows, spec.reach)
    return BlockTable(blocks, slots, block_size, layer.tokens_per_row, lists)
