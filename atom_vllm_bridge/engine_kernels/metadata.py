"""Stand-in for the kernel of vllm.v1.attention.ops.metadata."""

from typing import Any

import numpy as np
import torch


def _token_request_mapping(
    query_start_loc: torch.Tensor,
    output: torch.Tensor,
    num_reqs: int,
    num_mapped: int,
    num_tokens: int,
    *,
    grid: tuple[int, ...],
    **options: Any,
) -> None:
    """The request of each token; 0 from num_mapped on.

    A token past the last request's end belongs to the last request.

    Args:
        query_start_loc: [num_reqs + 1] int32, not decreasing.
        output: [num_tokens] int32, written.
    """
    count = min(num_tokens, 256 * grid[0])
    mapped = min(num_mapped, count)
    result = output.numpy()
    ends = query_start_loc.numpy()[1 : num_reqs + 1]
    requests = ends.searchsorted(np.arange(mapped, dtype=ends.dtype), side="right")
    np.minimum(requests, num_reqs - 1, out=result[:mapped], casting="same_kind")
    result[mapped:count] = 0


OVERRIDES = {
    "vllm.v1.attention.ops.metadata._token_request_mapping_kernel": (
        _token_request_mapping
    ),
}
