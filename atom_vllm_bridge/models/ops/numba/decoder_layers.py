"""ops/torch/decoder_layers.py in one call, for few tokens: what layer.py needs is collected here, once where it can be."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from atom_vllm_bridge.models.ops.numba import (
    experts,
    hc_pre,
    indices,
    layer as compiled,
    linear,
    sparse_attention,
)
from atom_vllm_bridge.models.ops.numba.few import BITS, MOST, trained
from atom_vllm_bridge.models.ops.numba.team import team
from atom_vllm_bridge.models.ops.panels import WIDTH
from atom_vllm_bridge.models.ops.rows import flat_rows, pitch
from atom_vllm_bridge.models.ops.torch import decoder_layers as reference

_FLOATS, _IDS = np.empty(0, np.float32), np.empty(0, np.int64)
_NO_INPUTS = np.empty((0, 0), np.float32)
_NO_COMPRESSING = compiled.Compressing(0, 0, _NO_INPUTS, _FLOATS)
_NO_ENTRIES = compiled.Seen(np.empty((0, 0), np.int64), np.empty((0, 0, 0), np.bool_))
_NO_POOLING = compiled.Pooling(
    np.empty((0, 2, 0), np.int64),
    np.empty((0, 0), np.bool_),
    _IDS,
    np.empty((0, 0), np.complex64),
)


class _Unfit(Exception):
    """The layer is not one that layer.py can run."""


def _need(condition: bool) -> None:
    if not condition:
        raise _Unfit


def _matrix(w: torch.Tensor, columns: int) -> compiled.Matrix:
    """The panels of a matrix of so many columns, a group."""
    _need(w.dim() in (3, 4) and w.dtype in linear.bodies and w.is_contiguous())
    groups = w.shape[0] if w.dim() == 4 else 1
    count = -(-columns // WIDTH)
    address = linear.bodies[w.dtype].address
    return compiled.Matrix(address, w.data_ptr(), groups, count, w.shape[-2])


def _full(w: torch.Tensor, columns: int) -> compiled.Matrix:
    """The same, without filling after the columns that are asked for."""
    _need(columns % WIDTH == 0)
    return _matrix(w, columns)


def _hyper(hc: Any, norm: torch.Tensor) -> compiled.Hyper:
    return compiled.Hyper(
        hc_pre.by_tokens.address,
        hc.iterations,
        np.array((hc.eps, hc.norm_eps)),
        hc.fn.detach().numpy(),
        hc.base.detach().numpy(),
        hc.scale.detach().numpy(),
        norm.detach().numpy(),
    )


def _compressing(attn: Any, name: str, compressor: Any) -> compiled.Compressing:
    if compressor is None:
        return _NO_COMPRESSING
    names = list(attn.columns)
    first = sum(attn.columns[other] for other in names[: names.index(name)])
    return compiled.Compressing(
        first,
        compressor.projected,
        compressor.ape.detach().numpy(),
        compressor.norm.detach().numpy(),
    )


def _attending(attn: Any) -> compiled.Attending:
    for codec in (attn.codec.kv, attn.codec.index):
        _need(codec.dtype in sparse_attention.bodies)
    _need(attn.codec.kv.width == attn.dim)
    indexer = attn.indexer.compressor if attn.indexer is not None else None
    rank = attn.wo_b.shape[-2] // attn.groups
    return compiled.Attending(
        sparse_attention.bodies[attn.codec.kv.dtype].address,
        attn.norm_eps,
        attn.scale,
        _matrix(attn.w_in, sum(attn.columns.values())),
        attn.q_norm.detach().numpy(),
        attn.kv_norm.detach().numpy(),
        _full(attn.wq_b, attn.query_rows),
        attn.sink.detach().numpy(),
        _full(attn.wo_a, rank),
        _full(attn.wo_b, attn.hidden),
        _compressing(attn, "compressor", attn.compressor),
        _compressing(attn, "index_compressor", indexer),
    )


def _choosing(ffn: Any) -> compiled.Choosing:
    inner, d = ffn.w2.shape[-2], ffn.gate.shape[1]
    both = ffn.w13.dtype == ffn.w2.dtype and ffn.w13.dim() == ffn.w2.dim() == 4
    _need(both and 2 * inner % WIDTH == d % WIDTH == 0)
    table = ffn.tid2eid
    return compiled.Choosing(
        experts.bodies[ffn.w13.dtype].address,
        ffn.k,
        ffn.route_scale,
        np.array([ffn.limit], np.float32),
        ffn.gate.detach().numpy(),
        _FLOATS if table is not None else ffn.bias.detach().numpy(),
        np.empty((0, 0), np.int64) if table is None else table.numpy(),
        ffn.w13.data_ptr(),
        ffn.w2.data_ptr(),
        inner,
        _full(ffn.shared_w13, 2 * ffn.shared_w2.shape[-2]),
        _full(ffn.shared_w2, d),
    )


def _all_compiled(layer: Any) -> bool:
    """Whether the layer's parts run this folder's ops, where it has them: a setting may have chosen others."""
    ops = __package__.rpartition(".")[0]
    for module in layer.modules():
        for op in vars(module).values():
            origin = getattr(op, "__module__", None) or ""
            if callable(op) and origin.startswith(ops):
                stem = origin.rpartition(".")[2]
                if origin != f"{__package__}.{stem}" and find_spec(
                    f"{__package__}.{stem}"
                ):
                    return False
    return True


class _Bound:
    """A layer's weights where layer.py finds them; good for as long as they stay where they are.

    Raises:
        _Unfit: the weights are not packed, or not as wide as whole panels; or caches do not hold plain values.
    """

    def __init__(self, layer: Any) -> None:
        self.weights = (*layer.parameters(), *layer.buffers())
        self.dtypes, self.addresses = self._dtypes(), self._addresses()
        self.layer = compiled.Layer(
            _hyper(layer.hc_attn, layer.attn_norm),
            _attending(layer.attn),
            _hyper(layer.hc_ffn, layer.ffn_norm),
            _choosing(layer.ffn),
        )
        self._lists: dict[str, tuple[torch.Tensor, int, np.ndarray]] = {}

    def _addresses(self) -> list[int]:
        return [weight.data_ptr() for weight in self.weights]

    def _dtypes(self) -> list[torch.dtype]:
        return [weight.dtype for weight in self.weights]

    @property
    def current(self) -> bool:
        return self.addresses == self._addresses() and self.dtypes == self._dtypes()

    def rows(self, role: str, cache: Any) -> tuple[int, np.ndarray]:
        """`pitch` of a cache, and its list of rows: floats of a compressor, bits of keys.

        Raises:
            _Unfit: the rows do not lie in one list.
        """
        rows = cache.rows
        if role not in self._lists or self._lists[role][0] is not rows:
            flat = flat_rows(rows)
            if flat is None:
                raise _Unfit
            if not role.endswith("compressor"):
                flat = flat.view(BITS[rows.dtype])
            self._lists[role] = rows, pitch(rows), flat.numpy()
        return self._lists[role][1:]


_bounds: WeakKeyDictionary[Any, _Bound | None] = WeakKeyDictionary()


def _bound(layer: Any) -> _Bound | None:
    bound = _bounds.get(layer)
    if bound is None or not bound.current:
        try:
            bound = _Bound(layer) if _all_compiled(layer) else None
        except _Unfit:
            bound = None
        _bounds[layer] = bound
    return bound


def _few(layer: Any, streams: torch.Tensor, plan: Any) -> bool:
    """Whether the step is one that one thread between the products gets through sooner than torch."""
    attn = layer.attn
    entries = 0
    if attn.compressor is not None:
        entries = plan.entries(attn.compressor.ratio)
    if attn.indexer is not None and entries > attn.indexer.topk:
        return False
    queries = len(streams) * attn.query_rows
    return (
        plan.causal
        and max(streams.numel(), queries) <= MOST
        and queries * (attn.window + entries) <= sparse_attention.MOST_PRODUCTS
    )


class _Step:
    """A step's index tensors, made once for all layers of a group, and kept with the group's table."""

    def __init__(self, plan: Any) -> None:
        self.plan = plan
        self.request = plan.batch.request_of_token.numpy()
        self.positions = plan.positions.numpy()

    def written(self, table: Any, pitch: int) -> np.ndarray:
        """[T], where each token's row goes."""

        def make() -> np.ndarray:
            slots, per_row = table.slots.contiguous().numpy(), table.tokens_per_row
            return indices.slot_rows(slots, table.block_size, per_row, pitch)

        return table.derive(f"few slots {pitch}", make)

    def window(self, table: Any, pitch: int, width: int) -> compiled.Seen:
        def make() -> compiled.Seen:
            size = table.block_size
            where = self.request, self.positions, width, size, pitch
            return compiled.Seen(*indices.window_rows(_blocks(table), *where))

        return table.derive(f"few window {pitch} {width}", make)

    def entries(self, table: Any, pitch: int, entries: int) -> compiled.Seen:
        def make() -> compiled.Seen:
            ratio, size = table.tokens_per_row, table.rows_per_block
            where = self.request, self.positions, entries, ratio, size, pitch
            return compiled.Seen(*indices.entry_rows(_blocks(table), *where))

        return table.derive(f"few entries {pitch}", make)

    def pooling(
        self, table: Any, pitch: int, overlap: bool, entries: Any, entry_pitch: int
    ) -> compiled.Pooling:
        """Of the inputs in `table`, into the entries of another."""

        def make() -> tuple[Any, compiled.Pooling]:
            ratio, ids = entries.tokens_per_row, self.written(entries, entry_pitch)
            token, parts, unseen = indices.pooled_rows(
                _blocks(table),
                self.request,
                self.positions,
                ids,
                ratio,
                overlap,
                table.block_size,
                pitch,
            )
            if not token.size:
                return entries, _NO_POOLING
            rotation = self.plan.group_rotation(torch.from_numpy(token), ratio)
            pooling = compiled.Pooling(parts, unseen, ids[token], rotation.numpy())
            # With the table, so that no other gets its id.
            return entries, pooling

        name = f"few pooling {pitch} {entry_pitch} {id(entries)} {overlap}"
        return table.derive(name, make)[1]


def _blocks(table: Any) -> np.ndarray:
    return table.blocks.contiguous().numpy()


def _compressed(
    bound: _Bound, step: _Step, role: str, compressor: Any, inputs: Any, entries: Any
) -> compiled.Compressed:
    _need(inputs is not None and entries is not None)
    pitch_, rows = bound.rows(f"{role}_compressor", inputs)
    entry_pitch, entry_rows = bound.rows(role, entries)
    return compiled.Compressed(
        compiled.Rows(rows, step.written(inputs.table, pitch_)),
        entry_rows,
        step.plan.phase(compressor.ratio).numpy(),
        step.pooling(
            inputs.table, pitch_, compressor.overlap, entries.table, entry_pitch
        ),
    )


def decoder_layers(
    layers: Sequence[Any],
    streams: torch.Tensor,
    input_ids: torch.Tensor,
    plan: Any,
    state: Sequence[Any],
) -> torch.Tensor:
    if not 0 < len(streams) <= linear.MOST_ROWS or not streams.is_cpu:
        return reference.decoder_layers(layers, streams, input_ids, plan, state)
    # All of them first: between the layers, whose weights fill the caches of a core, the same takes three times as long.
    ready = [
        _ready(layer, streams, plan, caches)
        for layer, caches in zip(layers, state, strict=True)
    ]
    team_, ids, between = team(), input_ids.numpy(), _empty(streams).numpy()
    for layer, caches, arguments in zip(layers, state, ready, strict=True):
        if arguments is None:
            streams = reference.decoder_layers(
                [layer], streams, input_ids, plan, [caches]
            )
            continue
        narrow, z = streams.dtype == torch.bfloat16, streams.float().contiguous()
        out = _empty(z)
        compiled.layer(
            team_, narrow, *arguments, ids, z.numpy(), between, out.numpy()
        )
        streams = out.to(streams.dtype)
    return streams


def _empty(streams: torch.Tensor) -> torch.Tensor:
    return torch.empty(streams.shape, dtype=torch.float32)


def _ready(
    layer: Any, streams: torch.Tensor, plan: Any, state: Any
) -> tuple[Any, ...] | None:
    """What `layer` of layer.py takes before the token ids; None: the step, or the layer, is not for it."""
    bound = _bound(layer) if _few(layer, streams, plan) else None
    if bound is None or trained(streams, *bound.weights):
        return None
    try:
        state_ = _state(bound, layer.attn, plan, state)
    except _Unfit:
        return None
    return bound.layer, plan.rotation(layer.attn.layer_type).numpy(), state_


def _state(bound: _Bound, attn: Any, plan: Any, state: Any) -> compiled.State:
    """The layer's caches, and where this step reads and writes them."""
    step = _step(plan)
    pitch_, rows = bound.rows("window", state.window)
    table = state.window.table
    window = compiled.Rows(rows, step.written(table, pitch_))
    seen = step.window(table, pitch_, attn.window)
    main = index = compiled.Compressed(
        compiled.Rows(_NO_INPUTS, _IDS), rows[:0], _IDS, _NO_POOLING
    )
    entries_seen = _NO_ENTRIES
    if attn.compressor is not None:
        given = attn.compressor, state.compressor, state.compressed
        main = _compressed(bound, step, "main", *given)
        table = state.compressed.table
        entry_pitch, _ = bound.rows("main", state.compressed)
        entries = plan.entries(attn.compressor.ratio)
        entries_seen = step.entries(table, entry_pitch, entries)
    if attn.indexer is not None:
        given = attn.indexer.compressor, state.index_compressor, state.index
        index = _compressed(bound, step, "index", *given)
    return compiled.State(window, seen, main, entries_seen, index)


_steps: WeakKeyDictionary[Any, _Step] = WeakKeyDictionary()


def _step(plan: Any) -> _Step:
    if plan not in _steps:
        _steps[plan] = _Step(plan)
    return _steps[plan]
