"""ops/torch/sparse_attention.py in one call, which reads keys where they lie instead of copying them out first."""

import numba
import numpy as np
import torch

from atom_vllm_bridge.models.ops.gradients import trained
from atom_vllm_bridge.models.ops.numba.exponential import exponential
from atom_vllm_bridge.models.ops.numba.few import compiled, few
from atom_vllm_bridge.models.ops.numba.query_heads import norm_and_turn
from atom_vllm_bridge.models.ops.numba.rope import turn
from atom_vllm_bridge.models.ops.numba.team import Body, array, chunk_count, next_chunk
from atom_vllm_bridge.models.ops.numba.tile import prefetch
from atom_vllm_bridge.models.ops.rows import flat_rows
from atom_vllm_bridge.models.ops.torch import sparse_attention as reference
from atom_vllm_bridge.models.ops.torch.sparse_attention import Keys
from atom_vllm_bridge.models.quantization.kv_codecs import RowCodec

# Multiplications of scores; beyond, torch's threads win.
MOST_PRODUCTS = 8 << 20
# Rows computed together, so that they stay in the first cache level between scores and sums.
BLOCK = 8
_CACHE_LINE = 64


@compiled()
def _widen(row, bits):
    """The bits of a bfloat16 row as those of float32, of which they are the upper half."""
    for c in range(bits.size):
        bits[c] = np.uint32(row[c]) << np.uint32(16)


@compiled(fastmath={"contract", "reassoc", "nsz"})
def _scores(query, where, score, following, size):
    """score [H, BLOCK] = query [H, d] · the rows at the addresses `where` [BLOCK].

    Meanwhile half of the `following` rows, of `size` bytes each, are called from memory.
    """
    heads, d = query.shape
    for e in range(0, BLOCK, 4):
        r0, r1 = _floats(where[e], d), _floats(where[e + 1], d)
        r2, r3 = _floats(where[e + 2], d), _floats(where[e + 3], d)
        for h in range(0, heads - 1, 2):
            _call(
                following,
                (e + 4 * h // heads) // 2,
                (e + 4 * (h + 2) // heads) // 2,
                size,
            )
            q, p = query[h], query[h + 1]
            s0 = s1 = s2 = s3 = t0 = t1 = t2 = t3 = np.float32(0)
            for c in range(d):
                s0 += q[c] * r0[c]
                s1 += q[c] * r1[c]
                s2 += q[c] * r2[c]
                s3 += q[c] * r3[c]
                t0 += p[c] * r0[c]
                t1 += p[c] * r1[c]
                t2 += p[c] * r2[c]
                t3 += p[c] * r3[c]
            score[h, e], score[h, e + 1] = s0, s1
            score[h, e + 2], score[h, e + 3] = s2, s3
            score[h + 1, e], score[h + 1, e + 1] = t0, t1
            score[h + 1, e + 2], score[h + 1, e + 3] = t2, t3
        if heads % 2:
            q = query[heads - 1]
            s0 = s1 = s2 = s3 = np.float32(0)
            for c in range(d):
                s0 += q[c] * r0[c]
                s1 += q[c] * r1[c]
                s2 += q[c] * r2[c]
                s3 += q[c] * r3[c]
            score[heads - 1, e], score[heads - 1, e + 1] = s0, s1
            score[heads - 1, e + 2], score[heads - 1, e + 3] = s2, s3


@compiled(fastmath={"contract", "reassoc", "nsz"})
def _weigh(score, most, total, keep):
    """Scores [H, BLOCK] → weights, of which the sum so far is `total` [H] and the largest score `most` [H]; what came before counts `keep` [H]."""
    for h in range(most.size):
        top = most[h]
        for i in range(BLOCK):
            top = max(top, score[h, i])
        keep[h] = exponential(most[h] - top)
        added = np.float32(0)
        for i in range(BLOCK):
            score[h, i] = exponential(score[h, i] - top)
            added += score[h, i]
        total[h] = total[h] * keep[h] + added
        most[h] = top


@compiled(fastmath={"contract", "reassoc", "nsz"})
def _sums(weight, where, keep, out, following, size):
    """out [H, d] = keep [H] · out + weight [H, BLOCK] · the rows at `where` [BLOCK]; meanwhile the other half."""
    heads, d = out.shape
    r0, r1 = _floats(where[0], d), _floats(where[1], d)
    r2, r3 = _floats(where[2], d), _floats(where[3], d)
    r4, r5 = _floats(where[4], d), _floats(where[5], d)
    r6, r7 = _floats(where[6], d), _floats(where[7], d)
    for h in range(heads):
        half = BLOCK // 2
        _call(following, half + half * h // heads, half + half * (h + 1) // heads, size)
        o, k, w = out[h], keep[h], weight[h]
        w0, w1, w2, w3, w4, w5, w6, w7 = w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]
        for c in range(d):
            first = w0 * r0[c] + w1 * r1[c] + w2 * r2[c] + w3 * r3[c]
            second = w4 * r4[c] + w5 * r5[c] + w6 * r6[c] + w7 * r7[c]
            o[c] = k * o[c] + first + second


@numba.njit(inline="always")
def _floats(address, d):
    return array(address, (d,), np.float32)


@numba.njit
def _call(where, first, end, size):
    """Call rows `first` … `end` − 1 of those at `where` from memory."""
    for e in range(first, end):
        for offset in range(0, size, _CACHE_LINE):
            prefetch(where[e] + offset)


@compiled()
def _visible(ids, hidden, rows, where):
    """Addresses of the rows that a query sees → `where`; how many."""
    count = 0
    for e in range(ids.size):
        if not hidden[e]:
            where[count] = rows.ctypes.data + ids[e] * rows.shape[1] * rows.itemsize
            count += 1
    return count


@compiled()
def _attend(query, sink, rows, ids, hidden, rows2, ids2, hidden2, out):
    """One tile: query and out [Q, H, d], ids [E], hidden [Q, E]."""
    queries, heads, d = query.shape
    wide = np.empty((BLOCK, d), np.uint32)
    score = np.empty((heads, BLOCK), np.float32)
    most, keep = np.empty(heads, np.float32), np.empty(heads, np.float32)
    total = np.empty(heads, np.float32)
    where = np.empty(ids.size + ids2.size + 2 * BLOCK, np.int64)
    size = d * rows.itemsize
    for q in range(queries):
        count = _visible(ids, hidden[q], rows, where)
        count += _visible(ids2, hidden2[q], rows2, where[count:])
        # The last block is filled up with rows that weigh nothing; others might be NaN, which a weight of 0 does not silence.
        where[count : count + 2 * BLOCK] = where[count - 1]
        # The sink is a key whose value is zero, and the first of all.
        for h in range(heads):
            most[h], total[h] = sink[h], 1
            out[q, h] = 0
        for first in range(0, count, BLOCK):
            block = where[first : first + BLOCK]
            if rows.itemsize == 2:
                for e in range(BLOCK):
                    _widen(array(block[e], (d,), np.uint16), wide[e])
                    block[e] = wide[e].ctypes.data
            following = where[first + BLOCK : first + 2 * BLOCK]
            _scores(query[q], block, score, following, size)
            score[:, count - first :] = -np.inf
            _weigh(score, most, total, keep)
            _sums(score, block, keep, out[q], following, size)
        for h in range(heads):
            inverse = np.float32(1) / total[h]
            for c in range(d):
                out[q, h, c] *= inverse


@compiled()
def _scale(query, scale):
    queries, heads, d = query.shape
    for q in range(queries):
        for h in range(heads):
            for c in range(d):
                query[q, h, c] *= scale


def _body(bits):
    """Attention alone, which takes 22 words; given a rotation, with what comes before it and after it: see `query_heads`, `inverse_rope`."""

    def body(words):
        chunks, tiles, queries, heads = words[1], words[2], words[3], words[4]
        d, first, second = words[5], words[6], words[7]
        query = array(words[8], (tiles, queries, heads, d), np.float32)
        sink = array(words[9], (heads,), np.float32)
        rows = array(words[10], (words[11], d), bits)
        ids = array(words[12], (tiles, first), np.int64)
        hidden = array(words[13], (tiles, queries, first), np.bool_)
        rows2 = array(words[14], (words[15], d), bits)
        ids2 = array(words[16], (tiles, second), np.int64)
        hidden2 = array(words[17], (tiles, queries, second), np.bool_)
        out = array(words[18], (tiles, queries, heads, d), np.float32)
        pairs = words[19]
        rotation = array(words[20], (tiles, queries, pairs), np.complex64)
        numbers = array(words[21], (2,), np.float64)
        chunk = next_chunk(words)
        while chunk < chunks:
            for n in range(tiles * chunk // chunks, tiles * (chunk + 1) // chunks):
                if pairs:
                    norm_and_turn(query[n], numbers[0], rotation[n])
                    _scale(query[n], np.float32(numbers[1]))
                _attend(
                    query[n],
                    sink,
                    rows,
                    ids[n],
                    hidden[n],
                    rows2,
                    ids2[n],
                    hidden2[n],
                    out[n],
                )
                if pairs:
                    turn(out[n], rotation[n], np.float32(-1))
            chunk = next_chunk(words)

    return Body(body)


bodies = {torch.float32: _body(np.uint32), torch.bfloat16: _body(np.uint16)}


def sparse_attention(
    query: torch.Tensor,
    sink: torch.Tensor,
    scale: float,
    window: Keys,
    compressed: Keys | None,
    codec: RowCodec,
) -> torch.Tensor:
    width = window.ids.shape[1]
    flat = flat2 = _list(window.rows, query)
    last = Keys(window.rows, window.ids[:, :0], window.hidden[..., :0])
    if compressed is not None:
        flat2, last = _list(compressed.rows, query), compressed
        width += compressed.ids.shape[1]
    if (
        flat is None
        or flat2 is None
        or flat.dtype != flat2.dtype
        or trained(sink)
        or not few(query)
        or query.numel() * width > MOST_PRODUCTS
    ):
        return reference.sparse_attention(query, sink, scale, window, compressed, codec)
    tiles, queries, heads, d = query.shape
    out, query = torch.empty_like(query), query * scale
    # Named, so that copies live as long as their addresses are used.
    ids, hidden = window.ids.contiguous(), window.hidden.contiguous()
    ids2, hidden2 = last.ids.contiguous(), last.hidden.contiguous()
    bodies[flat.dtype].run(
        chunk_count(tiles),
        tiles,
        queries,
        heads,
        d,
        ids.shape[1],
        ids2.shape[1],
        query.data_ptr(),
        sink.data_ptr(),
        flat.data_ptr(),
        flat.shape[0],
        ids.data_ptr(),
        hidden.data_ptr(),
        flat2.data_ptr(),
        flat2.shape[0],
        ids2.data_ptr(),
        hidden2.data_ptr(),
        out.data_ptr(),
        0,
        0,
        0,
    )
    return out


def _list(rows: torch.Tensor, query: torch.Tensor) -> torch.Tensor | None:
    """All rows of a cache in float32 or bfloat16; None where they are stored otherwise."""
    if not rows.is_cpu or rows.dtype not in bodies or rows.shape[-1] != query.shape[-1]:
        return None
    return flat_rows(rows)
