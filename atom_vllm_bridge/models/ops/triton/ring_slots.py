"""ops/torch/ring_slots.py in one kernel: a token looks at the one a ring's length after it."""

import torch
import triton
import triton.language as tl

BLOCK = 256


@triton.jit
def _ring_of(table, to_request, request, token, end, mask):
    """The block of the ring of each token, int64; 0: none, or the token is padding."""
    owned = mask & (token < end)
    owner = tl.load(request + token, mask=owned, other=0)
    return tl.load(table + owner * to_request, mask=owned, other=0).to(tl.int64)


@triton.jit(do_not_specialize=["requests", "tokens"])
def _ring_slots(
    table,
    query_start_loc,
    request,
    positions,
    out,
    to_request,
    requests,
    tokens,
    length,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < tokens
    end = tl.load(query_start_loc + requests)
    block = _ring_of(table, to_request, request, token, end, inside)
    position = tl.load(positions + token, mask=inside, other=0)
    later = token + length
    there = later < tokens
    other = _ring_of(table, to_request, request, later, end, there)
    apart = tl.load(positions + later, mask=there, other=0) - position
    overtaken = there & (other == block) & (apart == length)
    slot = tl.where((block > 0) & ~overtaken, block * length + position % length, -1)
    tl.store(out + token, slot, mask=inside)


def ring_slots(
    table: torch.Tensor,
    query_start_loc: torch.Tensor,
    request: torch.Tensor,
    positions: torch.Tensor,
    length: int,
) -> torch.Tensor:
    out = request.new_empty(len(request))
    if len(out):
        _ring_slots[(triton.cdiv(len(out), BLOCK),)](
            table,
            query_start_loc.contiguous(),
            request.contiguous(),
            positions.contiguous(),
            out,
            table.stride(0),
            len(query_start_loc) - 1,
            len(out),
            length,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return out
