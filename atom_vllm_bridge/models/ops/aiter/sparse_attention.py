"""ops/torch/sparse_attention.py by aiter's ragged kernels: each query has a list of the rows that it reads, and no other.

To aiter a cache is a list of rows with a number each, as it is here (ops/rows.py). On gfx950 one call reads window and compressed
entries, in bfloat16 or in fp8_ds_mla: with pages of one row, aiter's layout of the latter is this project's. Versions that do not
take two caches there have another kernel for two of bfloat16. On gfx942 there is only one cache to a call, so that layers with
compressed entries are Triton's.

Both products are of bfloat16 with float32 sums, as Triton's are on such rows.
"""

import torch

from atom_vllm_bridge.models.ops import registry
from atom_vllm_bridge.models.ops.aiter.entries import Entry, Needs
from atom_vllm_bridge.models.ops.aiter.installed import architecture
from atom_vllm_bridge.models.ops.gradients import trained
from atom_vllm_bridge.models.ops.ragged import Ragged, ragged
from atom_vllm_bridge.models.ops.rows import flat_rows
from atom_vllm_bridge.models.ops.torch.sparse_attention import Keys
from atom_vllm_bridge.models.quantization.kv_codecs import RowCodec

DECODE = Entry(
    places=("aiter.ops.triton.attention.pa_decode_sparse:pa_decode_sparse",),
    takes=(
        "q",
        "unified_kv",
        "kv_indices",
        "kv_indptr",
        "attn_sink",
        "softmax_scale",
    ),
    may_take=("extra_cache", "extra_indices", "extra_indptr"),
    constants={"has_invalid": False},
)
PREFILL = Entry(
    places=("aiter.ops.pa_sparse_prefill_opus:pa_sparse_prefill_opus",),
    takes=(
        "q",
        "unified_kv",
        "kv_indices_prefix",
        "kv_indptr_prefix",
        "kv",
        "kv_indices_extend",
        "kv_indptr_extend",
        "attn_sink",
        "softmax_scale",
    ),
)
NEEDS = Needs((DECODE,))
DIM, ROPE_DIM = 512, 64
# Entries of lists that a call may have; more take too much memory to make.
MOST_LISTED = 1 << 25
# Where one call reads two caches.
PAIRED = "gfx950"


def sparse_attention(
    query: torch.Tensor,
    sink: torch.Tensor,
    scale: float,
    window: Keys,
    compressed: Keys | None,
    codec: RowCodec,
) -> torch.Tensor:
    """By Triton where caches are not what aiter's kernel of this GPU reads, or lists would be too long."""
    sources = [window] if compressed is None else [window, compressed]
    pools = [flat_rows(source.rows) for source in sources]
    took = None
    fits = query.numel() > 0 and query.shape[-1] == DIM
    fits = fits and sum(source.hidden.numel() for source in sources) <= MOST_LISTED
    if fits and not trained(query, sink):
        lists = [p for p in pools if p is not None]
        if len(lists) == len(sources):
            took = _kernel(query.device, codec, len(sources))
    if took is None:
        own = registry.resolve_from("triton", "sparse_attention")
        return own(query, sink, scale, window, compressed, codec)
    q = query.flatten(0, 1).to(torch.bfloat16).contiguous()
    lists_of_rows = [rows_of(source) for source in sources]
    out = took(q, sink, scale, lists, lists_of_rows)
    return out.float().view_as(query)


def rows_of(keys: Keys) -> Ragged:
    """The list of each query's rows, as the step's builder has made it, or made here."""
    return keys.ragged or ragged(keys.ids, keys.hidden)


def _kernel(device: torch.device, codec: RowCodec, sources: int):
    """The call for caches of a codec; None: none of aiter's."""
    plain = codec.name == "bfloat16"
    packed = codec.name == "fp8_ds_mla" and codec.rope_dim == ROPE_DIM
    paired = architecture(device) == PAIRED
    both = DECODE.has("extra_cache", "extra_indices", "extra_indptr")
    if paired and both and (plain or packed):
        return _pages
    if plain and sources == 1:
        return _pool
    if plain and paired and PREFILL.missing() is None:
        return _two_pools
    return None


def _pool(q, sink, scale, pools, lists) -> torch.Tensor:
    """One cache [P, D]."""
    (pool,), (rows,) = pools, lists
    return DECODE(
        q=q,
        unified_kv=pool,
        kv_indices=rows.indices,
        kv_indptr=rows.indptr,
        attn_sink=sink,
        softmax_scale=scale,
    )


def _pages(q, sink, scale, pools, lists) -> torch.Tensor:
    """One or two caches [P, 1, C] of pages of one row."""
    extra = {}
    if len(pools) > 1:
        extra = {
            "extra_cache": pools[1].unsqueeze(1),
            "extra_indices": lists[1].indices,
            "extra_indptr": lists[1].indptr,
        }
    return DECODE(
        q=q,
        unified_kv=pools[0].unsqueeze(1),
        kv_indices=lists[0].indices,
        kv_indptr=lists[0].indptr,
        attn_sink=sink,
        softmax_scale=scale,
        **extra,
    )


def _two_pools(q, sink, scale, pools, lists) -> torch.Tensor:
    """Two caches [P, D]."""
    return PREFILL(
        q=q,
        unified_kv=pools[1],
        kv_indices_prefix=lists[1].indices,
        kv_indptr_prefix=lists[1].indptr,
        kv=pools[0],
        kv_indices_extend=lists[0].indices,
        kv_indptr_extend=lists[0].indptr,
        attn_sink=sink,
        softmax_scale=scale,
    )
