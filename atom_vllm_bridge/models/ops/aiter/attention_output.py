"""ops/torch/attention_output.py by aiter: inverse_rope_group_quant, then batched_gemm_a8w8_mxscale for the groups of heads.

What comes out of attention is rotated back and quantised in one pass, in groups of 128 with an E8M0 scale each, and multiplied
group by group with matrices of fp8 in blocks of 128 × 128; what follows is `linear`.
"""

from typing import Any

import torch

from atom_vllm_bridge.models.ops.aiter.entries import Entry, Needs
from atom_vllm_bridge.models.ops.aiter.linear import BLOCKSCALE, ROUNDS, linear, usable
from atom_vllm_bridge.models.ops.aiter.tables import tables
from atom_vllm_bridge.models.ops.aiter.weights import Fp8, fp8
from atom_vllm_bridge.models.ops.torch import attention_output as reference
from atom_vllm_bridge.models.quantization.block_fp8 import BLOCK
from atom_vllm_bridge.models.quantization.kept import Kept

INVERSE_ROPE = Entry(
    places=("aiter.ops.inverse_rope_group_quant:inverse_rope_group_quant",),
    takes=("o", "positions", "cos_cache", "sin_cache", "num_groups"),
    # Scales row by row, by the names that this has had.
    one_of={"scale_layout": "row", "scale_shuffle": False, "transpose_scale": False},
    constants={"quant_group_size": BLOCK},
)
BATCHED = Entry(
    places=("aiter.ops.batched_gemm_op_a8w8:batched_gemm_a8w8_mxscale",),
    takes=("x", "wo_a", "x_scale", "w_scale", "dtype"),
)
NEEDS = Needs(
    (INVERSE_ROPE, BATCHED, BLOCKSCALE),
    architectures=("gfx950",),
    elsewhere="its product with E8M0 scales is for CDNA 4",
    rounds=ROUNDS,
)


def attention_output(
    attention: Any, o: torch.Tensor, rotation: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """By the ops that attention was built with where its matrices are not fp8 in whole blocks, or rows are not to be bfloat16."""
    matrices = None
    if dtype == torch.bfloat16 and usable(o.to(dtype)):
        matrices = _grouped(attention.wo_a)
    if matrices is None:
        return reference.attention_output(attention, o, rotation, dtype)
    groups = attention.wo_a.count
    codes, scales = INVERSE_ROPE(
        o=o.to(dtype).contiguous(),
        num_groups=groups,
        **tables(rotation, "cos_cache", "sin_cache"),
    )
    low = BATCHED(
        x=codes,
        wo_a=matrices.codes.view(groups, -1, matrices.codes.shape[1]),
        x_scale=scales.view(torch.uint8),
        w_scale=matrices.exponents.view(groups, -1, matrices.exponents.shape[1]),
        dtype=dtype,
    )
    return linear(low.flatten(1), attention.wo_b)


def _grouped(w: torch.Tensor | Kept) -> Fp8 | None:
    """Matrices one below the other, each of them whole blocks."""
    if not isinstance(w, Kept) or w.count is None or w.outputs % BLOCK:
        return None
    (band,) = w.bands
    return fp8(band, torch.float8_e4m3fn)
