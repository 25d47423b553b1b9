"""ops/torch/write_keys.py in one call, for rows that hold the values themselves."""

import numba
import numpy as np
import torch

from atom_vllm_bridge.models.ops.gradients import trained
from atom_vllm_bridge.models.ops.numba.few import BITS, compiled, few
from atom_vllm_bridge.models.ops.numba.rms_norm import rms_norm
from atom_vllm_bridge.models.ops.numba.rope import rope, turn
from atom_vllm_bridge.models.ops.numba.write_rows import write_rows
from atom_vllm_bridge.models.ops.rows import flat_rows
from atom_vllm_bridge.models.quantization.kv_codecs import RowCodec


@numba.njit
def nearest(b):
    """A float32's bits → those of the nearest bfloat16, ties to even."""
    if (b & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
        return np.uint32(0x7FC0)
    odd = (b >> np.uint32(16)) & np.uint32(1)
    return np.uint32((b + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@compiled()
def _round(bits, row):
    """float32's bits to a row of them, or to the nearest bfloat16."""
    for c in range(row.size):
        row[c] = bits[c] if row.itemsize == 4 else nearest(np.uint32(bits[c]))


@compiled(fastmath={"contract", "reassoc", "nsz"})
def store_keys(x, weight, eps, rotation, rows, ids):
    d = x.shape[1]
    key = np.empty((1, 1, d), np.float32)
    bits = key.view(np.uint32)[0, 0]
    for m in range(ids.shape[0]):
        if ids[m] < 0:
            continue
        square = np.float32(0)
        for c in range(d):
            square += x[m, c] * x[m, c]
        inverse = np.float32(1) / np.sqrt(square / np.float32(d) + np.float32(eps))
        for c in range(d):
            key[0, 0, c] = x[m, c] * inverse * weight[c]
        turn(key, rotation[m : m + 1], np.float32(1))
        _round(bits, rows[ids[m]])


def write_keys(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    rotation: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
    codec: RowCodec,
) -> None:
    x, flat = x.float().contiguous(), flat_rows(rows)
    plain = rows.dtype in BITS and rows.shape[-1] == x.shape[-1]
    if plain and flat is not None and few(x) and not trained(weight):
        store_keys(
            x.numpy(),
            weight.numpy(),
            eps,
            rotation.numpy(),
            flat.view(BITS[rows.dtype]).numpy(),
            ids.numpy(),
        )
    else:
        key = rope(rms_norm(x, weight, eps), rotation)
        write_rows(rows, ids, codec.encode(key))
