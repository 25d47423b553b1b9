"""Index tensors of one step, derived on the device and shared by all layers.

Queries are computed in tiles: a tile is up to Q consecutive tokens of one request, so that its keys are gathered once. How
many tiles there can be follows from sizes that the host knows; which request a tile belongs to, only the device knows.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from atom_vllm_bridge.models.deepseek_v4.config import SLIDING
from atom_vllm_bridge.models.deepseek_v4.state import Batch, BlockTable, Cache
from atom_vllm_bridge.models.ops.ragged import Ragged, ragged
from atom_vllm_bridge.models.ops.registry import Op, resolved
from atom_vllm_bridge.models.ops.torch.sparse_attention import Keys

TILE_SIZES = (128, 64, 32, 16, 8, 4, 2, 1)
# Scores of one tile may take so much.
TILE_BYTES = 16 << 20
EVERY = slice(None)
# Fetching the keys of a tile costs about as much as computing so many queries.
TILE_COST = 8


@dataclass(frozen=True)
class Tiles:
    """Tokens, cut into tiles of one request each.

    Attributes:
        request: [N] int64.
        size: Q, queries a tile.
        start: [N] int64, position of the first query.
        last: [N] int64, position of the last query, at least 0.
        token: [N, Q] int64, place of a tile's queries in the batch; beyond the tile's end: any token. None where tiles are tokens.
        place: [T] int64, place of a token in the flattened tiles; None where tiles are tokens.
    """

    size: int
    request: torch.Tensor
    start: torch.Tensor
    last: torch.Tensor
    token: torch.Tensor | None = None
    place: torch.Tensor | None = None

    @cached_property
    def positions(self) -> torch.Tensor:
        """[N, Q] int64; beyond the tile's end they go on counting."""
        if self.size == 1:
            return self.start.unsqueeze(1)
        step = torch.arange(self.size, device=self.start.device)
        return self.start.unsqueeze(1) + step

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """[T, ...] → [N, Q, ...]."""
        if self.token is None:
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
        self._available: dict[tuple[int, int], torch.Tensor] = {}

    def _op(self, name: str) -> Op:
        return resolved(name, self.positions.device)

    @cached_property
    def sliding_rotation(self) -> torch.Tensor:
        """[T, P] complex64, for sliding layers."""
        return self._op("rotations")(self.positions, self._theta)

    @cached_property
    def compress_rotation(self) -> torch.Tensor:
        """[T, P] complex64, for compressed layers and the indexer's queries."""
        return self._op("rotations")(self.positions, self._compress_theta)

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
        request = self.batch.request_of_token
        if size == 1:
            return Tiles(1, request, self.positions, self.positions)
        owner, token, start, last, place = self._op("tiles")(
            self.batch.query_start_loc,
            request,
            self.positions,
            size,
            self._tile_count(size),
        )
        return Tiles(size, owner, start, last, token, place)

    def available(self, tiles: Tiles, ratio: int) -> torch.Tensor:
        """[N, Q] int64, how many entries each query may see."""
        key = tiles.size, ratio
        if key not in self._available:
            self._available[key] = (tiles.positions + 1) // ratio
        return self._available[key]

    def window_keys(self, cache: Cache, tiles: Tiles, window: int) -> Keys:
        """The raw keys of each tile: `window` of them for each query, its own the last.

        Positions before the first key that is there, or after the tile's last query, are hidden from all its queries, and
        read as the nearest position that is not.
        """
        batch, table = self.batch, cache.table

        def rows() -> tuple[torch.Tensor, torch.Tensor]:
            return self._op("window_rows")(
                cache.blocks(),
                tiles.request,
                tiles.start,
                tiles.last,
                batch.visible_from,
                tiles.size,
                window,
            )

        ids, hidden = table.derive(f"window {window} {tiles.size} {cache.pitch}", rows)
        lists = cache.listed(self.tokens, window) if tiles.place is None else None
        return Keys(cache.rows, ids, hidden, ragged=lists)

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

    def entry_keys(self, cache: Cache, tiles: Tiles) -> Keys:
        """All entries that a query may see: entry j of ratio r is seen from position (j + 1) · r − 1 on."""
        ids, hidden, none = cache.table.derive(
            f"entries {tiles.size} {cache.pitch}",
            lambda: self._entry_rows(cache, tiles, tiles.size),
        )
        return Keys(cache.rows, ids, hidden, none)

    def entry_ids(self, cache: Cache, tiles: Tiles, at: slice = EVERY) -> torch.Tensor:
        """[N, E] int64, ids of entries 0 … E − 1 of the tiles `at`; those that no query of a tile sees read as the last that one does."""
        if at != EVERY:
            return self._entry_rows(cache, tiles, 0, at)[0]
        return cache.table.derive(
            f"entry ids {tiles.size} {cache.pitch}",
            lambda: self._entry_rows(cache, tiles, 0)[0],
        )

    def _entry_rows(
        self, cache: Cache, tiles: Tiles, queries: int, at: slice = EVERY
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ratio = cache.table.tokens_per_row
        return self._op("entry_rows")(
            cache.blocks(),
            tiles.request[at],
            tiles.start[at],
            tiles.last[at],
            queries,
            self.entries(ratio),
            ratio,
        )

    def selected_keys(self, cache: Cache, tiles: Tiles, selected: torch.Tensor) -> Keys:
        """The entries that the indexer selected, [T, k] with −1 after the last.

        Tiles of one query read their k entries; larger ones read all entries and hide those that were not selected.
        """
        if tiles.place is not None:
            every = self.entry_keys(cache, tiles)
            entries = every.hidden.shape[2]
            hidden = every.hidden.new_ones((*every.hidden.shape[:2], entries + 1))
            chosen = tiles.split(selected)
            hidden.scatter_(2, torch.where(chosen < 0, entries, chosen), False)
            return Keys(cache.rows, every.ids, hidden[..., :entries], every.none)
        ids, hidden = self._op("selected_rows")(cache.blocks(), tiles.request, selected)
        # The best comes first.
        return Keys(cache.rows, ids, hidden, hidden[..., :1])

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
        table, ratio = compressed.table, compressed.table.tokens_per_row
        if self.positions.device.type == "cpu":
            completes = (self.phase(ratio) == ratio - 1) & (table.slots >= 0)
            if not completes.any():
                return None
        # A request of q tokens completes at most q // ratio + 1 entries.
        count = min(self.tokens, self.tokens // ratio + self.requests)
        return Pool(
            *self._op("pooled_rows")(
                parts.blocks(4 if overlap else 2),
                compressed.blocks(),
                self.batch.request_of_token,
                self.positions,
                table.slots,
                count,
                ratio,
                2 * ratio if overlap else ratio,
                self._compress_theta,
            )
        )

    def group_rotation(self, token: torch.Tensor, ratio: int) -> torch.Tensor:
        """[M, P] complex64, at the first position of the groups of `ratio` that tokens [M] are in."""
        position = self.positions[token] // ratio * ratio
        return self._op("rotations")(position, self._compress_theta)
