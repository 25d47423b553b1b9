"""ops/torch/decoder_layer.py in one call, for few tokens: what layer.py needs is collected here, once where it can be."""

from importlib.util import find_spec
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from atom_vllm_bridge.models.ops.numba import (
    experts,
    hc_pre,
    layer as compiled,
    linear,
    sparse_attention,
)
from atom_vllm_bridge.models.ops.numba.few import BITS, MOST, trained
from atom_vllm_bridge.models.ops.numba.team import team
from atom_vllm_bridge.models.ops.panels import WIDTH
from atom_vllm_bridge.models.ops.rows import flat_rows, pitch
from atom_vllm_bridge.models.ops.torch import decoder_layer as reference

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
        self.key = self._key()
        self.hc_attn = _hyper(layer.hc_attn, layer.attn_norm)
        self.attn = _attending(layer.attn)
        self.hc_ffn = _hyper(layer.hc_ffn, layer.ffn_norm)
        self.ffn = _choosing(layer.ffn)
        self._lists: dict[str, tuple[torch.Tensor, int, np.ndarray]] = {}

    def _key(self) -> list[Any]:
        return [(weight.data_ptr(), weight.dtype) for weight in self.weights]

    @property
    def current(self) -> bool:
        return self.key == self._key()

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
    tokens, entries = streams.shape[0], 0
    if attn.compressor is not None:
        entries = plan.entries(attn.compressor.ratio)
    if attn.indexer is not None and entries > attn.indexer.topk:
        return False
    queries = tokens * attn.query_rows
    return (
        plan.causal
        and 0 < tokens <= linear.MOST_ROWS
        and max(streams.numel(), queries) <= MOST
        and queries * (attn.window + entries) <= sparse_attention.MOST_PRODUCTS
    )


def _written(bound: _Bound, role: str, cache: Any) -> compiled.Rows:
    step, rows = bound.rows(role, cache)
    ids = cache.table.derive(f"few {step}", lambda: cache.slot_ids().numpy())
    return compiled.Rows(rows, ids)


def _seen(keys: Any) -> compiled.Seen:
    return compiled.Seen(keys.ids.numpy(), keys.hidden.contiguous().numpy())


def _compressed(
    bound: _Bound, role: str, compressor: Any, plan: Any, inputs: Any, entries: Any
) -> compiled.Compressed:
    pool = compressor.pool(plan, inputs, entries)
    pooling = _NO_POOLING
    if pool is not None:
        pooling = compiled.Pooling(
            pool.ids.numpy(),
            pool.unseen.numpy(),
            pool.write.numpy(),
            pool.rotation.numpy(),
        )
    return compiled.Compressed(
        _written(bound, f"{role}_compressor", inputs),
        bound.rows(role, entries)[1],
        plan.phase(compressor.ratio).numpy(),
        pooling,
    )


def decoder_layer(
    layer: Any, streams: torch.Tensor, input_ids: torch.Tensor, plan: Any, state: Any
) -> torch.Tensor:
    refused = not streams.is_cpu or not _few(layer, streams, plan)
    bound = None if refused else _bound(layer)
    if bound is None or trained(streams, *bound.weights):
        return reference.decoder_layer(layer, streams, input_ids, plan, state)
    try:
        state_ = _state(bound, layer.attn, plan, state)
    except _Unfit:
        return reference.decoder_layer(layer, streams, input_ids, plan, state)
    z = streams.float().contiguous()
    between, out = torch.empty_like(z).numpy(), torch.empty_like(z)
    team_, narrow = team(), streams.dtype == torch.bfloat16
    rotation = plan.rotation(layer.attn.layer_type).numpy()
    compiled.attention(
        team_, narrow, bound.hc_attn, bound.attn, z.numpy(), rotation, *state_, between
    )
    compiled.feed_forward(
        team_,
        narrow,
        bound.hc_ffn,
        bound.ffn,
        between,
        input_ids.numpy(),
        out.numpy(),
    )
    return out.to(streams.dtype)


def _state(bound: _Bound, attn: Any, plan: Any, state: Any) -> tuple[Any, ...]:
    """What `attention` takes between the rotation and its result."""
    tiles, width = plan.tiles(1), attn.window
    window = _written(bound, "window", state.window)
    seen = state.window.table.derive(
        f"few window {state.window.pitch} {width}",
        lambda: _seen(plan.window_keys(state.window, tiles, width)),
    )
    nothing = compiled.Compressed(
        compiled.Rows(_NO_INPUTS, _IDS), window.rows[:0], _IDS, _NO_POOLING
    )
    main = index = nothing
    entries_seen = _NO_ENTRIES
    if attn.compressor is not None:
        _need(state.compressor is not None and state.compressed is not None)
        main = _compressed(
            bound,
            "compressed",
            attn.compressor,
            plan,
            state.compressor,
            state.compressed,
        )
        if plan.entries(attn.compressor.ratio):
            entries_seen = state.compressed.table.derive(
                f"few entries {state.compressed.pitch}",
                lambda: _seen(plan.entry_keys(state.compressed, tiles)),
            )
    if attn.indexer is not None:
        _need(state.index_compressor is not None and state.index is not None)
        index = _compressed(
            bound,
            "index",
            attn.indexer.compressor,
            plan,
            state.index_compressor,
            state.index,
        )
    return window, seen, main, entries_seen, index
