"""Index tensors of one step, derived on the device and shared by all layers.

Queries are computed in tiles: a tile is up to Q consecutive tokens of one request, so that its keys are gathered once. How
many tiles there can be follows from sizes that the host knows; which request a tile belongs to, only the device knows.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from atom_vllm_bridge.models.deepseek_v4.config import SLIDING
from atom_vllm_bridge.models.deepseek_v4.rope import rotations
from atom_vllm_bridge.models.deepseek_v4.state import Batch, BlockTable, Cache
from atom_vllm_bridge.models.ops.ragged import Ragged, ragged
from atom_vllm_bridge.models.ops.torch.sparse_attention import Keys

TILE_SIZES = (128, 64, 32, 16, 8, 4, 2, 1)
# Scores of one tile may take so much.
TILE_BYTES = 16 << 20
# Fetching the keys of a tile costs about as much as computing so many queries.
TILE_COST = 8


@dataclass(frozen=True)
class Tiles:
    """Tokens, cut into tiles of one request each.

    Attributes:
        request: [N] int64.
        token: [N, Q] int64, place of a tile's queries in the batch; beyond the tile's end: any token.
        start: [N] int64, position of the first query.
        last: [N] int64, position of the last query, at least 0.
        place: [T] int64, place of a token in the flattened tiles, or None where that is the token's own number.
    """

    request: torch.Tensor
    token: torch.Tensor
    start: torch.Tensor
    last: torch.Tensor
    place: torch.Tensor | None

    @property
    def size(self) -> int:
        return self.token.shape[1]

    @cached_property
    def positions(self) -> torch.Tensor:
        """[N, Q] int64; beyond the tile's end they go on counting."""
        step = torch.arange(self.size, device=self.start.device)
        return self.start.unsqueeze(1) + step

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """[T, ...] → [N, Q, ...]."""
        if self.place is None:
            return x.unsqueeze(1)
        return x.index_select(0, self.token.flatten()).unflatten(0, self.token.shape)

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """[N, Q, ...] → [T, ...]."""
        x = x.flatten(0, 1)
        return x if self.place is None else x.index_select(0, self.place)


@dataclass(frozen=True)
class Pool:
    """The entries that complete in a step.

    Attributes:
        ids: [M, 2, K] int64, parts of compressor rows to read: kv, then score.
        unseen: [M, K] bool, sources before the start of the sequence.
        write: [M] int64, ids of the compressed rows to write, −1: none.
        rotation: [M, P] complex64, at the first position of each entry's group.
    """

    ids: torch.Tensor
    unseen: torch.Tensor
    write: torch.Tensor
    rotation: torch.Tensor


class Plan:
    """Everything about a batch that does not depend on a layer's weights."""

    # A token sees none that comes after it.
    causal = True

    def __init__(
        self, batch: Batch, theta: torch.Tensor, compress_theta: torch.Tensor
    ) -> None:
        self.batch = batch
        self.tokens = batch.positions.numel()
        self.requests = batch.seq_lens.numel()
        # Padding may hold any position.
        self.positions = batch.positions.clamp(min=0)
        self._theta = theta
        self._compress_theta = compress_theta
        self._tiles: dict[int, Tiles] = {}
        self._phase: dict[int, torch.Tensor] = {}

    @cached_property
    def sliding_rotation(self) -> torch.Tensor:
        """[T, P] complex64, for sliding layers."""
        return rotations(self.positions, self._theta)

    @cached_property
    def compress_rotation(self) -> torch.Tensor:
        """[T, P] complex64, for compressed layers and the indexer's queries."""
        return rotations(self.positions, self._compress_theta)

    def rotation(self, layer_type: str) -> torch.Tensor:
        """[T, P] complex64, for queries and raw keys of a layer."""
        sliding = layer_type == SLIDING
        return self.sliding_rotation if sliding else self.compress_rotation

    def phase(self, ratio: int) -> torch.Tensor:
        """[T] int64, place of each token in its group of `ratio` tokens."""
        if ratio not in self._phase:
            self._phase[ratio] = self.positions % ratio
        return self._phase[ratio]

    def entries(self, ratio: int) -> int:
        """How many compressed entries a request may have at most."""
        return self.batch.max_seq_len // ratio

    def tile_size(self, query_bytes: int) -> int:
        """The cheapest number of queries a tile, where the scores of a query take `query_bytes`."""
        longest = self.batch.max_query_len
        sizes = [size for size in TILE_SIZES if size <= longest]
        if longest <= TILE_SIZES[0]:
            sizes.append(longest)
        sizes = [size for size in sizes if size * query_bytes <= TILE_BYTES] or [1]
        return min(sizes, key=lambda size: self._tile_count(size) * (size + TILE_COST))

    def _tile_count(self, size: int) -> int:
        if size == 1:
            return self.tokens
        per_request = -(-self.batch.max_query_len // size)
        return min(self.requests * per_request, self.tokens // size + self.requests)

    def tiles(self, size: int) -> Tiles:
        """The batch in tiles of `size` queries."""
        if size not in self._tiles:
            self._tiles[size] = self._cut(size)
        return self._tiles[size]

    def _cut(self, size: int) -> Tiles:
        batch, device = self.batch, self.positions.device
        token = torch.arange(self.tokens, device=device)
        if size == 1:
            return Tiles(
                batch.request_of_token,
                token.unsqueeze(1),
                self.positions,
                self.positions,
                None,
            )
        first = batch.query_start_loc[:-1].long()
        length = batch.query_start_loc[1:] - first
        end = ((length + size - 1) // size).cumsum(0)
        begin = torch.cat((end.new_zeros(1), end[:-1]))
        count = self._tile_count(size)
        tile = torch.arange(count, device=device)
        request = torch.bucketize(tile, end, right=True).clamp_(max=self.requests - 1)
        offset = (tile - begin[request]) * size
        valid = (length[request] - offset).clamp_(max=size)
        lead = (first[request] + offset).clamp_(max=self.tokens - 1)
        start = self.positions[lead]
        step = torch.arange(size, device=device)
        owner = batch.request_of_token
        within = token - first[owner]
        place = (begin[owner] + within // size) * size + within % size
        return Tiles(
            request,
            (lead.unsqueeze(1) + step).clamp_(max=self.tokens - 1),
            start,
            (start + valid - 1).clamp_(min=0),
            place.clamp_(max=count * size - 1),
        )

    def window_keys(self, cache: Cache, tiles: Tiles, window: int) -> Keys:
        """The raw keys of each tile: `window` of them for each query, its own the last.

        Positions before the first key that is there, or after the tile's last query, are hidden from all its queries, and
        read as the nearest position that is not.
        """
        table, pitch = cache.table, cache.pitch

        def hidden() -> torch.Tensor:
            step = torch.arange(tiles.size + window - 1, device=table.blocks.device)
            query = step[: tiles.size].unsqueeze(1)
            outside = (step < query) | (step > query + window - 1)
            position = tiles.start.unsqueeze(1) + (step - (window - 1))
            return outside | (position < self._visible_from(tiles)).unsqueeze(1)

        def ids() -> torch.Tensor:
            step = torch.arange(tiles.size + window - 1, device=table.blocks.device)
            position = tiles.start.unsqueeze(1) + (step - (window - 1))
            position = position.clamp_(min=self._visible_from(tiles))
            position = torch.minimum(position, tiles.last.unsqueeze(1))
            return cache.row_ids(tiles.request, position)

        return Keys(
            cache.rows,
            table.derive(f"window {window} {tiles.size} {pitch}", ids),
            table.derive(f"window hidden {window} {tiles.size}", hidden),
            ragged=cache.listed(self.tokens, window) if tiles.place is None else None,
        )

    def window_lists(self, table: BlockTable, window: int, out: Ragged) -> None:
        """Write into `out` what `window_keys` gives a layer whose rows have the group's slots as ids, a list for each query.

        Its shapes follow from the number of tokens, so that it can be captured in a graph, and run again for other values.
        """
        # Of the rows only the shape counts: a row a slot.
        rows = table.blocks.new_empty(1, table.block_size, 1)
        keys = self.window_keys(Cache(rows, table), self._list_tiles(), window)
        ragged(keys.ids, keys.hidden, out)

    def _list_tiles(self) -> Tiles:
        return self.tiles(1)

    def _visible_from(self, tiles: Tiles) -> torch.Tensor | int:
        """[N, 1], or one number for all tiles: the first position whose raw key is there."""
        first = self.batch.visible_from
        return 0 if first is None else first[tiles.request].unsqueeze(1)

    def entry_keys(self, cache: Cache, tiles: Tiles) -> Keys:
        """All entries that a query may see: entry j of ratio r is seen from position (j + 1) · r − 1 on."""
        table, ratio = cache.table, cache.table.tokens_per_row
        entry = torch.arange(self.entries(ratio), device=table.blocks.device)

        def hidden() -> torch.Tensor:
            return entry >= ((tiles.positions + 1) // ratio).unsqueeze(-1)

        return Keys(
            cache.rows,
            table.derive(
                f"entries {tiles.size} {cache.pitch}",
                lambda: self.entry_ids(cache, tiles),
            ),
            table.derive(f"entries hidden {tiles.size}", hidden),
            table.derive(
                f"no entry {tiles.size}",
                lambda: (tiles.last + 1 < ratio).view(-1, 1, 1),
            ),
        )

    def entry_ids(
        self, cache: Cache, tiles: Tiles, at: slice = slice(None)
    ) -> torch.Tensor:
        """[N, E] int64, ids of entries 0 … E − 1 of the tiles `at`; those that no query of a tile sees read as the last that one does."""
        ratio = cache.table.tokens_per_row
        entry = torch.arange(self.entries(ratio), device=cache.rows.device)
        last = (tiles.last[at] + 1) // ratio - 1
        seen = torch.minimum(entry, last.clamp_(min=0).unsqueeze(1))
        return cache.row_ids(tiles.request[at], seen)

    def selected_keys(self, cache: Cache, tiles: Tiles, selected: torch.Tensor) -> Keys:
        """The entries that the indexer selected, [T, k] with −1 after the last.

        Tiles of one query read their k entries; larger ones read all entries and hide those that were not selected.
        """
        table, ratio = cache.table, cache.table.tokens_per_row
        k = selected.shape[1]
        if tiles.place is not None:
            every = self.entry_keys(cache, tiles)
            entries = every.hidden.shape[2]
            hidden = every.hidden.new_ones((*every.hidden.shape[:2], entries + 1))
            chosen = tiles.split(selected)
            hidden.scatter_(2, torch.where(chosen < 0, entries, chosen), False)
            return Keys(cache.rows, every.ids, hidden[..., :entries], every.none)

        def hidden_() -> torch.Tensor:
            step = torch.arange(k, device=selected.device)
            return step >= ((tiles.positions + 1) // ratio).unsqueeze(-1)

        return Keys(
            cache.rows,
            cache.row_ids(tiles.request, selected.clamp(min=0)),
            table.derive(f"selected hidden {k}", hidden_),
            table.derive("no entry 1", lambda: (tiles.last + 1 < ratio).view(-1, 1, 1)),
        )

    def pool(self, parts: Cache, compressed: Cache, overlap: bool) -> Pool | None:
        """What the compressor pools in this step, and where entries go; None: nothing, which only a CPU looks up, where that stalls nothing.

        Args:
            parts: the compressor's cache, its rows cut into parts (see `compressor_pool`).
            compressed: the cache of the entries.
            overlap: an entry spans its own group of tokens and the one before.
        """
        table = compressed.table
        # The table is kept with what was made of it, so that no other gets its id.
        _, pool = parts.table.derive(
            f"pool {parts.pitch} {compressed.pitch} {id(table)} {overlap}",
            lambda: (table, self._pool(parts, compressed, overlap)),
        )
        return pool

    def _pool(self, parts: Cache, compressed: Cache, overlap: bool) -> Pool | None:
        device, ratio = self.positions.device, compressed.table.tokens_per_row
        width = 2 * ratio if overlap else ratio
        slots = compressed.slot_ids()
        completes = (self.phase(ratio) == ratio - 1) & (slots >= 0)
        if device.type == "cpu" and not completes.any():
            return None
        token = torch.arange(self.tokens, device=device)
        # A request of q tokens completes at most q // ratio + 1 entries.
        count = min(self.tokens, self.tokens // ratio + self.requests)
        if count < self.tokens:
            place = torch.where(completes, completes.cumsum(0) - 1, count)
            packed = token.new_zeros(count + 1).scatter_(0, place, token)[:count]
            completes = token[:count] < completes.sum()
            token = packed
        position = self.positions[token]
        back = torch.arange(width, device=device)
        source = position.unsqueeze(1) + (back - (width - 1))
        unseen = source < 0
        # What is not pooled reads the token's own row, which this step has written.
        read = ~unseen & completes.unsqueeze(1)
        source = torch.where(read, source, position.unsqueeze(1))
        half = 2 if overlap else 1
        ids = parts.row_ids(self.batch.request_of_token[token], source, 2 * half)
        if overlap:
            ids = ids + (back >= ratio)
        return Pool(
            torch.stack((ids, ids + half), 1),
            unseen,
            torch.where(completes, slots[token], -1),
            self.group_rotation(token, ratio),
        )

    def group_rotation(self, token: torch.Tensor, ratio: int) -> torch.Tensor:
        """[M, P] complex64, at the first position of the groups of `ratio` that tokens [M] are in."""
        position = self.positions[token] // ratio * ratio
        return rotations(position, self._compress_theta)
