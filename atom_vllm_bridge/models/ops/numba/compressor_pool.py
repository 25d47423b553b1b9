"""ops/torch/compressor_pool.py in one call, which reads rows where they lie."""

import numpy as np
import torch

from atom_vllm_bridge.models.ops.numba.exponential import exponential
from atom_vllm_bridge.models.ops.numba.few import MOST, compiled
from atom_vllm_bridge.models.ops.rows import flat_rows
from atom_vllm_bridge.models.ops.torch import compressor_pool as reference


@compiled(fastmath={"contract", "reassoc", "nsz"})
def pool_rows(rows, ids, unseen, out):
    """out [M, D] from rows [N, D], ids [M, 2, K] and unseen [M, K]; an entry of which nothing is seen is NaN."""
    sources, d = ids.shape[2], rows.shape[1]
    most, total = np.empty(d, np.float32), np.empty(d, np.float32)
    for m in range(ids.shape[0]):
        entry = out[m]
        most[:] = -np.inf
        total[:] = 0
        entry[:] = 0
        for k in range(sources):
            if not unseen[m, k]:
                score = rows[ids[m, 1, k]]
                for c in range(d):
                    most[c] = max(most[c], score[c])
        for k in range(sources):
            if not unseen[m, k]:
                kv, score = rows[ids[m, 0, k]], rows[ids[m, 1, k]]
                for c in range(d):
                    weight = exponential(score[c] - most[c])
                    total[c] += weight
                    entry[c] += weight * kv[c]
        for c in range(d):
            entry[c] /= total[c]


def compressor_pool(
    state: torch.Tensor, ids: torch.Tensor, unseen: torch.Tensor
) -> torch.Tensor:
    flat = flat_rows(state) if state.is_cpu and not state.requires_grad else None
    if flat is None or ids.numel() * state.shape[-1] > MOST:
        return reference.compressor_pool(state, ids, unseen)
    out = state.new_empty(len(ids), state.shape[-1])
    pool_rows(flat.numpy(), ids.contiguous().numpy(), unseen.numpy(), out.numpy())
    return out
