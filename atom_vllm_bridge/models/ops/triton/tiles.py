"""ops/torch/tiles.py in one kernel: some programs have a tile each, the others a stretch of tokens.

How many tiles come before a request's follows from the lengths of those before it, which each program adds up itself.
"""

import torch
import triton
import triton.language as tl

BLOCK, BLOCK_R = 64, 64


@triton.jit
def _tiles_of(query_start_loc, r, requests, SIZE: tl.constexpr):
    """Tiles of requests r; 0 beyond the last."""
    first = tl.load(query_start_loc + r, mask=r < requests, other=0)
    end = tl.load(query_start_loc + r + 1, mask=r < requests, other=0)
    return (end - first + SIZE - 1) // SIZE


@triton.jit
def _tiles_before(
    query_start_loc, owner, requests, SIZE: tl.constexpr, BLOCK_R: tl.constexpr
):
    """Tiles of the requests before `owner` [N]; int32."""
    before = tl.zeros(owner.shape, tl.int32)
    for chunk in range(0, requests, BLOCK_R):
        r = chunk + tl.arange(0, BLOCK_R)
        many = _tiles_of(query_start_loc, r, requests, SIZE)
        before += tl.sum(tl.where(r[None, :] < owner[:, None], many[None, :], 0), 1)
    return before


@triton.jit
def _cut(
    query_start_loc,
    positions,
    request,
    token,
    start,
    last,
    requests,
    tokens,
    tile,
    SIZE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Tile number `tile`, of the request that has it or else the last."""
    end = tl.full((), 0, tl.int32)
    owner = tl.full((), 0, tl.int32)
    for chunk in range(0, requests, BLOCK_R):
        r = chunk + tl.arange(0, BLOCK_R)
        many = _tiles_of(query_start_loc, r, requests, SIZE)
        owner += tl.sum(
            ((end + tl.cumsum(many, 0) <= tile) & (r < requests)).to(tl.int32)
        )
        end += tl.sum(many)
    owner = tl.minimum(owner, requests - 1)
    one = tl.zeros((1,), tl.int32) + owner
    begin = tl.sum(_tiles_before(query_start_loc, one, requests, SIZE, BLOCK_R))
    first = tl.load(query_start_loc + owner)
    length = tl.load(query_start_loc + owner + 1) - first
    offset = (tile - begin) * SIZE
    valid = tl.minimum(length - offset, SIZE)
    lead = tl.minimum(first + offset, tokens - 1)
    position = tl.load(positions + lead)
    tl.store(request + tile, owner.to(tl.int64))
    tl.store(start + tile, position)
    tl.store(last + tile, tl.maximum(position + valid - 1, 0))
    step = tl.arange(0, BLOCK_S)
    at = tl.minimum(lead + step, tokens - 1).to(tl.int64)
    tl.store(token + tile * SIZE + step, at, mask=step < SIZE)


@triton.jit
def _find(
    query_start_loc,
    owner_of_token,
    place,
    requests,
    tokens,
    count,
    token,
    SIZE: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """The places of tokens in the tiles."""
    inside = token < tokens
    owner = tl.load(owner_of_token + token, mask=inside, other=0).to(tl.int32)
    begin = _tiles_before(query_start_loc, owner, requests, SIZE, BLOCK_R)
    within = token - tl.load(query_start_loc + owner, mask=inside, other=0)
    at = (begin + within // SIZE) * SIZE + within % SIZE
    at = tl.minimum(at, count * SIZE - 1).to(tl.int64)
    tl.store(place + token, at, mask=inside)


@triton.jit(do_not_specialize=["requests", "tokens", "count"])
def _tiles(
    query_start_loc,
    owner_of_token,
    positions,
    request,
    token,
    start,
    last,
    place,
    requests,
    tokens,
    count,
    SIZE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    number = tl.program_id(0)
    if number < count:
        _cut(
            query_start_loc,
            positions,
            request,
            token,
            start,
            last,
            requests,
            tokens,
            number,
            SIZE,
            BLOCK_S,
            BLOCK_R,
        )
    else:
        _find(
            query_start_loc,
            owner_of_token,
            place,
            requests,
            tokens,
            count,
            (number - count) * BLOCK + tl.arange(0, BLOCK),
            SIZE,
            BLOCK_R,
        )


def tiles(
    query_start_loc: torch.Tensor,
    request: torch.Tensor,
    positions: torch.Tensor,
    size: int,
    count: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens = len(positions)
    owner, start, last = (positions.new_empty(count) for _ in range(3))
    token, place = positions.new_empty(count, size), positions.new_empty(tokens)
    if tokens:
        _tiles[(count + triton.cdiv(tokens, BLOCK),)](
            query_start_loc.contiguous(),
            request.contiguous(),
            positions.contiguous(),
            owner,
            token,
            start,
            last,
            place,
            len(query_start_loc) - 1,
            tokens,
            count,
            SIZE=size,
            BLOCK_S=triton.next_power_of_2(size),
            BLOCK=BLOCK,
            BLOCK_R=BLOCK_R,
            num_warps=4,
        )
    return owner, token, start, last, place
