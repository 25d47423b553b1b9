"""ops/torch/decoder_layers.py for few tokens, a call for each layer: what layer.py needs is collected here, once where it can be."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import numpy as np
import torch

from atom_vllm_bridge.models.ops.gradients import trained
from atom_vllm_bridge.models.ops.numba import (
    experts,
    indices,
    linear,
    parts,
    sparse_attention,
)
from atom_vllm_bridge.models.ops.numba import (
    layer as compiled,
)
from atom_vllm_bridge.models.ops.numba.few import MOST
from atom_vllm_bridge.models.ops.numba.team import Body, team
from atom_vllm_bridge.models.ops.panels import WIDTH
from atom_vllm_bridge.models.ops.rows import flat_rows, pitch
from atom_vllm_bridge.models.ops.torch import decoder_layers as reference

# Fields of a record of layer.py, in its order.
_Record = tuple[Any, ...]

_NO_COMPRESSOR = (0,) * 6
_NO_POOLING, _NO_KEYS = (0,) * 6, (0, 0, 0)
_NOT_COMPRESSED = (0, _NO_KEYS, _NO_KEYS, _NO_POOLING)
_LIKE = {torch.float32: np.empty(0, np.uint32), torch.bfloat16: np.empty(0, np.uint16)}


class _Unfit(Exception):
    """The layer, or its state, is not one that layer.py can run."""


def _need(condition: bool) -> None:
    if not condition:
        raise _Unfit


def _matrix(w: torch.Tensor, columns: int) -> _Record:
    """The panels of a matrix of so many columns, for each group."""
    _need(w.dim() in (3, 4) and w.dtype in linear.bodies and w.is_contiguous())
    groups = w.shape[0] if w.dim() == 4 else 1
    address = linear.bodies[w.dtype].address
    return address, w.data_ptr(), groups, -(-columns // WIDTH), w.shape[-2]


def _full(w: torch.Tensor, columns: int) -> _Record:
    """The same, where nothing but those columns is in the panels."""
    _need(columns % WIDTH == 0)
    return _matrix(w, columns)


def _fp32(tensor: torch.Tensor) -> int:
    _need(tensor.dtype == torch.float32 and tensor.is_contiguous())
    return tensor.data_ptr()


class _Bound:
    """A layer's weights where layer.py finds them; good for as long as they stay where they are.

    Attributes:
        weights: [1] LAYER; None: they are not packed, or not as wide as whole panels; or caches do not hold plain values.
        like: what `run_layer` calls `bits`.
    """

    def __init__(self, layer: Any) -> None:
        self._weights = (*layer.parameters(), *layer.buffers())
        self._addresses, self._dtypes = self._where()
        self._numbers: list[torch.Tensor] = []
        self._lists: dict[str, tuple[ReferenceType[torch.Tensor], int, _Record]] = {}
        try:
            self.weights = self._layer(layer) if _all_compiled(layer) else None
        except _Unfit:
            self.weights = None

    def _layer(self, layer: Any) -> np.ndarray:
        attn = layer.attn
        for codec in (attn.codec.kv, attn.codec.index):
            _need(codec.dtype == attn.codec.kv.dtype and codec.dtype in _LIKE)
        _need(attn.codec.kv.width == attn.dim)
        self.like = _LIKE[attn.codec.kv.dtype]
        record = (
            self._hyper(parts.read, layer.hc_attn, layer.attn_norm),
            self._attention(attn),
            self._hyper(parts.read_and_route, layer.hc_ffn, layer.ffn_norm),
            self._feed_forward(layer.ffn),
        )
        return np.array([record], compiled.LAYER)

    def _number(self, *values: float, dtype: torch.dtype) -> int:
        self._numbers.append(torch.tensor(values, dtype=dtype, device="cpu"))
        return self._numbers[-1].data_ptr()

    def _hyper(self, body: Body, hc: Any, norm: torch.Tensor) -> _Record:
        return (
            body.address,
            hc.iterations,
            self._number(hc.eps, hc.norm_eps, dtype=torch.float64),
            *map(_fp32, (hc.fn, hc.base, hc.scale, norm)),
        )

    def _attention(self, attn: Any) -> _Record:
        indexer = attn.indexer.compressor if attn.indexer is not None else None
        return (
            sparse_attention.bodies[attn.codec.kv.dtype].address,
            attn.num_heads,
            attn.dim,
            attn.q_rank,
            *map(_fp32, (attn.q_norm, attn.kv_norm, attn.sink)),
            self._number(attn.norm_eps, attn.scale, dtype=torch.float64),
            attn.norm_eps,
            _matrix(attn.w_in, sum(attn.columns.values())),
            _full(attn.wq_b, attn.query_rows),
            _full(attn.wo_a, attn.wo_b.shape[-2] // attn.groups),
            _full(attn.wo_b, attn.hidden),
            self._compressor(attn, "compressor", attn.compressor),
            self._compressor(attn, "index_compressor", indexer),
        )

    def _compressor(self, attn: Any, name: str, compressor: Any) -> _Record:
        if compressor is None:
            return _NO_COMPRESSOR
        names = list(attn.columns)
        first = sum(attn.columns[other] for other in names[: names.index(name)])
        sizes = first, compressor.projected, compressor.ratio, compressor.dim
        return *sizes, _fp32(compressor.ape), _fp32(compressor.norm)

    def _feed_forward(self, ffn: Any) -> _Record:
        many, d = ffn.gate.shape
        inner, table = ffn.w2.shape[-2], ffn.tid2eid
        w13, w2 = ffn.shared_w13, ffn.shared_w2
        shared = w2.shape[-2]
        _need(w13.dtype == w2.dtype == ffn.w2.dtype and w13.dim() == w2.dim() == 3)
        _need(2 * shared % WIDTH == 0)
        _need(ffn.w13.dtype == ffn.w2.dtype and ffn.w13.dim() == ffn.w2.dim() == 4)
        _need(2 * inner % WIDTH == d % WIDTH == 0 and ffn.w13.dtype in experts.bodies)
        return (
            experts.bodies[ffn.w13.dtype].address,
            many,
            ffn.k,
            inner,
            0 if table is None else len(table),
            _fp32(ffn.gate),
            0 if table is not None else _fp32(ffn.bias),
            0 if table is None else table.data_ptr(),
            ffn.w13.data_ptr(),
            ffn.w2.data_ptr(),
            self._number(ffn.limit, dtype=torch.float32),
            self._number(ffn.route_scale, dtype=torch.float64),
            shared,
            w13.data_ptr(),
            w2.data_ptr(),
        )

    def _where(self) -> tuple[list[int], list[torch.dtype]]:
        weights = self._weights
        return [w.data_ptr() for w in weights], [w.dtype for w in weights]

    def holds(self) -> bool:
        """Whether the weights are where they were."""
        return (self._addresses, self._dtypes) == self._where()

    def trained(self) -> bool:
        """Whether any needs a gradient."""
        return trained(*self._weights)

    def rows(self, role: str, cache: Any) -> tuple[int, _Record]:
        """`pitch` of a cache, and its list of rows: address and count.

        Raises:
            _Unfit: the rows do not lie in one list.
        """
        rows = cache.rows
        if role not in self._lists or self._lists[role][0]() is not rows:
            flat = flat_rows(rows)
            if flat is None:
                raise _Unfit
            # Weakly, so that a cache that gives way to another is freed.
            where = flat.data_ptr(), len(flat)
            self._lists[role] = ref(rows), pitch(rows), where
        return self._lists[role][1:]


def _all_compiled(layer: Any) -> bool:
    """Whether the layer's parts run this folder's ops, where it has them: a setting may have chosen others."""

    def another(op: Any) -> bool:
        origin = getattr(op, "__module__", None) or ""
        own = f"{__package__}.{origin.rpartition('.')[2]}"
        is_op = callable(op) and origin.startswith(__package__.rpartition(".")[0])
        return is_op and origin != own and find_spec(own) is not None

    parts = layer.modules()
    return not any(another(op) for part in parts for op in vars(part).values())


_bounds: WeakKeyDictionary[Any, _Bound] = WeakKeyDictionary()


def _bound(layer: Any) -> _Bound | None:
    bound = _bounds.get(layer)
    if bound is None or not bound.holds():
        bound = _bounds[layer] = _Bound(layer)
    return None if bound.weights is None or bound.trained() else bound


class _Step:
    """A step's index tensors, made once for all layers of a group, and kept with the group's table."""

    def __init__(self, plan: Any) -> None:
        self.plan = plan
        self.request = plan.batch.request_of_token.numpy()
        self.positions = plan.positions.numpy()

    def written(self, table: Any, pitch: int) -> tuple[int, np.ndarray]:
        """[T], where each token's row goes."""

        def make() -> tuple[int, np.ndarray]:
            slots, per_row = table.slots.contiguous().numpy(), table.tokens_per_row
            ids = indices.slot_rows(slots, table.block_size, per_row, pitch)
            return _address(ids), ids

        return table.derive(f"few slots {pitch}", make)

    def window(self, table: Any, pitch: int, width: int) -> _Record:
        def make() -> Any:
            size = table.block_size
            where = self.request, self.positions, width, size, pitch
            return _seen(*indices.window_rows(_blocks(table), *where))

        return table.derive(f"few window {pitch} {width}", make)[0]

    def entries(self, table: Any, pitch: int, entries: int) -> _Record:
        def make() -> Any:
            ratio, size = table.tokens_per_row, table.rows_per_block
            where = self.request, self.positions, entries, ratio, size, pitch
            return _seen(*indices.entry_rows(_blocks(table), *where))

        return table.derive(f"few entries {pitch}", make)[0]

    def pooling(
        self, table: Any, pitch: int, overlap: bool, entries: Any, entry_pitch: int
    ) -> _Record:
        """Of the inputs in `table`, into the entries of another."""

        def make() -> tuple[_Record, Any]:
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


def _seen(ids: np.ndarray, hidden: np.ndarray) -> tuple[_Record, Any]:
    return (_address(ids), _address(hidden), ids.shape[1]), (ids, hidden)


def _blocks(table: Any) -> np.ndarray:
    return table.blocks.contiguous().numpy()


def _compressed(
    bound: _Bound, step: _Step, role: str, compressor: Any, inputs: Any, entries: Any
) -> _Record:
    _need(inputs is not None and entries is not None)
    pitch_, rows = bound.rows(f"{role} inputs", inputs)
    entry_pitch, entry_rows = bound.rows(role, entries)
    table, entry_table = inputs.table, entries.table
    _need(table.holds(step.plan.batch.max_query_len))
    return (
        step.plan.phase(compressor.ratio).data_ptr(),
        (*rows, step.written(table, pitch_)[0]),
        (*entry_rows, 0),
        step.pooling(table, pitch_, compressor.overlap, entry_table, entry_pitch),
    )


def _state(bound: _Bound, attn: Any, step: _Step, state: Any) -> np.ndarray:
    """The layer's caches, and where this step reads and writes them: addresses in what `step` keeps."""
    pitch_, rows = bound.rows("window", state.window)
    table, plan = state.window.table, step.plan
    _need(table.holds(plan.batch.max_query_len))
    rotation = plan.rotation(attn.layer_type)
    main, entries_seen, index = _NOT_COMPRESSED, _NO_KEYS, _NOT_COMPRESSED
    if attn.compressor is not None:
        given = attn.compressor, state.compressor, state.compressed
        main = _compressed(bound, step, "main", *given)
        entry_pitch, _ = bound.rows("main", state.compressed)
        entries = plan.entries(attn.compressor.ratio)
        entries_seen = step.entries(state.compressed.table, entry_pitch, entries)
    if attn.indexer is not None:
        given = attn.indexer.compressor, state.index_compressor, state.index
        index = _compressed(bound, step, "index", *given)
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


def _few(layer: Any, streams: torch.Tensor, plan: Any) -> bool:
    """Whether the step is one that one thread between the products gets through sooner than torch."""
    attn, entries = layer.attn, 0
    if attn.compressor is not None:
        entries = plan.entries(attn.compressor.ratio)
    if attn.indexer is not None and entries > attn.indexer.topk:
        return False
    queries = len(streams) * attn.query_rows
    products = queries * (attn.window + entries)
    most = max(streams.numel(), queries)
    return most <= MOST and products <= sparse_attention.MOST_PRODUCTS


def _ready(
    layer: Any, streams: torch.Tensor, step: _Step, state: Any
) -> tuple[_Bound, np.ndarray] | None:
    """What `run_layer` takes; None: the step, or the layer, is not for it."""
    bound = _bound(layer) if _few(layer, streams, step.plan) else None
    if bound is None:
        return None
    try:
        return bound, _state(bound, layer.attn, step, state)
    except _Unfit:
        return None


def decoder_layers(
    layers: Sequence[Any],
    streams: torch.Tensor,
    input_ids: torch.Tensor,
    plan: Any,
    state: Sequence[Any],
) -> torch.Tensor:
    few = 0 < len(streams) <= linear.MOST_ROWS and plan.causal
    # What a request cannot see is all that comes before it.
    whole = plan.batch.visible_from is None
    if not few or not whole or not streams.is_cpu or trained(streams):
        return reference.decoder_layers(layers, streams, input_ids, plan, state)
    # All of them first: between the layers, whose weights fill the caches of a core, the same takes three times as long.
    step = _Step(plan)
    ready = [
        _ready(layer, streams, step, caches)
        for layer, caches in zip(layers, state, strict=True)
    ]
    team_, narrow = team(), streams.dtype == torch.bfloat16
    ids, between = input_ids.long().contiguous().numpy(), _empty(streams).numpy()
    for layer, caches, call in zip(layers, state, ready, strict=True):
        if call is None:
            streams = reference.decoder_layers(
                [layer], streams, input_ids, plan, [caches]
            )
            continue
        (bound, where), out = call, _empty(streams)
        compiled.run_layer(
            team_,
            narrow,
            bound.weights,
            where,
            bound.like,
            ids,
            streams.float().contiguous().numpy(),
            between,
            out.numpy(),
        )
        streams = out.to(streams.dtype)
    return streams


def _empty(streams: torch.Tensor) -> torch.Tensor:
    return torch.empty(streams.shape, dtype=torch.float32)
