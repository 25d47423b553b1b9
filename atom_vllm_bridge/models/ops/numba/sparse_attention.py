"""ops/torch/sparse_attention.py in one call, which reads keys where they lie instead of copying them out first."""

from collections.abc import Callable

import numba
import numpy as np
import torch

from atom_vllm_bridge.models.ops.numba.few import few
from atom_vllm_bridge.models.ops.rows import flat_rows
from atom_vllm_bridge.models.ops.torch import sparse_attention as reference
from atom_vllm_bridge.models.ops.torch.sparse_attention import Keys

# Multiplications of scores; beyond, torch's threads win.
MOST_PRODUCTS = 2 << 20


@numba.njit(cache=True, nogil=True)
def _read(rows, at, bits):
    """The bits of row `at` as those of float32: bfloat16 is the upper half of one."""
    shift = np.uint32(32 - 8 * rows.itemsize)
    for c in range(bits.size):
        bits[c] = np.uint32(rows[at, c]) << shift


@numba.njit(cache=True, nogil=True, fastmath={"contract", "reassoc", "nsz"})
def _attend(query, sink, scale, rows, ids, hidden, rows2, ids2, hidden2, out):
    tiles, queries, heads, d = query.shape
    first, second = ids.shape[1], ids2.shape[1]
    score = np.empty((heads, first + second), np.float32)
    most = np.empty(heads, np.float32)
    bits = np.empty(d, np.uint32)
    row = bits.view(np.float32)
    for n in range(tiles):
        for q in range(queries):
            most[:] = sink
            for e in range(first + second):
                if e < first:
                    if hidden[n, q, e]:
                        continue
                    _read(rows, ids[n, e], bits)
                else:
                    if hidden2[n, q, e - first]:
                        continue
                    _read(rows2, ids2[n, e - first], bits)
                for h in range(heads):
                    dot = np.float32(0)
                    for c in range(d):
                        dot += query[n, q, h, c] * row[c]
                    score[h, e] = dot * scale
                    most[h] = max(most[h], score[h, e])
            out[n, q] = 0
            total = np.exp(sink - most)
            for e in range(first + second):
                if e < first:
                    if hidden[n, q, e]:
                        continue
                    _read(rows, ids[n, e], bits)
                else:
                    if hidden2[n, q, e - first]:
                        continue
                    _read(rows2, ids2[n, e - first], bits)
                for h in range(heads):
                    weight = np.exp(score[h, e] - most[h])
                    total[h] += weight
                    for c in range(d):
                        out[n, q, h, c] += weight * row[c]
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
    stored_otherwise = any(found is None for found in lists)
    if stored_otherwise or not few(query) or query.numel() * width > MOST_PRODUCTS:
        return reference.sparse_attention(
            query, sink, scale, window, compressed, decode
        )
    out = torch.empty_like(query)
    last = compressed or Keys(window.rows, window.ids[:, :0], window.hidden[..., :0])
    _attend(
        query.numpy(),
        sink.numpy(),
        np.float32(scale),
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
