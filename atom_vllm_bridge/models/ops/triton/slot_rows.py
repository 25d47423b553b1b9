"""ops/torch/slot_rows.py in one kernel."""

import torch
import triton
import triton.language as tl

BLOCK = 256


@triton.jit
def slot_row(slot, BLOCK_SIZE: tl.constexpr, PER_ROW: tl.constexpr, pitch):
    """The row of a slot, int64; −1 for −1."""
    place = slot % BLOCK_SIZE // PER_ROW
    return tl.where(slot >= 0, slot // BLOCK_SIZE * pitch + place, -1)


@triton.jit(do_not_specialize=["tokens"])
def _slot_rows(
    slots,
    out,
    tokens,
    pitch,
    BLOCK_SIZE: tl.constexpr,
    PER_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + token, mask=token < tokens, other=-1)
    row = slot_row(slot, BLOCK_SIZE, PER_ROW, pitch)
    tl.store(out + token, row, mask=token < tokens)


def slot_rows(
    slots: torch.Tensor, block_size: int, tokens_per_row: int, pitch: int
) -> torch.Tensor:
    slots = slots.contiguous()
    out = torch.empty_like(slots)
    if len(slots):
        _slot_rows[(triton.cdiv(len(slots), BLOCK),)](
            slots,
            out,
            len(slots),
            pitch,
            BLOCK_SIZE=block_size,
            PER_ROW=tokens_per_row,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return out
