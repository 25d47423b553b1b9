"""Rolling state in rings: a request's last rows in one block of its own, the row of position p being p % length.

Nothing is allocated while a request grows, and there is one block to look up. A ring holds the tokens that a token reads,
and some to spare. A step of more tokens than that would overwrite what its own first tokens have still to read, so it works
on the ring unrolled: the step's rows, and behind them those that it may read from before it. Its last rows are put back.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from atom_vllm_bridge.models.deepseek_v4.state import (
    Batch,
    BlockTable,
    Cache,
    CacheShape,
)
from atom_vllm_bridge.models.ops.blocks import Blocks
from atom_vllm_bridge.models.ops.registry import resolved

# A heavily compressed layer's 128 rows of float32 would make rings so wide that all others waste their blocks; a prefix hit
# finds those rows empty anyway.
_WIDEST_RATIO = 4


def in_ring(shape: CacheShape) -> bool:
    """Whether such a cache's rows go into rings, where there are any."""
    return shape.window is not None and shape.ratio <= _WIDEST_RATIO


@dataclass
class RingTable(BlockTable):
    """The rings of one cache group in this batch; `block_size` is their length, and every position is in column 0.

    Attributes:
        reach: tokens before its own that a token reads.
    """

    reach: int = field(default=0, kw_only=True)

    def holds(self, query_len: int) -> bool:
        return query_len <= self.block_size - self.reach


def ring_table(
    blocks: torch.Tensor, batch: Batch, length: int, reach: int
) -> RingTable:
    """The rings of a batch.

    Args:
        blocks: [R, 1] int32; 0: the request has none, as in a run for show.
        batch: the step.
        length: rows a ring.
        reach: tokens before its own that a token reads.
    """
    positions, request = batch.positions, batch.request_of_token
    ring_slots = resolved("ring_slots", positions.device)
    slots = ring_slots(blocks, batch.query_start_loc, request, positions, length)
    return RingTable(blocks, slots, length, reach=reach)


@dataclass(frozen=True)
class _Unrolled(Blocks):
    """One block of rows: the step's tokens in their order, then for each request the `reach` rows before its first token.

    Attributes:
        start: [R] int64, position of a request's first token in the step.
        first: [R] int64, that token's place in the step.
        tokens: in the step.
        reach: rows kept from before the step.
    """

    start: torch.Tensor = field(kw_only=True)
    first: torch.Tensor = field(kw_only=True)
    tokens: int = field(kw_only=True)
    reach: int = field(kw_only=True)

    plain = False

    def ids(self, request: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        shape = (-1, *(1,) * (row.dim() - 1))
        within = row - self.start[request].view(shape)
        now = self.first[request].view(shape) + within
        before = (request + 1).view(shape) * self.reach + within + self.tokens
        place = torch.where(within >= 0, now, before)
        # Padding asks for rows that no token has.
        return place.clamp_(0, self.per_block - 1).mul_(self.parts)


@dataclass
class _UnrolledTable(BlockTable):
    """The table of a step's rings unrolled.

    Attributes:
        start, first, reach: as of `_Unrolled`.
    """

    start: torch.Tensor = field(kw_only=True)
    first: torch.Tensor = field(kw_only=True)
    reach: int = field(kw_only=True)

    def addresses(self, pitch: int, parts: int) -> Blocks:
        return _Unrolled(
            self.blocks,
            self.block_size,
            pitch,
            parts,
            start=self.start,
            first=self.first,
            tokens=self.slots.numel(),
            reach=self.reach,
        )


def unrolled(
    cache: Cache,
    batch: Batch,
    gather_rows: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> Cache:
    """The cache to work on in this step: `cache` itself, or its rings unrolled where the step is longer than they can take.

    Args:
        cache: of any kind.
        batch: the step.
        gather_rows: the op.
    """
    ring = cache.table
    if not isinstance(ring, RingTable) or ring.holds(batch.max_query_len):
        return cache
    tokens, requests = batch.positions.numel(), len(ring.blocks)
    table = ring.derive("unrolled", lambda: _unrolled_table(ring, batch))

    def before() -> torch.Tensor:
        back = torch.arange(-ring.reach, 0, device=ring.slots.device)
        position = (table.start.unsqueeze(1) + back).clamp_(min=0)
        request = torch.arange(requests, device=back.device)
        return cache.blocks().ids(request, position).flatten()

    rows = cache.rows.new_zeros(1, table.block_size, cache.rows.shape[-1])
    ids = ring.derive(f"before {cache.pitch}", before)
    rows[0, tokens:] = gather_rows(cache.rows, ids)
    return Cache(rows, table)


def _unrolled_table(ring: RingTable, batch: Batch) -> _UnrolledTable:
    tokens, requests = batch.positions.numel(), len(ring.blocks)
    first = batch.query_start_loc[:-1].long()
    length = batch.query_start_loc[1:] - first
    return _UnrolledTable(
        ring.blocks,
        torch.arange(tokens, device=first.device),
        tokens + requests * ring.reach,
        start=batch.seq_lens.long() - length,
        first=first,
        reach=ring.reach,
    )


def roll_up(
    cache: Cache,
    worked_on: Cache,
    write_rows: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None],
) -> None:
    """Put a step's last rows back into the rings, if it worked on them unrolled; `write_rows` is the op."""
    if worked_on is not cache:
        tokens = cache.table.slots.numel()
        write_rows(cache.rows, cache.slot_ids(), worked_on.rows[0, :tokens])
