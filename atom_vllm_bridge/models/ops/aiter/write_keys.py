"""ops/torch/write_keys.py for caches of fp8, by aiter's kernels that norm, rotate, quantise and store.

Raw and compressed keys are made in ATOM's two buffers, one row after another, and their bytes moved into the cache's rows: the
caches of this project hold fp8_ds_mla. The indexer's keys are normed and rotated here, and quantised and stored in place: to
aiter a cache with blocks of one row is laid out as this project's rows are.
"""

import torch

from atom_vllm_bridge.models.ops import registry
from atom_vllm_bridge.models.ops.aiter.entries import Entry, Needs
from atom_vllm_bridge.models.ops.aiter.tables import tables
from atom_vllm_bridge.models.ops.gradients import trained
from atom_vllm_bridge.models.ops.rows import flat_rows
from atom_vllm_bridge.models.quantization import two_buffer
from atom_vllm_bridge.models.quantization.kv_codecs import RowCodec

NORM_ROPE_QUANT = Entry(
    places=("aiter.ops.fused_qk_norm_rope_cache_quant:fused_kv_norm_rope_group_quant",),
    takes=(
        "kv",
        "kv_weight",
        "positions",
        "slot_mapping",
        "cos_cache",
        "sin_cache",
        "eps",
        "k_nope_scale_buff",
        "k_rope_buff",
    ),
    constants={"is_neox": False, "quant_group_size": 64, "scale_dtype": "e8m0"},
)
INDEXER_K = Entry(
    places=("aiter.ops.cache:indexer_k_quant_and_cache",),
    takes=("k", "kv_cache", "slot_mapping", "quant_block_size", "scale_fmt"),
    constants={"preshuffle": False},
)
NEEDS = Needs(
    (NORM_ROPE_QUANT, INDEXER_K),
    architectures=("gfx950",),
    elsewhere="it stores e4m3fnuz there, and the cache holds e4m3fn",
    rounds="rounds angles and the norm's weight to bfloat16",
)


def write_keys(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    rotation: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
    codec: RowCodec,
) -> None:
    """By Triton where the cache is not fp8, or its rows are not the ones that aiter compiles for."""
    flat = flat_rows(rows)
    fits = x.dtype == torch.bfloat16 and not trained(x, weight)
    if fits and codec.name == "fp8_ds_mla" and (codec.dim, codec.rope_dim) == (512, 64):
        _write_main(x, weight, eps, rotation, rows, ids, codec)
    elif fits and codec.name == "fp8_row" and codec.dim == 128 and flat is not None:
        _write_index(x, weight, eps, rotation, flat, ids)
    else:
        own = registry.resolve_from("triton", "write_keys")
        own(x, weight, eps, rotation, rows, ids, codec)


def _write_main(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    rotation: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
    codec: RowCodec,
) -> None:
    count, dim = x.shape
    # One block, whose padding has to be zeros before.
    nope = torch.zeros((1, count, dim), dtype=torch.uint8, device=x.device)
    rope = torch.empty(
        (1, count, codec.rope_dim), dtype=torch.bfloat16, device=x.device
    )
    NORM_ROPE_QUANT(
        kv=x.contiguous(),
        kv_weight=weight.to(torch.bfloat16),
        slot_mapping=torch.arange(count, device=x.device),
        eps=eps,
        k_nope_scale_buff=nope.view(torch.float8_e4m3fn),
        k_rope_buff=rope,
        **tables(rotation, "cos_cache", "sin_cache"),
    )
    made = two_buffer.Rows(nope[0].view(torch.float8_e4m3fn), rope[0])
    registry.resolve("write_rows", x.device)(rows, ids, two_buffer.to_ds_mla(made))


def _write_index(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    rotation: torch.Tensor,
    flat: torch.Tensor,
    ids: torch.Tensor,
) -> None:
    norm, rope = (registry.resolve(op, x.device) for op in ("rms_norm", "rope"))
    key = rope(norm(x.float(), weight, eps).unsqueeze(1), rotation).squeeze(1)
    INDEXER_K(
        k=key.to(torch.bfloat16),
        kv_cache=flat.unsqueeze(1),
        slot_mapping=ids,
        quant_block_size=x.shape[1],
        scale_fmt="ue8m0",
    )
