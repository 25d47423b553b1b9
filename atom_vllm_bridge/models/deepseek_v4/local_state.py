"""Caches without an engine: a block allocator small enough to read, for tests and training.

Blocks are handed out in shuffled order, block 0 never (it stands for a block that is gone), and blocks that a window has
left are taken back, so that what runs here makes no assumption that an engine would break. With rings, windows and the
compressors that overlap have one block a request each instead.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from atom_vllm_bridge.models.deepseek_v4.config import DeepseekV4Config
from atom_vllm_bridge.models.deepseek_v4.ring import RingTable, in_ring, ring_table
from atom_vllm_bridge.models.deepseek_v4.state import (
    Batch,
    BlockTable,
    Cache,
    CacheRole,
    CacheShape,
    LayerState,
    layer_caches,
)
from atom_vllm_bridge.models.quantization.kv_codecs import KVCodec

WINDOW_BLOCK, ENTRY_BLOCK, ROLLING_BLOCK = 64, 128, {4: 4, 128: 8}


@dataclass
class _Group:
    """Layers that share block tables: one role, one ratio."""

    shape: CacheShape
    block_size: int
    ring: bool = False
    layers: list[int] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    blocks: dict[int, list[int]] = field(default_factory=dict)


class LocalState:
    """Caches of all layers for up to `max_requests` requests of up to `max_len` tokens.

    Args:
        config: the model's.
        max_requests, max_len: what there are blocks for.
        codec: storage of cache rows.
        device: where.
        seed: of the order of blocks.
        ring: keep rolling state in rings with so many tokens to spare for drafts; None: in blocks.
    """

    def __init__(
        self,
        config: DeepseekV4Config,
        max_requests: int,
        max_len: int,
        codec: KVCodec,
        device: torch.device | str = "cpu",
        seed: int = 0,
        ring: int | None = None,
    ) -> None:
        self.config, self.device = config, device
        order = random.Random(seed)
        self._groups: dict[tuple[CacheRole, int], _Group] = {}
        for layer in range(config.num_hidden_layers):
            for role, shape in layer_caches(config, layer, codec).items():
                key = (role, shape.ratio)
                if key not in self._groups:
                    self._groups[key] = _group(role, shape, ring)
                self._groups[key].layers.append(layer)
        self.rows: dict[tuple[int, CacheRole], torch.Tensor] = {}
        for (role, _), group in self._groups.items():
            size, shape = group.block_size, group.shape
            many = 1 if group.ring else -(-max_len // size) + 1
            count = 1 + max_requests * many
            group.free = list(range(1, count))
            order.shuffle(group.free)
            # A block holds the rows of all layers of the group, one layer after another.
            per_block = size // shape.tokens_per_row
            memory = torch.zeros(
                (count, len(group.layers), per_block, shape.width),
                dtype=shape.dtype,
                device=device,
            )
            for place, layer in enumerate(group.layers):
                self.rows[layer, role] = memory[:, place]

    def release(self, request: int) -> None:
        """Give a request's blocks back."""
        for group in self._groups.values():
            group.free += [b for b in group.blocks.pop(request, []) if b]

    def step(
        self,
        chunks: Sequence[tuple[int, int, int]],
        *,
        pad_tokens: int = 0,
        slack: int = 0,
    ) -> tuple[Batch, list[LayerState]]:
        """A batch of chunks, with blocks for all their tokens.

        Args:
            chunks: for each request its name, the position of its first token in this step, and how many tokens.
            pad_tokens: tokens at the end of the batch that belong to no request.
            slack: by how much the lengths that the host knows overestimate.
        """
        positions = [p for _, start, n in chunks for p in range(start, start + n)]
        ends = [0]
        for _, _, n in chunks:
            ends.append(ends[-1] + n)
        lens = [start + n for _, start, n in chunks]
        batch = Batch(
            positions=self._tensor(positions + [0] * pad_tokens, torch.int64),
            query_start_loc=self._tensor(ends, torch.int32),
            seq_lens=self._tensor(lens, torch.int32),
            max_query_len=max(n for _, _, n in chunks) + slack,
            max_seq_len=max(lens) + slack,
        )
        tables = {
            key: (
                self._ring(group, chunks, batch)
                if group.ring
                else self._table(group, chunks, pad_tokens)
            )
            for key, group in self._groups.items()
        }
        caches: list[dict[str, Cache]] = [
            {} for _ in range(self.config.num_hidden_layers)
        ]
        for (role, ratio), group in self._groups.items():
            for layer in group.layers:
                caches[layer][role.value] = Cache(
                    self.rows[layer, role], tables[role, ratio]
                )
        return batch, [LayerState(**found) for found in caches]

    def _table(
        self, group: _Group, chunks: Sequence[tuple[int, int, int]], pad_tokens: int
    ) -> BlockTable:
        size, window = group.block_size, group.shape.window
        slots: list[int] = []
        for request, start, n in chunks:
            blocks = group.blocks.setdefault(request, [])
            while len(blocks) * size < start + n:
                blocks.append(group.free.pop())
            if window is not None:
                for gone in range(max(0, (start - window + 1) // size)):
                    if blocks[gone]:
                        group.free.insert(0, blocks[gone])
                        blocks[gone] = 0
            slots += [
                blocks[p // size] * size + p % size for p in range(start, start + n)
            ]
        width = max(len(group.blocks[request]) for request, _, _ in chunks)
        rows = [group.blocks[request] for request, _, _ in chunks]
        return BlockTable(
            blocks=self._tensor(
                [row + [0] * (width - len(row)) for row in rows], torch.int32
            ),
            slots=self._tensor(slots + [-1] * pad_tokens, torch.int64),
            block_size=size,
            tokens_per_row=group.shape.tokens_per_row,
        )

    def _ring(
        self, group: _Group, chunks: Sequence[tuple[int, int, int]], batch: Batch
    ) -> RingTable:
        for request, _, _ in chunks:
            if request not in group.blocks:
                group.blocks[request] = [group.free.pop()]
        blocks = self._tensor([group.blocks[r] for r, _, _ in chunks], torch.int32)
        assert group.shape.window is not None
        return ring_table(blocks, batch, group.block_size, group.shape.window - 1)

    def _tensor(self, values: list, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)


def _group(role: CacheRole, shape: CacheShape, ring: int | None) -> _Group:
    if ring is not None and shape.window is not None and in_ring(shape):
        return _Group(shape, shape.window + ring, ring=True)
    return _Group(shape, _block_size(role, shape))


def _block_size(role: CacheRole, shape: CacheShape) -> int:
    if role is CacheRole.WINDOW:
        return WINDOW_BLOCK
    return ENTRY_BLOCK if shape.window is None else ROLLING_BLOCK[shape.ratio]
