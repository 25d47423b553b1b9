"""ops/torch/decoder_layers.py for few tokens, a call for each layer: what layer.py needs is collected here, once where it can be."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from atom_vllm_bridge.models.ops.gradients import trained
from atom_vllm_bridge.models.ops.numba import (
    experts,
    linear,
    parts,
    sparse_attention,
)
from atom_vllm_bridge.models.ops.numba import (
    layer as compiled,
)
from atom_vllm_bridge.models.ops.numba.layer_state import (
    Lists,
    Record,
    Step,
    Unfit,
    need,
    state_of,
)
from atom_vllm_bridge.models.ops.numba.team import Body, team
from atom_vllm_bridge.models.ops.panels import WIDTH
from atom_vllm_bridge.models.ops.torch import decoder_layers as reference

# Beyond, what one thread does between the products is too much for the others to wait for.
MOST_TOKENS = 256
_NO_COMPRESSOR = (0,) * 6
_LIKE = {torch.float32: np.empty(0, np.uint32), torch.bfloat16: np.empty(0, np.uint16)}


def _matrix(w: torch.Tensor, columns: int) -> Record:
    """The panels of a matrix of so many columns, for each group."""
    need(w.dim() in (3, 4) and w.dtype in linear.bodies and w.is_contiguous())
    groups = w.shape[0] if w.dim() == 4 else 1
    address = linear.bodies[w.dtype].address
    return address, w.data_ptr(), groups, -(-columns // WIDTH), w.shape[-2]


def _full(w: torch.Tensor, columns: int) -> Record:
    """The same, where nothing but those columns is in the panels."""
    need(columns % WIDTH == 0)
    return _matrix(w, columns)


def _fp32(tensor: torch.Tensor) -> int:
    need(tensor.dtype == torch.float32 and tensor.is_contiguous())
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
        self.lists = Lists()
        try:
            self.weights = self._layer(layer) if _all_compiled(layer) else None
        except Unfit:
            self.weights = None

    def _layer(self, layer: Any) -> np.ndarray:
        attn = layer.attn
        for codec in (attn.codec.kv, attn.codec.index):
            need(codec.dtype == attn.codec.kv.dtype and codec.dtype in _LIKE)
        need(attn.codec.kv.width == attn.dim)
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

    def _hyper(self, body: Body, hc: Any, norm: torch.Tensor) -> Record:
        return (
            body.address,
            hc.iterations,
            self._number(hc.eps, hc.norm_eps, dtype=torch.float64),
            *map(_fp32, (hc.fn, hc.base, hc.scale, norm)),
        )

    def _attention(self, attn: Any) -> Record:
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

    def _compressor(self, attn: Any, name: str, compressor: Any) -> Record:
        if compressor is None:
            return _NO_COMPRESSOR
        names = list(attn.columns)
        first = sum(attn.columns[other] for other in names[: names.index(name)])
        sizes = first, compressor.projected, compressor.ratio, compressor.dim
        return *sizes, _fp32(compressor.ape), _fp32(compressor.norm)

    def _feed_forward(self, ffn: Any) -> Record:
        many, d = ffn.gate.shape
        inner, table = ffn.w2.shape[-2], ffn.tid2eid
        w13, w2 = ffn.shared_w13, ffn.shared_w2
        shared = w2.shape[-2]
        need(w13.dtype == w2.dtype == ffn.w2.dtype and w13.dim() == w2.dim() == 3)
        need(2 * shared % WIDTH == 0)
        need(ffn.w13.dtype == ffn.w2.dtype and ffn.w13.dim() == ffn.w2.dim() == 4)
        need(2 * inner % WIDTH == d % WIDTH == 0 and ffn.w13.dtype in experts.bodies)
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


def _sees_all(layer: Any, plan: Any) -> bool:
    """Whether no indexer has to choose among the entries, which layer.py does not do."""
    attn = layer.attn
    if attn.indexer is None:
        return True
    return bool(plan.entries(attn.compressor.ratio) <= attn.indexer.topk)


def _ready(layer: Any, step: Step, state: Any) -> tuple[_Bound, np.ndarray] | None:
    """What `run_layer` takes; None: the step, or the layer, is not for it."""
    bound = _bound(layer) if _sees_all(layer, step.plan) else None
    if bound is None:
        return None
    try:
        return bound, state_of(bound.lists, layer.attn, step, state)
    except Unfit:
        return None


def decoder_layers(
    layers: Sequence[Any],
    streams: torch.Tensor,
    input_ids: torch.Tensor,
    plan: Any,
    state: Sequence[Any],
) -> torch.Tensor:
    few = 0 < len(streams) <= MOST_TOKENS
    # What a request cannot see is all that comes before it.
    whole = plan.batch.visible_from is None
    if not few or not whole or not streams.is_cpu or trained(streams):
        return reference.decoder_layers(layers, streams, input_ids, plan, state)
    # All of them first: between the layers, whose weights fill the caches of a core, the same takes three times as long.
    step = Step(plan)
    ready = [
        _ready(layer, step, caches) for layer, caches in zip(layers, state, strict=True)
    ]
    team_, narrow = team(), streams.dtype == torch.bfloat16
    ids = input_ids.long().contiguous().numpy()
    given = streams.float().contiguous()
    # Of layer after layer in turn, but not of the first, which is the caller's.
    made, between = (_empty(streams), _empty(streams)), _empty(streams).numpy()
    spaces, x = [space.numpy() for space in made], given.numpy()
    for n, (layer, caches, call) in enumerate(zip(layers, state, ready, strict=True)):
        out = spaces[n % 2]
        if call is None:
            before = torch.from_numpy(x).to(streams.dtype)
            after = reference.decoder_layers([layer], before, input_ids, plan, [caches])
            out[:] = after.float().numpy()
        else:
            bound, where = call
            weights, like = bound.weights, bound.like
            compiled.run_layer(
                team_, narrow, weights, where, like, ids, x, between, out
            )
        x = out
    return torch.from_numpy(x).to(streams.dtype)


def _empty(streams: torch.Tensor) -> torch.Tensor:
    return torch.empty(streams.shape, dtype=torch.float32)
