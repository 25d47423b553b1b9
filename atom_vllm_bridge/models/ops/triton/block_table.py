"""Looking rows up in block tables inside a kernel."""

import triton
import triton.language as tl

from atom_vllm_bridge.models.ops.blocks import Blocks


@triton.jit
def row_id(
    table, to_request, width, request, row, mask, PER_BLOCK: tl.constexpr, pitch, parts
):
    """`Blocks.ids` of rows, where `mask`; int64."""
    column = tl.minimum(row // PER_BLOCK, width - 1)
    block = tl.load(table + request * to_request + column, mask=mask, other=0)
    return block.to(tl.int64) * pitch + row % PER_BLOCK * parts


@triton.jit
def request_at(query_start_loc, requests, token, BLOCK_R: tl.constexpr):
    """[N] int64, how many requests end at or before each token, at most R − 1: the request that owns it."""
    owner = tl.zeros(token.shape, tl.int64)
    for first in range(0, requests, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        end = tl.load(query_start_loc + 1 + r, mask=r < requests, other=0x7FFFFFFF).to(
            tl.int64
        )
        owner += tl.sum((end[None, :] <= token[:, None]).to(tl.int64), 1)
    return tl.minimum(owner, requests - 1)


def known(blocks: Blocks) -> bool:
    """Whether kernels can look rows up in these."""
    return blocks.plain and blocks.table.stride(1) == 1
