"""The index tensors of models/deepseek_v4/plan.py for single queries, each in one call; a step of few tokens needs a dozen."""

import numpy as np

from atom_vllm_bridge.models.ops.numba.few import compiled


@compiled()
def _row_id(blocks, request, row, per_block, pitch):
    column = min(row // per_block, blocks.shape[1] - 1)
    return blocks[request, column] * pitch + row % per_block


@compiled()
def slot_rows(slots, block_size, per_row, pitch):
    """Slots [T] → ids [T] of the rows that tokens write; −1: none."""
    ids = np.empty(slots.size, np.int64)
    for t in range(slots.size):
        slot = slots[t]
        row = slot // block_size * pitch + slot % block_size // per_row
        ids[t] = row if slot >= 0 else -1
    return ids


@compiled()
def window_rows(blocks, request, positions, window, block_size, pitch):
    """Ids [T, E] of the keys up to each token's own, and hidden [T, 1, E] after the last; E ≤ `window` is the most that one has."""
    tokens = positions.size
    most = min(window, positions.max() + 1)
    ids = np.zeros((tokens, most), np.int64)
    hidden = np.ones((tokens, 1, most), np.bool_)
    for t in range(tokens):
        first = max(0, positions[t] - window + 1)
        for j in range(positions[t] + 1 - first):
            ids[t, j] = _row_id(blocks, request[t], first + j, block_size, pitch)
            hidden[t, 0, j] = False
    return ids, hidden


@compiled()
def block_rows(blocks, request, start, end, window, block_size, pitch):
    """The same where all tokens of a request, at positions start [R] … end [R] − 1, see each other and the `window` keys before."""
    tokens, most = request.size, 1
    for r in range(start.size):
        most = max(most, end[r] - max(0, start[r] - window))
    ids = np.zeros((tokens, most), np.int64)
    hidden = np.ones((tokens, 1, most), np.bool_)
    for t in range(tokens):
        r = request[t]
        first = max(0, start[r] - window)
        for j in range(end[r] - first):
            ids[t, j] = _row_id(blocks, r, first + j, block_size, pitch)
            hidden[t, 0, j] = False
    return ids, hidden


@compiled()
def entry_rows(blocks, request, positions, entries, ratio, per_block, pitch):
    """The same of all compressed entries that each token sees, of `entries` at most."""
    tokens = positions.size
    most = min(entries, (positions.max() + 1) // ratio)
    ids = np.zeros((tokens, most), np.int64)
    hidden = np.ones((tokens, 1, most), np.bool_)
    for t in range(tokens):
        for j in range(min(most, (positions[t] + 1) // ratio)):
            ids[t, j] = _row_id(blocks, request[t], j, per_block, pitch)
            hidden[t, 0, j] = False
    return ids, hidden


@compiled()
def pooled_rows(blocks, request, positions, ids, ratio, overlap, block_size, pitch):
    """What completes an entry, of which `ids` [T] says where it goes: tokens [M], parts to read [M, 2, K], unseen [M, K]."""
    tokens = 0
    for t in range(ids.size):
        tokens += ids[t] >= 0 and positions[t] % ratio == ratio - 1
    token, m = np.empty(tokens, np.int64), 0
    width, half = (2 * ratio, 2) if overlap else (ratio, 1)
    parts = np.zeros((tokens, 2, width), np.int64)
    unseen = np.zeros((tokens, width), np.bool_)
    for t in range(ids.size):
        if ids[t] < 0 or positions[t] % ratio != ratio - 1:
            continue
        token[m] = t
        for k in range(width):
            row = positions[t] + k - (width - 1)
            if row < 0:
                unseen[m, k] = True
                continue
            part = 2 * half * _row_id(blocks, request[t], row, block_size, pitch)
            if overlap and k >= ratio:
                part += 1
            parts[m, 0, k], parts[m, 1, k] = part, part + half
        m += 1
    return token, parts, unseen
