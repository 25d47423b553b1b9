"""ops/torch/indexer_logits.py on a cache of fp8, by aiter's kernels that read pages where they lie, or keys in one list.

Queries are quantised here, a scale for each head of each. Tiles of one query read pages, which to aiter have one row: then an
entry's page is its row's id, and pages are read only as far as the query sees. In tiles of more queries, keys are gathered once
for all of them. On gfx942 keys are gathered always: there aiter multiplies e4m3fnuz, whose bits mean half, so that the keys'
negative zeros are cleared and their scales doubled.
"""

import torch

from atom_vllm_bridge.models.ops import registry
from atom_vllm_bridge.models.ops.aiter.entries import Entry, Needs
from atom_vllm_bridge.models.ops.aiter.installed import fp8_type
from atom_vllm_bridge.models.ops.gradients import trained
from atom_vllm_bridge.models.ops.rows import flat_rows
from atom_vllm_bridge.models.ops.torch.gather_rows import gather_rows
from atom_vllm_bridge.models.quantization.fnuz import halved
from atom_vllm_bridge.models.quantization.kv_codecs import RowCodec

PAGED = Entry(
    places=("aiter.ops.triton.attention.pa_mqa_logits:deepgemm_fp8_paged_mqa_logits",),
    takes=(
        "q_fp8",
        "kv_cache",
        "weights",
        "out_logits",
        "context_lens",
        "kv_indices",
        "max_model_len",
    ),
    renamed={"kv_cache": ("kv_cache_fp8",)},
    constants={"Preshuffle": False, "KVBlockSize": 1},
)
LISTED = Entry(
    places=("aiter.ops.triton.attention.fp8_mqa_logits:fp8_mqa_logits",),
    takes=("Q", "KV", "kv_scales", "weights", "cu_starts", "cu_ends"),
    constants={"clean_logits": True},
)
NEEDS = Needs((PAGED, LISTED), rounds="rounds queries to fp8")
# A head whose values are all zero has a scale too.
AMAX_FLOOR = 1e-12


def indexer_logits(
    query: torch.Tensor,
    weight: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
    codec: RowCodec,
    available: torch.Tensor,
) -> torch.Tensor:
    """By Triton where the cache is not fp8 in one list of rows, or heads and their size are not powers of two."""
    flat = flat_rows(rows)
    tiles, queries, heads, dim = query.shape
    powers = all(n & (n - 1) == 0 for n in (heads, dim))
    entries = ids.shape[1]
    if (
        codec.name != "fp8_row"
        or flat is None
        or not powers
        or trained(query, weight)
        or tiles * queries * entries == 0
    ):
        own = registry.resolve_from("triton", "indexer_logits")
        return own(query, weight, rows, ids, codec, available)
    fp8 = fp8_type(query.device)
    codes, weight = quantized(query, weight, fp8)
    seen = available.clamp(max=entries).int()
    if queries == 1 and fp8 == torch.float8_e4m3fn:
        out = query.new_full((tiles, entries), -torch.inf)
        PAGED(
            q_fp8=codes,
            kv_cache=flat.view(-1, 1, 1, dim + 4),
            weights=weight.view(tiles, heads),
            out_logits=out,
            context_lens=seen.view(tiles),
            kv_indices=ids.int(),
            max_model_len=entries,
        )
        return out.unsqueeze(1)
    out = query.new_empty((tiles, queries, entries))
    starts = torch.zeros_like(seen[0])
    for tile in range(tiles):
        keys, scales = _gathered(rows, ids[tile], dim, fp8)
        out[tile] = LISTED(
            Q=codes[tile],
            KV=keys,
            kv_scales=scales,
            weights=weight[tile],
            cu_starts=starts,
            cu_ends=seen[tile],
        )
    return out


def quantized(
    query: torch.Tensor, weight: torch.Tensor, fp8: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [..., H, D] as fp8, and weights [..., H] times their scales, amax / largest; the product with a key is linear in both."""
    amax = query.abs().amax(-1).clamp(min=AMAX_FLOOR)
    scale = amax / torch.finfo(fp8).max
    return (query / scale.unsqueeze(-1)).to(fp8), (weight * scale).contiguous()


def _gathered(
    rows: torch.Tensor, ids: torch.Tensor, dim: int, fp8: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [E, D] and scales [E] of rows."""
    found = gather_rows(rows, ids)
    codes = found[:, :dim].contiguous()
    scales = found[:, dim:].contiguous().view(torch.float32).view(-1)
    if fp8 == torch.float8_e4m3fnuz:
        return halved(codes), 2 * scales
    return codes.view(fp8), scales
