"""ops/torch/linear.py on panels, for few rows."""

import numpy as np
import torch

from atom_vllm_bridge.models.ops.gradients import trained
from atom_vllm_bridge.models.ops.numba.team import Body, array, chunk_count, next_chunk
from atom_vllm_bridge.models.ops.numba.tile import product
from atom_vllm_bridge.models.ops.panels import WIDTH
from atom_vllm_bridge.models.ops.torch import linear as reference

# Rows; beyond, the products of torch make up for joining the panels.
MOST_ROWS = 48


def _body(bits):
    def body(words):
        rows, inputs = words[2], words[3]
        groups, count = words[4], words[5]
        x = array(words[6], (rows, groups * inputs), np.float32)
        panels = array(words[7], (groups * count, inputs, WIDTH), bits)
        out = array(words[8], (rows, groups * count * WIDTH), np.float32)
        chunks, total = words[1], groups * count
        chunk = next_chunk(words)
        while chunk < chunks:
            p, end = total * chunk // chunks, total * (chunk + 1) // chunks
            while p < end:
                group = p // count
                stop, first = min(end, (group + 1) * count), group * inputs
                product(x[:, first : first + inputs], panels[p:stop], out, p * WIDTH)
                p = stop
            chunk = next_chunk(words)

    return Body(body)


bodies = {torch.bfloat16: _body(np.uint16), torch.float32: _body(np.uint32)}


def by_panels(x: torch.Tensor, panels: torch.Tensor) -> torch.Tensor:
    """x [T, G · a] times panels [G, P, a, WIDTH], group by group, or [P, a, WIDTH] → [T, G · P · WIDTH] float32."""
    *groups_, count, inputs, width = panels.shape
    groups = groups_[0] if groups_ else 1
    if x.dtype != torch.float32 or not x.is_contiguous():
        x = x.float().contiguous()
    out = x.new_empty(x.shape[0], groups * count * width)
    bodies[panels.dtype].run(
        chunk_count(groups * count),
        x.shape[0],
        inputs,
        groups,
        count,
        x.data_ptr(),
        panels.data_ptr(),
        out.data_ptr(),
    )
    return out


def takes(x: torch.Tensor, panels: torch.Tensor) -> bool:
    """Whether `by_panels` is for these."""
    return (
        x.shape[0] <= MOST_ROWS
        and x.is_cpu
        and panels.dtype in bodies
        and not trained(x, panels)
    )


def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    if w.dim() == 2 or not takes(x, w):
        return reference.linear(x, w)
    return by_panels(x, w).to(x.dtype)
