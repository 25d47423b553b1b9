"""A decoder layer for few tokens, as one piece of compiled code: the ops of this folder, one after the other.

Products, attention and the reading of the streams, with routing, run on all threads; what else lies between them is too little
to share. Everything is float32; where the model is bfloat16, a value is rounded to one wherever the ops by themselves
would have stored it.

Weights and caches come in as records of addresses and sizes, so that a call costs little, and so does compiling it.
"""

import numpy as np

from atom_vllm_bridge.models.ops.numba.compressor_pool import pool_rows
from atom_vllm_bridge.models.ops.numba.experts import by_expert
from atom_vllm_bridge.models.ops.numba.few import compiled
from atom_vllm_bridge.models.ops.numba.hc_post import write_back
from atom_vllm_bridge.models.ops.numba.parts import settle, token_chunks
from atom_vllm_bridge.models.ops.numba.rms_norm import norm_rows
from atom_vllm_bridge.models.ops.numba.team import array, chunks_of, fork
from atom_vllm_bridge.models.ops.numba.write_inputs import store_inputs
from atom_vllm_bridge.models.ops.numba.write_keys import store_keys
from atom_vllm_bridge.models.ops.panels import WIDTH


def _record(names: str, **others: object) -> np.dtype:
    """int64 fields, which are sizes or addresses, and others after them."""
    fields = [(name, np.int64) for name in names.split()]
    return np.dtype([*fields, *others.items()])


# Panels [groups, count, inputs, WIDTH], and `linear`'s code for their dtype.
MATRIX = _record("body panels groups count inputs")
# A hyper-connection, `norm` behind it, its two ε, and the code of parts.py that reads it.
HYPER = _record("body iterations eps fn base scale norm")
# A compressor's weights, and which columns of the input projection are its own; no width: there is none.
COMPRESSOR = _record("first width ratio dim ape norm")
# Attention's weights, its ε and scale at `numbers`, and `sparse_attention`'s code for the caches' dtype.
ATTENTION = _record(
    "body heads dim rank q_norm kv_norm sink numbers",
    eps=np.float64,
    w_in=MATRIX,
    wq=MATRIX,
    wo_a=MATRIX,
    wo_b=MATRIX,
    compressor=COMPRESSOR,
    index_compressor=COMPRESSOR,
)
# The experts' weights, and `experts`' code; `table` of `vocabulary` rows: 0 where `bias` is not.
FEED_FORWARD = _record(
    "body many k inner vocabulary gate bias table w13 w2 limit"
    " route_scale shared_inner shared_w13 shared_w2",
)
LAYER = _record("", hc_attn=HYPER, attn=ATTENTION, hc_ffn=HYPER, ffn=FEED_FORWARD)

# A cache of `many` rows, and where the tokens' own go [T]; −1: nowhere.
ROWS = _record("rows many ids")
# The keys of each token: ids [T, many], hidden [T, 1, many].
SEEN = _record("ids hidden many")
# Entries that complete: ids [many, 2, sources] of the parts to read, unseen [many, sources], write [many], rotation.
POOLING = _record("many sources ids unseen write rotation")
# A compressor's inputs, its entries, and the place of each token in its group.
COMPRESSED = _record("phase", inputs=ROWS, entries=ROWS, pooling=POOLING)
# A layer's caches; rotation [T, pairs] of its queries and raw keys.
STATE = _record(
    "pairs rotation",
    window=ROWS,
    window_seen=SEEN,
    main=COMPRESSED,
    entries_seen=SEEN,
    index=COMPRESSED,
)


@compiled()
def _multiply(team, x, w, out):
    words = np.empty(9, np.int64)
    words[0], words[1] = 0, chunks_of(team, w.groups * w.count)
    words[2], words[3], words[4], words[5] = x.shape[0], w.inputs, w.groups, w.count
    words[6], words[7], words[8] = x.ctypes.data, w.panels, out.ctypes.data
    fork(team, w.body, words)


@compiled()
def _reading(team, narrow, streams, hc, x, post, comb, words):
    """The words that both bodies of parts.py begin with."""
    tokens, n, d = streams.shape
    words[0], words[1] = 0, token_chunks(team, tokens)
    words[2], words[3], words[4], words[5] = tokens, n, d, hc.iterations
    words[6], words[7], words[8], words[9] = (
        streams.ctypes.data,
        hc.fn,
        hc.base,
        hc.scale,
    )
    words[10], words[11], words[12] = hc.eps, hc.norm, x.ctypes.data
    words[13], words[14], words[15] = post.ctypes.data, comb.ctypes.data, narrow


@compiled()
def _read(team, narrow, streams, hc, x, post, comb):
    words = np.empty(16, np.int64)
    _reading(team, narrow, streams, hc, x, post, comb, words)
    fork(team, hc.body, words)


@compiled()
def _read_and_route(team, narrow, streams, hc, w, ids, x, post, comb, chosen, weights):
    words = np.empty(26, np.int64)
    _reading(team, narrow, streams, hc, x, post, comb, words)
    words[16], words[17], words[18] = w.many, w.k, w.vocabulary
    words[19], words[20], words[21], words[22] = (
        w.gate,
        w.bias,
        w.table,
        ids.ctypes.data,
    )
    words[23], words[24], words[25] = (
        w.route_scale,
        chosen.ctypes.data,
        weights.ctypes.data,
    )
    fork(team, hc.body, words)


@compiled()
def _compress(projected, w, eps, cache, pairs, bits):
    tokens = projected.shape[0]
    ape = array(w.ape, (w.ratio, w.width // 2), np.float32)
    rows = array(cache.inputs.rows, (cache.inputs.many, w.width), np.float32)
    ids = array(cache.inputs.ids, (tokens,), np.int64)
    phase = array(cache.phase, (tokens,), np.int64)
    for t in range(tokens):
        inputs = projected[t, w.first : w.first + w.width].reshape(1, w.width)
        store_inputs(inputs, ape, phase[t : t + 1], rows, ids[t : t + 1])
    pooling = cache.pooling
    many, sources = pooling.many, pooling.sources
    if many:
        parts = cache.inputs.many * (w.width // w.dim)
        entry = np.empty((many, w.dim), np.float32)
        pool_rows(
            array(cache.inputs.rows, (parts, w.dim), np.float32),
            array(pooling.ids, (many, 2, sources), np.int64),
            array(pooling.unseen, (many, sources), np.bool_),
            entry,
        )
        store_keys(
            entry,
            array(w.norm, (w.dim,), np.float32),
            eps,
            array(pooling.rotation, (many, pairs), np.complex64),
            array(cache.entries.rows, (cache.entries.many, w.dim), bits.dtype),
            array(pooling.write, (many,), np.int64),
        )


@compiled()
def _attend(team, w, query, state, out):
    tokens, heads, d = query.shape
    window, seen = state.window, state.window_seen
    entries, seen2 = state.main.entries, state.entries_seen
    words = np.empty(22, np.int64)
    words[0], words[1] = 0, chunks_of(team, tokens)
    words[2], words[3], words[4], words[5] = tokens, 1, heads, d
    words[6], words[7], words[8], words[9] = (
        seen.many,
        seen2.many,
        query.ctypes.data,
        w.sink,
    )
    words[10], words[11], words[12], words[13] = (
        window.rows,
        window.many,
        seen.ids,
        seen.hidden,
    )
    words[14], words[15], words[16] = entries.rows, entries.many, seen2.ids
    words[17], words[18] = seen2.hidden, out.ctypes.data
    words[19], words[20], words[21] = state.pairs, state.rotation, w.numbers
    fork(team, w.body, words)


@compiled(inline="always")
def _attention(team, narrow, hc, w, streams, state, bits, out):
    tokens, n, d = streams.shape
    heads, rank, dim = w.heads, w.rank, w.dim
    rotation = array(state.rotation, (tokens, state.pairs), np.complex64)
    x, post = np.empty((tokens, d), np.float32), np.empty((tokens, n), np.float32)
    comb = np.empty((tokens, n, n), np.float32)
    _read(team, narrow, streams, hc, x, post, comb)

    projected = np.empty((tokens, w.w_in.count * WIDTH), np.float32)
    _multiply(team, x, w.w_in, projected)
    settle(projected, narrow)
    low = np.empty((tokens, rank), np.float32)
    q_norm, kv_norm = array(w.q_norm, (rank,), np.float32), array(
        w.kv_norm, (dim,), np.float32
    )
    rows = array(state.window.rows, (state.window.many, dim), bits.dtype)
    ids = array(state.window.ids, (tokens,), np.int64)
    for t in range(tokens):
        at = slice(t, t + 1)
        norm_rows(projected[t, :rank].reshape(1, rank), q_norm, w.eps, low[at])
        kv = projected[t, rank : rank + dim].reshape(1, dim)
        store_keys(kv, kv_norm, w.eps, rotation[at], rows, ids[at])
    settle(low, narrow)
    if w.compressor.width:
        _compress(projected, w.compressor, w.eps, state.main, state.pairs, bits)
    if w.index_compressor.width:
        _compress(projected, w.index_compressor, w.eps, state.index, state.pairs, bits)

    query = np.empty((tokens, heads, dim), np.float32)
    _multiply(team, low, w.wq, query)
    settle(query, narrow)
    o = np.empty((tokens, heads, dim), np.float32)
    _attend(team, w, query, state, o)
    settle(o, narrow)

    low = np.empty((tokens, w.wo_b.inputs), np.float32)
    _multiply(team, o, w.wo_a, low)
    _multiply(team, low, w.wo_b, x)
    settle(x, narrow)
    write_back(x, streams, post, comb, out)
    settle(out, narrow)


@compiled()
def _run_experts(team, narrow, w, x, chosen, weights, y):
    tokens, d = x.shape
    k = w.k
    order, start = np.empty(tokens * k, np.int64), np.empty(tokens * k + 1, np.int64)
    part, shared = np.empty((tokens, k, d), np.float32), np.empty_like(x)
    hits = by_expert(chosen.reshape(-1), w.many, order, start)
    words = np.empty(20, np.int64)
    words[0], words[1] = 0, 1 + hits
    words[2], words[3], words[4], words[5] = tokens, k, d, w.inner
    words[6], words[7], words[8] = w.many, x.ctypes.data, chosen.ctypes.data
    words[9], words[10] = weights.ctypes.data, order.ctypes.data
    words[11], words[12], words[13] = start.ctypes.data, w.w13, w.w2
    words[14], words[15] = w.limit, part.ctypes.data
    words[16], words[17], words[18] = w.shared_inner, w.shared_w13, w.shared_w2
    words[19] = shared.ctypes.data
    fork(team, w.body, words)
    settle(shared, narrow)
    for t in range(tokens):
        for c in range(d):
            y[t, c] = part[t, 0, c]
        for i in range(1, k):
            for c in range(d):
                y[t, c] += part[t, i, c]
        for c in range(d):
            y[t, c] += shared[t, c]
    # Until here, so that none is freed while its address is used.
    return order.size + start.size


@compiled(inline="always")
def _feed_forward(team, narrow, hc, w, streams, input_ids, out):
    tokens, n, d = streams.shape
    x, post = np.empty((tokens, d), np.float32), np.empty((tokens, n), np.float32)
    comb = np.empty((tokens, n, n), np.float32)
    chosen = np.empty((tokens, w.k), np.int64)
    weights = np.empty((tokens, w.k), np.float32)
    _read_and_route(
        team, narrow, streams, hc, w, input_ids, x, post, comb, chosen, weights
    )
    y = np.empty((tokens, d), np.float32)
    _run_experts(team, narrow, w, x, chosen, weights, y)
    settle(y, narrow)
    write_back(y, streams, post, comb, out)
    settle(out, narrow)


@compiled()
def run_layer(team, narrow, weights, state, bits, input_ids, streams, between, out):
    """One layer.

    Args:
        team: `team()`.
        narrow: the model is bfloat16.
        weights, state: [1] LAYER and STATE.
        bits: [0] of the integers that hold a value of the caches.
        input_ids: [T].
        streams, between, out: [T, n, d] float32: before the layer, for its use, and after it.
    """
    w = weights[0]
    _attention(team, narrow, w.hc_attn, w.attn, streams, state[0], bits, between)
    _feed_forward(team, narrow, w.hc_ffn, w.ffn, between, input_ids, out)
