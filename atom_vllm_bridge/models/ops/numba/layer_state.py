"""A layer's caches, and where a step reads and writes them, as records of layer.py."""

from typing import Any
from weakref import ReferenceType, ref

import numpy as np
import torch

from atom_vllm_bridge.models.ops.numba import indices
from atom_vllm_bridge.models.ops.numba import (
    layer as compiled,
)
from atom_vllm_bridge.models.ops.rows import flat_rows, pitch

# Fields of a record of layer.py, in its order.
Record = tuple[Any, ...]

_NO_POOLING, _NO_KEYS = (0,) * 6, (0, 0, 0)
_NOT_COMPRESSED = (0, _NO_KEYS, _NO_KEYS, _NO_POOLING)


def _place(*path: str) -> int:
    """Which of STATE's words a list of rows begins with."""
    kind, offset = compiled.STATE, 0
    for name in path:
        assert kind.fields is not None
        kind, within = kind.fields[name][:2]
        offset += within
    return offset // 8


# By the field of `LayerState`.
_PLACES = {
    "window": _place("window"),
    "compressor": _place("main", "inputs"),
    "compressed": _place("main", "entries"),
    "index_compressor": _place("index", "inputs"),
    "index": _place("index", "entries"),
}


class Unfit(Exception):
    """The layer, or its state, is not one that layer.py can run."""


def need(condition: bool) -> None:
    if not condition:
        raise Unfit


class Lists:
    """The lists of rows that a layer's caches are, looked up anew where a cache is another."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[ReferenceType[torch.Tensor], int, Record]] = {}

    def rows(self, role: str, cache: Any) -> tuple[int, Record]:
        """`pitch` of a cache, and its list of rows: address and count.

        Raises:
            Unfit: the rows do not lie in one list.
        """
        rows = cache.rows
        known = self._known.get(role)
        if known is None or known[0]() is not rows:
            flat = flat_rows(rows)
            if flat is None:
                raise Unfit
            # Weakly, so that a cache that gives way to another is freed.
            known = ref(rows), pitch(rows), (flat.data_ptr(), len(flat))
            self._known[role] = known
        return known[1:]


class Step:
    """A step's index tensors, made once for all layers of a group, and kept with the group's table."""

    def __init__(self, plan: Any) -> None:
        self.plan = plan
        self.request = plan.batch.request_of_token.numpy()
        self.positions = plan.positions.numpy()
        self.states: dict[tuple[Any, ...], np.ndarray] = {}

    def written(self, table: Any, pitch: int) -> tuple[int, np.ndarray]:
        """[T], where each token's row goes."""

        def make() -> tuple[int, np.ndarray]:
            slots, per_row = table.slots.contiguous().numpy(), table.tokens_per_row
            ids = indices.slot_rows(slots, table.block_size, per_row, pitch)
            return _address(ids), ids

        return table.derive(f"few slots {pitch}", make)

    def window(self, table: Any, pitch: int, width: int) -> Record:
        """What each token sees of the raw keys: a window up to its own, or all of its block and a window before."""

        def make() -> Any:
            blocks, where = _blocks(table), (width, table.block_size, pitch)
            if self.plan.causal:
                rows = indices.window_rows
                return _seen(*rows(blocks, self.request, self.positions, *where))
            batch = self.plan.batch
            # The first token of a request that has none, padding, is any.
            first = batch.query_start_loc[:-1].clamp(max=len(self.positions) - 1)
            start, end = self.positions[first.numpy()], batch.seq_lens.long().numpy()
            rows = indices.block_rows
            return _seen(*rows(blocks, self.request, start, end, *where))

        kind = "window" if self.plan.causal else "block"
        return table.derive(f"few {kind} {pitch} {width}", make)[0]

    def entries(self, table: Any, pitch: int, entries: int) -> Record:
        def make() -> Any:
            ratio, size = table.tokens_per_row, table.rows_per_block
            where = self.request, self.positions, entries, ratio, size, pitch
            return _seen(*indices.entry_rows(_blocks(table), *where))

        return table.derive(f"few entries {pitch}", make)[0]

    def pooling(
        self, table: Any, pitch: int, overlap: bool, entries: Any, entry_pitch: int
    ) -> Record:
        """Of the inputs in `table`, into the entries of another."""

        def make() -> tuple[Record, Any]:
            ratio, (_, ids) = entries.tokens_per_row, self.written(entries, entry_pitch)
            where = self.request, self.positions, ids, ratio, overlap
            token, parts, unseen = indices.pooled_rows(
                _blocks(table), *where, table.block_size, pitch
            )
            if not token.size:
                return _NO_POOLING, entries
            rotation, write = (
                self.plan.group_rotation(torch.from_numpy(token), ratio),
                ids[token],
            )
            addresses = map(_address, (parts, unseen, write))
            pooling = (*unseen.shape, *addresses, rotation.data_ptr())
            # The table too, so that no other gets its id.
            return pooling, (parts, unseen, write, rotation, entries)

        name = f"few pooling {pitch} {entry_pitch} {id(entries)} {overlap}"
        return table.derive(name, make)[0]


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def _seen(ids: np.ndarray, hidden: np.ndarray) -> tuple[Record, Any]:
    return (_address(ids), _address(hidden), ids.shape[1]), (ids, hidden)


def _blocks(table: Any) -> np.ndarray:
    return table.blocks.contiguous().numpy()


def _compressed(
    lists: Lists, step: Step, compressor: Any, state: Any, inputs_: str, entries_: str
) -> Record:
    inputs, entries = getattr(state, inputs_), getattr(state, entries_)
    need(inputs is not None and entries is not None)
    pitch_, rows = lists.rows(inputs_, inputs)
    entry_pitch, entry_rows = lists.rows(entries_, entries)
    table, entry_table = inputs.table, entries.table
    need(table.holds(step.plan.batch.max_query_len))
    return (
        step.plan.phase(compressor.ratio).data_ptr(),
        (*rows, step.written(table, pitch_)[0]),
        (*entry_rows, 0),
        step.pooling(table, pitch_, compressor.overlap, entry_table, entry_pitch),
    )


def state_of(lists: Lists, attn: Any, step: Step, state: Any) -> np.ndarray:
    """The layer's caches, and where this step reads and writes them: addresses in what `step` keeps.

    Raises:
        Unfit: the caches are not such that layer.py can run them.
    """
    caches = [(place, role, getattr(state, role)) for role, place in _PLACES.items()]
    found = [
        (place, cache.table, *lists.rows(role, cache))
        for place, role, cache in caches
        if cache is not None
    ]
    # Layers of one kind differ in where their rows are, and in nothing else.
    kind = attn.layer_type, *((id(table), pitch_) for _, table, pitch_, _ in found)
    if kind not in step.states:
        step.states[kind] = _state(lists, attn, step, state)
    words = step.states[kind].copy().view(np.int64)
    for place, _, _, (address, count) in found:
        words[place], words[place + 1] = address, count
    return words.view(compiled.STATE)


def _state(lists: Lists, attn: Any, step: Step, state: Any) -> np.ndarray:
    """The layer's caches, and where this step reads and writes them: addresses in what `step` keeps."""
    pitch_, rows = lists.rows("window", state.window)
    table, plan = state.window.table, step.plan
    need(table.holds(plan.batch.max_query_len))
    rotation = plan.rotation(attn.layer_type)
    main, entries_seen, index = _NOT_COMPRESSED, _NO_KEYS, _NOT_COMPRESSED
    if attn.compressor is not None:
        roles = "compressor", "compressed"
        main = _compressed(lists, step, attn.compressor, state, *roles)
        entry_pitch, _ = lists.rows("compressed", state.compressed)
        entries = plan.entries(attn.compressor.ratio)
        entries_seen = step.entries(state.compressed.table, entry_pitch, entries)
    if attn.indexer is not None:
        roles = "index_compressor", "index"
        index = _compressed(lists, step, attn.indexer.compressor, state, *roles)
    window = (*rows, step.written(table, pitch_)[0])
    seen = step.window(table, pitch_, attn.window)
    return np.array(
        [
            (
                rotation.shape[1],
                rotation.data_ptr(),
                window,
                seen,
                main,
                entries_seen,
                index,
            )
        ],
        compiled.STATE,
    )
