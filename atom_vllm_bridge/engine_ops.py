"""Ops by kernels that the engine has: provider `vllm` of models/ops/registry.py.

It is taken where a setting names it (ATOM_BRIDGE_OPS="experts=vllm"). `experts` is Marlin's product with mxfp4 weights and
bfloat16 rows; what lies between its two products is this project's own SwiGLU, so that the clamp is the reference's. Marlin wants
weights in an order of its own: the first step, which no graph captures, puts them into it where they lie.
"""

import importlib
import inspect
import os
from typing import Any

import torch

from atom_vllm_bridge.models.ops import registry
from atom_vllm_bridge.models.ops.registry import Op, Provider
from atom_vllm_bridge.models.ops.slots import all_here
from atom_vllm_bridge.models.quantization import mxfp4
from atom_vllm_bridge.models.quantization.kept import Kept
from atom_vllm_bridge.models.quantization.planes import MXFP4, WORDS
from atom_vllm_bridge.platforms import rocm_variables

_LAYERS = "vllm.model_executor.layers"
_MARLIN = f"{_LAYERS}.fused_moe.experts.marlin_moe"
_UTILS = f"{_LAYERS}.quantization.utils.marlin_utils"
_UTILS_FP4 = f"{_LAYERS}.quantization.utils.marlin_utils_fp4"
# torch has every op.
WITHOUT_AITER = "triton,torch"
# What is called, with which arguments.
_CALLED = {
    (_MARLIN, "fused_marlin_moe"): {
        "hidden_states",
        "w1",
        "w2",
        "bias1",
        "bias2",
        "w1_scale",
        "w2_scale",
        "topk_weights",
        "topk_ids",
        "quant_type_id",
        "activation_func",
        "moe_sum",
    },
    (_UTILS, "marlin_permute_scales"): {"s", "size_k", "size_n", "group_size"},
    (_UTILS_FP4, "mxfp4_marlin_process_scales"): {"marlin_scales"},
    ("vllm._custom_ops", "gptq_marlin_repack"): {
        "b_q_weight",
        "size_k",
        "size_n",
        "num_bits",
    },
}
# Sides of matrices that Marlin multiplies with: multiples of these. Rows of words must have no filling.
_INPUTS, _OUTPUTS = MXFP4.step, 64


def configure(setting: str) -> None:
    """`registry.configure`, with the engine's provider among those that the setting may name.

    On AMD GPUs VLLM_ROCM_USE_AITER=0 comes behind the setting, and puts every op that it does not name before aiter.

    Raises:
        ValueError: an unknown op or provider.
    """
    registry.register(Provider("vllm", {"experts": experts}.get, refusal), first=False)
    if torch.version.hip is not None and rocm_variables.aiter_is_off(os.environ):
        setting = f"{setting},{WITHOUT_AITER}"
    registry.configure(setting)


def refusal(device: torch.device) -> str | None:
    """Why the engine's kernels cannot run on a device, or None where they can."""
    if device.type != "cuda" or torch.version.hip is not None:
        return "is for NVIDIA GPUs"
    for (module, name), wanted in _CALLED.items():
        try:
            found = getattr(importlib.import_module(module), name, None)
        except ImportError as error:
            return f"has no {module}: {error}"
        if found is None:
            return f"has no {name}"
        if missing := wanted - inspect.signature(found).parameters.keys():
            return f"has a {name} without {', '.join(sorted(missing))}"
    for library, name in (
        ("_C", "gptq_marlin_repack"),
        ("_moe_C", "moe_wna16_marlin_gemm"),
    ):
        if not hasattr(getattr(torch.ops, library), name):
            return f"was built without {name}"
    return None


def experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor | Kept,
    w2: torch.Tensor | Kept,
    limit: float,
) -> torch.Tensor:
    """ops/torch/experts.py by Marlin; by Triton where rows are not bfloat16, or the experts not mxfp4 of sides that Marlin takes."""
    if x.dtype != torch.bfloat16 or not _fits(w13) or not _fits(w2):
        triton: Op = registry.resolve_from("triton", "experts")
        return triton(x, chosen, weights, w13, w2, limit)
    from vllm.scalar_type import scalar_types

    assert isinstance(w13, Kept)
    assert isinstance(w2, Kept)
    first, first_scale = _in_marlins_order(w13)
    second, second_scale = _in_marlins_order(w2)
    swiglu = registry.resolve("swiglu", x.device)

    def gate(
        activation: Any, out: torch.Tensor, hidden: torch.Tensor, **routing: Any
    ) -> None:
        out.copy_(swiglu(hidden, limit))

    def add(y: torch.Tensor, *unused: Any) -> torch.Tensor:
        return y.sum(1, dtype=torch.float32)

    fused_marlin_moe = importlib.import_module(_MARLIN).fused_marlin_moe
    ids, weights = all_here(chosen, weights, w13.shape[0])
    return fused_marlin_moe(
        hidden_states=x.contiguous(),
        w1=first,
        w2=second,
        bias1=None,
        bias2=None,
        w1_scale=first_scale,
        w2_scale=second_scale,
        topk_weights=weights,
        topk_ids=ids,
        quant_type_id=scalar_types.float4_e2m1f.id,
        activation_func=gate,
        moe_sum=add,
    )


def _fits(w: torch.Tensor | Kept) -> bool:
    if not isinstance(w, Kept) or w.count is None or w.bands[0].format != "mxfp4":
        return False
    return w.inputs % _INPUTS == 0 and w.outputs % _OUTPUTS == 0


def _in_marlins_order(w: Kept) -> tuple[torch.Tensor, torch.Tensor]:
    """Words [E, a/16, 2 · b] int32 and scales [E, a/32, b] E8M0, in the memory of `w`, which nothing else can read from then on."""
    (band,), (many, inputs, outputs) = w.bands, w.shape
    if not band.repacked:
        for e in range(many):
            _repack_one(w, slice(e * outputs, (e + 1) * outputs))
        band.repacked = True
    words, scales = band.memory
    return (
        words.view(many, inputs // 16, 2 * outputs),
        scales.view(many, inputs // WORDS, outputs).view(torch.float8_e8m0fnu),
    )


def _repack_one(w: Kept, rows: slice) -> None:
    from vllm import _custom_ops as kernels

    permute = importlib.import_module(_UTILS).marlin_permute_scales
    process = importlib.import_module(_UTILS_FP4).mxfp4_marlin_process_scales
    words, scales = (part[rows] for part in w.bands[0].memory)
    packed = mxfp4.pack(MXFP4.unpack(words))
    sides = {"size_k": w.inputs, "size_n": w.outputs}
    marlin = kernels.gptq_marlin_repack(
        b_q_weight=packed.view(torch.int32).mT.contiguous(), num_bits=4, **sides
    )
    words.view(-1).copy_(marlin.view(-1))
    scale = (scales - MXFP4.offset).view(torch.float8_e8m0fnu).bfloat16()
    permuted = permute(s=scale.mT, group_size=WORDS, **sides)
    found = process(marlin_scales=permuted).view(torch.uint8)
    scales.view(-1).copy_(found.view(-1))
