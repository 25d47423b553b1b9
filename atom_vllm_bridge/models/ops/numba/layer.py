"""A decoder layer for few tokens, as one piece of compiled code: the ops of this folder, one after the other.

Products and attention, which read nearly all the memory that a step reads, run on all threads; what lies between them is too
little to share. Everything is float32; where the model is bfloat16, a value is rounded to one wherever the ops by themselves
would have stored it.
"""

from typing import Any, NamedTuple

import numpy as np

from atom_vllm_bridge.models.ops.numba.compressor_pool import pool_rows
from atom_vllm_bridge.models.ops.numba.experts import by_expert
from atom_vllm_bridge.models.ops.numba.few import compiled
from atom_vllm_bridge.models.ops.numba.hc_post import write_back
from atom_vllm_bridge.models.ops.numba.query_heads import norm_and_turn
from atom_vllm_bridge.models.ops.numba.rms_norm import norm_rows
from atom_vllm_bridge.models.ops.numba.rope import turn
from atom_vllm_bridge.models.ops.numba.router import gate_logits, route
from atom_vllm_bridge.models.ops.numba.swiglu import gate_rows
from atom_vllm_bridge.models.ops.numba.team import chunks_of, fork
from atom_vllm_bridge.models.ops.numba.write_inputs import store_inputs
from atom_vllm_bridge.models.ops.numba.write_keys import nearest, store_keys
from atom_vllm_bridge.models.ops.panels import WIDTH


class Matrix(NamedTuple):
    """Panels, and the compiled code that multiplies with them.

    Attributes:
        body: address of `linear`'s code for their dtype.
        panels: their address.
        groups, count, inputs: their shape, [groups, count, inputs, WIDTH].
    """

    body: int
    panels: int
    groups: int
    count: int
    inputs: int


class Hyper(NamedTuple):
    """A hyper-connection and the norm behind it; `body` is the address of `hc_pre`'s code, `eps` [2] are its two ε."""

    body: int
    iterations: int
    eps: Any
    fn: Any
    base: Any
    scale: Any
    norm: Any


class Compressing(NamedTuple):
    """A compressor's weights, and which columns of the input projection are its own."""

    first: int
    width: int
    ape: Any
    norm: Any


class Attending(NamedTuple):
    """Attention's weights; `body` is the address of `sparse_attention`'s code for the caches' dtype."""

    body: int
    eps: float
    scale: float
    w_in: Matrix
    q_norm: Any
    kv_norm: Any
    wq: Matrix
    sink: Any
    wo_a: Matrix
    wo_b: Matrix
    compressor: Compressing
    index_compressor: Compressing


class Choosing(NamedTuple):
    """The experts' weights; `body` is the address of `experts`' code, `limit` [1] its clamp, `table` [0, 0] or `bias` [0] what the layer has not."""

    body: int
    k: int
    route_scale: float
    limit: Any
    gate: Any
    bias: Any
    table: Any
    w13: int
    w2: int
    inner: int
    shared_w13: Matrix
    shared_w2: Matrix


class Rows(NamedTuple):
    """A cache: its rows in bits, and the rows that this step's tokens go to; −1: none."""

    rows: Any
    ids: Any


class Seen(NamedTuple):
    """Keys of each token: ids [T, E], hidden [T, 1, E]."""

    ids: Any
    hidden: Any


class Pooling(NamedTuple):
    """Entries that complete in this step; as `Pool` in models/deepseek_v4/plan.py has them, of no entry where none do."""

    ids: Any
    unseen: Any
    write: Any
    rotation: Any


class Compressed(NamedTuple):
    """The caches of a compressor; without one, of no width."""

    inputs: Rows
    entries: Any
    phase: Any
    pooling: Pooling


class Layer(NamedTuple):
    """A layer's weights."""

    hc_attn: Hyper
    attn: Attending
    hc_ffn: Hyper
    ffn: Choosing


class State(NamedTuple):
    """A layer's caches, and what of them the step's tokens see."""

    window: Rows
    window_seen: Seen
    main: Compressed
    entries_seen: Seen
    index: Compressed


@compiled()
def _settle(x, narrow):
    """Round to what bfloat16 holds, where the model is `narrow`."""
    if narrow:
        bits = x.reshape(-1).view(np.uint32)
        for c in range(bits.size):
            bits[c] = nearest(bits[c]) << np.uint32(16)


@compiled()
def _multiply(team, x, w, out):
    words = np.empty(9, np.int64)
    words[0], words[1] = 0, chunks_of(team, w.groups * w.count)
    words[2], words[3], words[4], words[5] = x.shape[0], w.inputs, w.groups, w.count
    words[6], words[7], words[8] = x.ctypes.data, w.panels, out.ctypes.data
    fork(team, w.body, words)


@compiled()
def _read(team, streams, hc, x, post, comb):
    tokens, n, d = streams.shape
    words = np.empty(15, np.int64)
    words[0], words[1] = 0, chunks_of(team, tokens)
    words[2], words[3], words[4], words[5] = tokens, n, d, hc.iterations
    words[6], words[7] = streams.ctypes.data, hc.fn.ctypes.data
    words[8], words[9] = hc.base.ctypes.data, hc.scale.ctypes.data
    words[10], words[11] = hc.eps.ctypes.data, hc.norm.ctypes.data
    words[12], words[13] = x.ctypes.data, post.ctypes.data
    words[14] = comb.ctypes.data
    fork(team, hc.body, words)


@compiled()
def _compress(projected, w, eps, cache):
    for t in range(projected.shape[0]):
        inputs = projected[t, w.first : w.first + w.width].reshape(1, w.width)
        at = slice(t, t + 1)
        rows, ids = cache.inputs
        store_inputs(inputs, w.ape, cache.phase[at], rows, ids[at])
    pooling = cache.pooling
    many, d = pooling.write.size, w.norm.size
    if many:
        entry = np.empty((many, d), np.float32)
        parts = cache.inputs.rows.reshape(-1, d)
        pool_rows(parts, pooling.ids, pooling.unseen, entry)
        store_keys(
            entry, w.norm, eps, pooling.rotation, cache.entries, pooling.write
        )


@compiled()
def _attend(team, w, query, state, out):
    tokens, heads, d = query.shape
    rows, seen = state.window.rows, state.window_seen
    rows2, seen2 = state.main.entries, state.entries_seen
    words = np.empty(19, np.int64)
    words[0], words[1] = 0, chunks_of(team, tokens)
    words[2], words[3], words[4], words[5] = tokens, 1, heads, d
    words[6], words[7] = seen.ids.shape[1], seen2.ids.shape[1]
    words[8], words[9] = query.ctypes.data, w.sink.ctypes.data
    words[10], words[11] = rows.ctypes.data, rows.shape[0]
    words[12], words[13] = seen.ids.ctypes.data, seen.hidden.ctypes.data
    words[14], words[15] = rows2.ctypes.data, rows2.shape[0]
    words[16], words[17] = seen2.ids.ctypes.data, seen2.hidden.ctypes.data
    words[18] = out.ctypes.data
    fork(team, w.body, words)


@compiled()
def _attention(team, narrow, hc, w, streams, rotation, state, out):
    tokens, n, d = streams.shape
    heads, rank, dim = w.sink.size, w.q_norm.size, w.kv_norm.size
    x, post = np.empty((tokens, d), np.float32), np.empty((tokens, n), np.float32)
    comb = np.empty((tokens, n, n), np.float32)
    _read(team, streams, hc, x, post, comb)
    _settle(x, narrow)

    projected = np.empty((tokens, w.w_in.count * WIDTH), np.float32)
    _multiply(team, x, w.w_in, projected)
    _settle(projected, narrow)
    low, window = np.empty((tokens, rank), np.float32), state.window
    for t in range(tokens):
        at = slice(t, t + 1)
        norm_rows(projected[t, :rank].reshape(1, rank), w.q_norm, w.eps, low[at])
        kv = projected[t, rank : rank + dim].reshape(1, dim)
        store_keys(kv, w.kv_norm, w.eps, rotation[at], window.rows, window.ids[at])
    _settle(low, narrow)
    if w.compressor.width:
        _compress(projected, w.compressor, w.eps, state.main)
    if w.index_compressor.width:
        _compress(projected, w.index_compressor, w.eps, state.index)

    query = np.empty((tokens, heads, dim), np.float32)
    _multiply(team, low, w.wq, query)
    _settle(query, narrow)
    norm_and_turn(query, w.eps, rotation)
    query *= np.float32(w.scale)
    o = np.empty((tokens, heads, dim), np.float32)
    _attend(team, w, query, state, o)
    turn(o, rotation, np.float32(-1))
    _settle(o, narrow)

    low = np.empty((tokens, w.wo_a.groups * w.wo_a.count * WIDTH), np.float32)
    _multiply(team, o, w.wo_a, low)
    _multiply(team, low, w.wo_b, x)
    _settle(x, narrow)
    write_back(x, streams, post, comb, out)
    _settle(out, narrow)


@compiled()
def _run_experts(team, w, x, chosen, weights, y):
    tokens, d = x.shape
    k, many = chosen.shape[1], w.gate.shape[0]
    order, start = np.empty(tokens * k, np.int64), np.empty(tokens * k + 1, np.int64)
    part = np.empty((tokens, k, d), np.float32)
    words = np.empty(16, np.int64)
    words[0], words[1] = 0, by_expert(chosen.reshape(-1), many, order, start)
    words[2], words[3], words[4], words[5] = tokens, k, d, w.inner
    words[6], words[7], words[8] = many, x.ctypes.data, chosen.ctypes.data
    words[9], words[10] = weights.ctypes.data, order.ctypes.data
    words[11], words[12], words[13] = start.ctypes.data, w.w13, w.w2
    words[14], words[15] = w.limit.ctypes.data, part.ctypes.data
    fork(team, w.body, words)
    for t in range(tokens):
        y[t] = part[t, 0]
        for i in range(1, k):
            for c in range(d):
                y[t, c] += part[t, i, c]
    # Until here, so that none is freed while its address is used.
    return order.size + start.size


@compiled()
def _feed_forward(team, narrow, hc, w, streams, input_ids, out):
    tokens, n, d = streams.shape
    x, post = np.empty((tokens, d), np.float32), np.empty((tokens, n), np.float32)
    comb = np.empty((tokens, n, n), np.float32)
    _read(team, streams, hc, x, post, comb)
    _settle(x, narrow)

    logits = np.empty((tokens, w.gate.shape[0]), np.float32)
    gate_logits(x, w.gate, logits)
    chosen, weights = np.empty((tokens, w.k), np.int64), np.empty(
        (tokens, w.k), np.float32
    )
    if w.table.size:
        for t in range(tokens):
            chosen[t] = w.table[input_ids[t]]
    route(logits, w.bias, w.route_scale, chosen, weights)
    y = np.empty((tokens, d), np.float32)
    _run_experts(team, w, x, chosen, weights, y)

    inner = w.shared_w2.inputs
    hidden = np.empty((tokens, 2 * inner), np.float32)
    gated, shared = np.empty((tokens, inner), np.float32), np.empty_like(x)
    _multiply(team, x, w.shared_w13, hidden)
    gate_rows(hidden, w.limit[0], gated)
    _multiply(team, gated, w.shared_w2, shared)
    _settle(shared, narrow)
    y += shared
    _settle(y, narrow)
    write_back(y, streams, post, comb, out)
    _settle(out, narrow)


@compiled()
def layer(team, narrow, w, rotation, state, input_ids, streams, between, out):
    """Streams [T, n, d] float32 → `out`, the same after the layer; its caches get this step's rows, and `between` is memory to use."""
    _attention(team, narrow, w.hc_attn, w.attn, streams, rotation, state, between)
    _feed_forward(team, narrow, w.hc_ffn, w.ffn, between, input_ids, out)
