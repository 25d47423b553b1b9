"""ops/torch/sparse_attention.py in one call, which reads keys where they lie instead of copying them out first."""

from collections.abc import Callable

import numpy as np
import torch

from atom_vllm_bridge.models.ops.numba.few import compiled, few, trained
from atom_vllm_bridge.models.ops.rows import flat_rows
from atom_vllm_bridge.models.ops.torch import sparse_attention as reference
from atom_vllm_bridge.models.ops.torch.sparse_attention import Keys

# Multiplications of scores; beyond, torch's threads win.
MOST_PRODUCTS = 8 << 20
# Rows computed together, so that they stay in the first cache level between scores and sums; a multiple of four.
BLOCK = 8


@compiled()
def _read(rows, at, bits):
    """The bits of row `at` as those of float32: bfloat16 is the upper half of one."""
    shift = np.uint32(32 - 8 * rows.itemsize)
    for c in range(bits.size):
        bits[c] = np.uint32(rows[at, c]) << shift


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
    tiles, queries, heads, d = query.shape
    first, second = ids.shape[1], ids2.shape[1]
    bits = np.zeros((BLOCK, d), np.uint32)
    row = bits.view(np.float32)
    score = np.empty((heads, BLOCK), np.float32)
    most, keep = np.empty(heads, np.float32), np.empty(heads, np.float32)
    total = np.empty(heads, np.float32)
    for n in range(tiles):
        for q in range(queries):
            # The sink is a key whose value is zero, and the first of all.
            most[:] = sink
            total[:] = 1
            out[n, q] = 0
            e = 0
            while e < first + second:
                count = 0
                while e < first + second and count < BLOCK:
                    if e < first:
                        if not hidden[n, q, e]:
                            _read(rows, ids[n, e], bits[count])
                            count += 1
                    elif not hidden2[n, q, e - first]:
                        _read(rows2, ids2[n, e - first], bits[count])
                        count += 1
                    e += 1
                if count == 0:
                    break
                # What an earlier query left may be NaN, which a weight of zero does not silence.
                bits[count:] = 0
                _scores(query[n, q], row, score)
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
                _sums(score, row, keep, out[n, q])
            for h in range(heads):
                inverse = np.float32(1) / total[h]
                for c in range(d):
                    out[n, q, h, c] *= inverse


def sparse_attention(
    query: torch.Tensor,
    sink: torch.Tensor,
    scale: float,
    window: Keys,
    compressed: Keys | None,
    decode: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    lists = [_list(window.rows, query)]
    width = window.ids.shape[1]
    if compressed is not None:
        lists.append(_list(compressed.rows, query))
        width += compressed.ids.shape[1]
    otherwise = trained(sink) or any(found is None for found in lists)
    if otherwise or not few(query) or query.numel() * width > MOST_PRODUCTS:
        return reference.sparse_attention(
            query, sink, scale, window, compressed, decode
        )
    out = torch.empty_like(query)
    last = compressed or Keys(window.rows, window.ids[:, :0], window.hidden[..., :0])
    _attend(
        (query * scale).numpy(),
        sink.numpy(),
        lists[0],
        window.ids.numpy(),
        window.hidden.numpy(),
        lists[-1],
        last.ids.numpy(),
        last.hidden.numpy(),
        out.numpy(),
    )
    return out


def _list(rows: torch.Tensor, query: torch.Tensor) -> np.ndarray | None:
    """The bits of all rows of a cache in float32 or bfloat16; None where they are stored otherwise."""
    flat = flat_rows(rows)
    if flat is None or rows.device.type != "cpu" or rows.shape[-1] != query.shape[-1]:
        return None
    bits = {torch.float32: torch.uint32, torch.bfloat16: torch.uint16}.get(rows.dtype)
    return None if bits is None else flat.view(bits).numpy()
