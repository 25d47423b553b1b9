"""ops/torch/pooled_rows.py in one kernel, a program an entry; where entries are fewer than tokens, another packs them first."""

import torch
import triton
import triton.language as tl

from atom_vllm_bridge.models.ops.blocks import Blocks
from atom_vllm_bridge.models.ops.torch import pooled_rows as reference
from atom_vllm_bridge.models.ops.triton.block_table import known, row_id
from atom_vllm_bridge.models.ops.triton.rotations import store_rotation
from atom_vllm_bridge.models.ops.triton.slot_rows import slot_row

# Tokens that are packed at once.
CHUNK = 1024


@triton.jit(do_not_specialize=["tokens", "count"])
def _pack(
    positions,
    slots,
    packed,
    tokens,
    count,
    RATIO: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Tokens that complete an entry, in their order; −1 after the last."""
    done = tl.full((), 0, tl.int32)
    for first in range(0, tokens, CHUNK):
        token = first + tl.arange(0, CHUNK)
        inside = token < tokens
        position = tl.load(positions + token, mask=inside, other=0)
        slot = tl.load(slots + token, mask=inside, other=-1)
        completes = (slot >= 0) & (position % RATIO == RATIO - 1)
        place = done + tl.cumsum(completes.to(tl.int32), 0) - 1
        tl.store(packed + place, token, mask=completes & (place < count))
        done += tl.sum(completes.to(tl.int32))
    for first in range(0, count, CHUNK):
        place = first + tl.arange(0, CHUNK)
        tl.store(packed + place, -1, mask=(place >= done) & (place < count))


@triton.jit
def _pooled_rows(
    table,
    request,
    positions,
    slots,
    packed,
    theta,
    ids,
    unseen,
    write,
    rotation,
    to_request,
    width,
    pitch,
    parts,
    entry_pitch,
    sources,
    pairs,
    PACKED: tl.constexpr,
    RATIO: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    ENTRY_BLOCK: tl.constexpr,
    SOURCES: tl.constexpr,
    PAIRS: tl.constexpr,
):
    entry = tl.program_id(0).to(tl.int64)
    token = entry
    if PACKED:
        token = tl.load(packed + entry).to(tl.int64)
    real = token >= 0
    token = tl.maximum(token, 0)
    position = tl.load(positions + token)
    slot = tl.load(slots + token)
    completes = real & (slot >= 0) & (position % RATIO == RATIO - 1)
    back = tl.arange(0, SOURCES)
    inside = back < sources
    source = position + back - (sources - 1)
    before = source < 0
    row = tl.where(completes & (source >= 0), source, position)
    owner = tl.load(request + token)
    id = row_id(table, to_request, width, owner, row, inside, PER_BLOCK, pitch, parts)
    id += tl.where((sources > RATIO) & (back >= RATIO), 1, 0)
    at = ids + entry * 2 * sources + back
    tl.store(at, id, mask=inside)
    tl.store(at + sources, id + parts // 2, mask=inside)
    tl.store(unseen + entry * sources + back, before.to(tl.uint8), mask=inside)
    to = slot_row(slot, ENTRY_BLOCK, RATIO, entry_pitch)
    tl.store(write + entry, tl.where(completes, to, -1))
    pair = tl.arange(0, PAIRS)
    angle = tl.load(theta + pair, mask=pair < pairs, other=0.0)
    group = position // RATIO * RATIO
    store_rotation(rotation, entry * pairs + pair, group, angle, pair < pairs)


def pooled_rows(
    blocks: Blocks,
    entries: Blocks,
    request: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    count: int,
    ratio: int,
    sources: int,
    theta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    if not known(blocks):
        return reference.pooled_rows(
            blocks,
            entries,
            request,
            positions,
            slots,
            count,
            ratio,
            sources,
            theta,
        )
    tokens, pairs = len(positions), len(theta)
    positions, slots = positions.contiguous(), slots.contiguous()
    ids = positions.new_empty(count, 2, sources)
    unseen = positions.new_empty(count, sources, dtype=torch.bool)
    write = positions.new_empty(count)
    rotation = positions.new_empty(count, pairs, dtype=torch.complex64)
    if not count:
        return ids, unseen, write, rotation
    packed = slots
    if count < tokens:
        packed = positions.new_empty(count, dtype=torch.int32)
        _pack[(1,)](
            positions,
            slots,
            packed,
            tokens,
            count,
            RATIO=ratio,
            CHUNK=CHUNK,
            num_warps=4,
        )
    _pooled_rows[(count,)](
        blocks.table,
        request.contiguous(),
        positions,
        slots,
        packed,
        theta.contiguous(),
        ids,
        unseen.view(torch.uint8),
        write,
        torch.view_as_real(rotation),
        blocks.table.stride(0),
        blocks.table.shape[1],
        blocks.pitch,
        blocks.parts,
        entries.pitch,
        sources,
        pairs,
        PACKED=count < tokens,
        RATIO=ratio,
        PER_BLOCK=blocks.per_block,
        ENTRY_BLOCK=entries.per_block * ratio,
        SOURCES=triton.next_power_of_2(sources),
        PAIRS=triton.next_power_of_2(pairs),
        num_warps=1,
    )
    return ids, unseen, write, rotation
