"""ops/torch/write_rows.py in one call: rows with a negative id are passed over."""

import torch

from atom_vllm_bridge.models.ops.numba.few import MOST, compiled
from atom_vllm_bridge.models.ops.rows import flat_rows
from atom_vllm_bridge.models.ops.torch import write_rows as reference

# numpy has no bfloat16; what a row means does not matter here.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@compiled()
def _write_rows(rows, ids, values):
    for m in range(ids.shape[0]):
        if ids[m] >= 0:
            for c in range(values.shape[1]):
                rows[ids[m], c] = values[m, c]


def write_rows(rows: torch.Tensor, ids: torch.Tensor, values: torch.Tensor) -> None:
    flat = flat_rows(rows)
    if flat is None or rows.device.type != "cpu" or values.numel() > MOST:
        reference.write_rows(rows, ids, values)
        return
    bits = _BITS[rows.element_size()]
    _write_rows(flat.view(bits).numpy(), ids.numpy(), values.view(bits).numpy())
