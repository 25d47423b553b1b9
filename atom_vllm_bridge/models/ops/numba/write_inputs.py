"""ops/torch/write_inputs.py in one call."""

import torch

from atom_vllm_bridge.models.ops.gradients import trained
from atom_vllm_bridge.models.ops.numba.few import compiled
from atom_vllm_bridge.models.ops.rows import flat_rows
from atom_vllm_bridge.models.ops.torch import write_inputs as reference


@compiled()
def store_inputs(inputs, ape, phase, rows, ids):
    half = ape.shape[1]
    for t in range(ids.shape[0]):
        if ids[t] >= 0:
            row, bias = rows[ids[t]], ape[phase[t]]
            for c in range(half):
                row[c] = inputs[t, c]
                row[half + c] = inputs[t, half + c] + bias[c]


def write_inputs(
    inputs: torch.Tensor,
    ape: torch.Tensor,
    phase: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
) -> None:
    flat = flat_rows(rows)
    if flat is None or not rows.is_cpu or trained(ape, inputs):
        reference.write_inputs(inputs, ape, phase, rows, ids)
        return
    wide = inputs.float().contiguous()
    store_inputs(wide.numpy(), ape.numpy(), phase.numpy(), flat.numpy(), ids.numpy())
