"""ops/torch/sparse_attention.py in one call, which reads keys where they lie instead of copying them out first."""

import numpy as np
import torch

from atom_vllm_bridge.models.ops.gradients import trained
from atom_vllm_bridge.models.ops.numba.few import compiled, few
from atom_vllm_bridge.models.ops.numba.team import Body, array, chunk_count, next_chunk
from atom_vllm_bridge.models.ops.rows import flat_rows
from atom_vllm_bridge.models.ops.torch import sparse_attention as reference
from atom_vllm_bridge.models.ops.torch.sparse_attention import Keys
from atom_vllm_bridge.models.quantization.kv_codecs import RowCodec

# Multiplications of scores; beyond, torch's threads win.
MOST_PRODUCTS = 8 << 20
# Rows computed together, so that they stay in the first cache level between scores and sums; a multiple of four.
BLOCK = 8


@compiled()
def _read(row, bits):
    """The bits of a row as those of float32: bfloat16 is the upper half of one."""
    if row.itemsize == 2:
        for c in range(bits.size):
            bits[c] = np.uint32(row[c]) << np.uint32(16)
    else:
        for c in range(bits.size):
            bits[c] = row[c]


@compiled(fastmath={"contract", "reassoc", "nsz"})
def _scores(query, row, score):
    """score [H, BLOCK] = query [H, d] · row [BLOCK, d]ᵀ."""
    heads, d = query.shape
    for h in range(heads):
        q = query[h]
        for e in range(0, BLOCK, 4):
            r0, r1, r2, r3 = row[e], row[e + 1], row[e + 2], row[e + 3]
            s0 = s1 = s2 = s3 = np.float32(0)
            for c in range(d):
                s0 += q[c] * r0[c]
                s1 += q[c] * r1[c]
                s2 += q[c] * r2[c]
                s3 += q[c] * r3[c]
            score[h, e], score[h, e + 1] = s0, s1
            score[h, e + 2], score[h, e + 3] = s2, s3


@compiled(fastmath={"contract", "reassoc", "nsz"})
def _sums(weight, row, keep, out):
    """out [H, d] = keep [H] · out + weight [H, BLOCK] · row [BLOCK, d]."""
    heads, d = out.shape
    for h in range(heads):
        o, k = out[h], keep[h]
        for e in range(0, BLOCK, 4):
            r0, r1, r2, r3 = row[e], row[e + 1], row[e + 2], row[e + 3]
            w0, w1 = weight[h, e], weight[h, e + 1]
            w2, w3 = weight[h, e + 2], weight[h, e + 3]
            for c in range(d):
                o[c] = k * o[c] + w0 * r0[c] + w1 * r1[c] + w2 * r2[c] + w3 * r3[c]
            k = np.float32(1)


@compiled()
def _attend(query, sink, rows, ids, hidden, rows2, ids2, hidden2, out):
    """One tile: query and out [Q, H, d], ids [E], hidden [Q, E]."""
    queries, heads, d = query.shape
    first, second = ids.size, ids2.size
    bits = np.zeros((BLOCK, d), np.uint32)
    row = bits.view(np.float32)
    score = np.empty((heads, BLOCK), np.float32)
    most, keep = np.empty(heads, np.float32), np.empty(heads, np.float32)
    total = np.empty(heads, np.float32)
    for q in range(queries):
        # The sink is a key whose value is zero, and the first of all.
        for h in range(heads):
            most[h], total[h] = sink[h], 1
            out[q, h] = 0
        e = 0
        while e < first + second:
            count = 0
            while e < first + second and count < BLOCK:
                if e < first:
                    if not hidden[q, e]:
                        _read(rows[ids[e]], bits[count])
                        count += 1
                elif not hidden2[q, e - first]:
                    _read(rows2[ids2[e - first]], bits[count])
                    count += 1
                e += 1
            if count == 0:
                break
            # What an earlier query left may be NaN, which a weight of zero does not silence.
            bits[count:] = 0
            _scores(query[q], row, score)
            for h in range(heads):
                top = most[h]
                for i in range(count):
                    top = max(top, score[h, i])
                keep[h] = np.exp(most[h] - top)
                total[h] *= keep[h]
                for i in range(count):
                    score[h, i] = np.exp(score[h, i] - top)
                    total[h] += score[h, i]
                for i in range(count, BLOCK):
                    score[h, i] = 0
                most[h] = top
            _sums(score, row, keep, out[q])
        for h in range(heads):
            inverse = np.float32(1) / total[h]
            for c in range(d):
                out[q, h, c] *= inverse


def _body(bits):
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
        chunk = next_chunk(words)
        while chunk < chunks:
            for n in range(tiles * chunk // chunks, tiles * (chunk + 1) // chunks):
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
    )
    return out


def _list(rows: torch.Tensor, query: torch.Tensor) -> torch.Tensor | None:
    """All rows of a cache in float32 or bfloat16; None where they are stored otherwise."""
    if not rows.is_cpu or rows.dtype not in bodies or rows.shape[-1] != query.shape[-1]:
        return None
    return flat_rows(rows)
