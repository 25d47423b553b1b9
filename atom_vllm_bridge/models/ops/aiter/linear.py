"""ops/torch/linear.py by aiter's gemm_a8w8_blockscale, for matrices that came as fp8.

Rows are quantised in groups of 128, a scale for each: amax / largest. Bands of a matrix that are not fp8 are multiplied as they
are. aiter's kernel for preshuffled weights is not used: a matrix here is cut by outputs at any multiple of 128.
"""

import torch

from atom_vllm_bridge.models.ops import registry
from atom_vllm_bridge.models.ops.aiter.entries import Entry, Needs
from atom_vllm_bridge.models.ops.aiter.installed import fp8_type
from atom_vllm_bridge.models.ops.aiter.weights import Fp8, fp8
from atom_vllm_bridge.models.ops.gradients import trained
from atom_vllm_bridge.models.quantization.block_fp8 import BLOCK
from atom_vllm_bridge.models.quantization.kept import Band, Kept

BLOCKSCALE = Entry(
    places=("aiter.ops.gemm_op_a8w8:gemm_a8w8_blockscale",),
    takes=("XQ", "WQ", "x_scale", "w_scale", "dtype"),
)
ROUNDS = "rounds rows to fp8"
NEEDS = Needs((BLOCKSCALE,), rounds=ROUNDS)
# A group of zeros has a scale too.
AMAX_FLOOR = 1e-12


def linear(x: torch.Tensor, w: torch.Tensor | Kept) -> torch.Tensor:
    """By Triton where no band is fp8 in whole blocks, or rows are not bfloat16."""
    if not isinstance(w, Kept) or w.count is not None or not usable(x):
        return registry.resolve_from("triton", "linear")(x, w)
    found = [fp8(band, fp8_type(x.device)) for band in w.bands]
    if not any(found):
        return registry.resolve_from("triton", "linear")(x, w)
    codes, scales = quantized(x, fp8_type(x.device))
    parts = [
        _plain(x, band) if one is None else product(codes, scales, one)
        for one, band in zip(found, w.bands, strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def usable(x: torch.Tensor) -> bool:
    return x.dtype == torch.bfloat16 and x.numel() > 0 and not trained(x)


def product(codes: torch.Tensor, scales: torch.Tensor, w: Fp8) -> torch.Tensor:
    """[T, a] fp8 and its scales [T, a/128] times a matrix [b, a] → [T, b] bfloat16."""
    return BLOCKSCALE(
        XQ=codes, WQ=w.codes, x_scale=scales, w_scale=w.scales, dtype=torch.bfloat16
    )


def quantized(x: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [T, a] as fp8 [T, a] and float32 scales [T, a/128]."""
    groups = x.float().unflatten(1, (-1, BLOCK))
    scale = groups.abs().amax(-1).clamp(min=AMAX_FLOOR) / torch.finfo(kind).max
    return (groups / scale.unsqueeze(-1)).to(kind).flatten(1), scale


def _plain(x: torch.Tensor, band: Band) -> torch.Tensor:
    return x @ band.dequantize().to(x.dtype).mT
