"""ops/torch/request_of_token.py in one kernel: a token counts the requests that end before it."""

import torch
import triton
import triton.language as tl

from atom_vllm_bridge.models.ops.triton.block_table import request_at

BLOCK, BLOCK_R = 64, 64


@triton.jit(do_not_specialize=["requests", "tokens"])
def _request_of_token(
    query_start_loc,
    out,
    requests,
    tokens,
    BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    owner = request_at(query_start_loc, requests, token, BLOCK_R)
    tl.store(out + token, owner, mask=token < tokens)


def request_of_token(query_start_loc: torch.Tensor, tokens: int) -> torch.Tensor:
    out = torch.empty(tokens, dtype=torch.int64, device=query_start_loc.device)
    if tokens:
        _request_of_token[(triton.cdiv(tokens, BLOCK),)](
            query_start_loc.contiguous(),
            out,
            len(query_start_loc) - 1,
            tokens,
            BLOCK=BLOCK,
            BLOCK_R=BLOCK_R,
            num_warps=4,
        )
    return out
