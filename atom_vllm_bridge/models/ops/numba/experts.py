"""ops/torch/experts.py on panels: each expert that is hit is read once, by one thread."""

from functools import cache

import numba
import numpy as np
import torch

from atom_vllm_bridge.models.ops.gradients import trained
from atom_vllm_bridge.models.ops.numba.few import compiled
from atom_vllm_bridge.models.ops.numba.swiglu import gate_rows
from atom_vllm_bridge.models.ops.numba.team import Body, array, next_chunk
from atom_vllm_bridge.models.ops.numba.tile import product
from atom_vllm_bridge.models.ops.panels import WIDTH
from atom_vllm_bridge.models.ops.torch import experts as reference


@compiled()
def by_expert(chosen, many, order, start):
    """Sort slots (token · k + place) by expert; expert number n of those hit has order[start[n] : start[n + 1]]. Returns their count.

    Slots of expert `many`, which is not here, come in none.
    """
    slots, count = chosen.size, 0
    end = np.zeros(many + 2, np.int64)
    for s in range(slots):
        end[chosen[s] + 1] += 1
    for e in range(many):
        if end[e + 1]:
            start[count] = end[e]
            count += 1
        end[e + 1] += end[e]
    start[count] = end[many]
    for s in range(slots):
        order[end[chosen[s]]] = s
        end[chosen[s]] += 1
    return count


@numba.njit
def _through(x, w13, w2, limit, hidden, gated, out):
    """out [R, d]: one expert's answer to x [R, d]; the others are memory for what lies between."""
    product(x, w13, hidden, 0)
    gate_rows(hidden[: x.shape[0]], limit, gated)
    product(gated[: x.shape[0]], w2, out, 0)


def _body(bits):
    """The experts that are hit, one a chunk, before them the shared one where its width, `words[16]`, is not 0."""

    def body(words):
        chunks, tokens, k, d, inner, many = (
            words[1],
            words[2],
            words[3],
            words[4],
            words[5],
            words[6],
        )
        x = array(words[7], (tokens, d), np.float32)
        chosen = array(words[8], (tokens * k,), np.int64)
        weights = array(words[9], (tokens * k,), np.float32)
        order = array(words[10], (tokens * k,), np.int64)
        start = array(words[11], (tokens * k + 1,), np.int64)
        w13 = array(words[12], (many, 2 * inner // WIDTH, d, WIDTH), bits)
        w2 = array(words[13], (many, d // WIDTH, inner, WIDTH), bits)
        limit = array(words[14], (1,), np.float32)[0]
        out = array(words[15], (tokens * k, d), np.float32)
        wide = words[16]
        shared_w13 = array(words[17], (2 * wide // WIDTH, d, WIDTH), bits)
        shared_w2 = array(words[18], (d // WIDTH, wide, WIDTH), bits)
        shared = array(words[19], (tokens, d), np.float32)
        before = 1 if wide else 0
        most = 0
        for n in range(chunks - before):
            most = max(most, start[n + 1] - start[n])
        rows = np.empty((most, d), np.float32)
        hidden = np.empty((most, 2 * inner), np.float32)
        gated = np.empty((most, inner), np.float32)
        chunk = next_chunk(words)
        while chunk < chunks:
            n = chunk - before
            if n < 0:
                wider = np.empty((tokens, 2 * wide), np.float32)
                middle = np.empty((tokens, wide), np.float32)
                _through(x, shared_w13, shared_w2, limit, wider, middle, shared)
                chunk = next_chunk(words)
                continue
            first, count = start[n], start[n + 1] - start[n]
            e = chosen[order[first]]
            for r in range(count):
                for c in range(d):
                    rows[r, c] = x[order[first + r] // k, c]
            _through(rows[:count], w13[e], w2[e], limit, hidden, gated, rows)
            for r in range(count):
                slot = order[first + r]
                for c in range(d):
                    out[slot, c] = weights[slot] * rows[r, c]
            chunk = next_chunk(words)

    return Body(body)


@cache
def _word(value: float) -> torch.Tensor:
    """A float32 that has an address; words are integers."""
    # Kept for good, so it must not take the default dtype or device of whoever asks first: vLLM loads under its own.
    return torch.tensor([value], dtype=torch.float32, device="cpu")


bodies = {torch.bfloat16: _body(np.uint16), torch.float32: _body(np.uint32)}


def experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    limit: float,
) -> torch.Tensor:
    packed = w13.dim() == w2.dim() == 4 and w13.dtype == w2.dtype
    filled = packed and (
        w13.shape[1] * WIDTH != 2 * w2.shape[2] or w2.shape[1] * WIDTH != x.shape[1]
    )
    if not packed or filled or not x.is_cpu or trained(x, w13, w2):
        return reference.experts(x, chosen, weights, w13, w2, limit)
    tokens, k = chosen.shape
    many, _, d, _ = w13.shape
    x, chosen, weights = (
        x.float().contiguous(),
        chosen.contiguous(),
        weights.contiguous(),
    )
    order, start = chosen.new_empty(tokens * k), chosen.new_empty(tokens * k + 1)
    hits = by_expert(chosen.view(-1).numpy(), many, order.numpy(), start.numpy())
    here = int(start[hits])
    out = (x.new_empty if here == tokens * k else x.new_zeros)(tokens, k, d)
    bodies[w13.dtype].run(
        hits,
        tokens,
        k,
        d,
        w2.shape[2],
        many,
        x.data_ptr(),
        chosen.data_ptr(),
        weights.data_ptr(),
        order.data_ptr(),
        start.data_ptr(),
        w13.data_ptr(),
        w2.data_ptr(),
        _word(limit).data_ptr(),
        out.data_ptr(),
        0,
        0,
        0,
        0,
    )
    return out.sum(1)
