"""An aiter made of published signatures (aiter_signatures/): its functions check what they are given, and compute it in torch.

What they ask of shapes, dtypes and layouts is what aiter's own documentation of them says.
"""

import enum
import json
import sys
import types
from pathlib import Path

import torch
import torch.nn.functional as F

from atom_vllm_bridge.models.ops.aiter import entries, installed
from atom_vllm_bridge.models.ops.torch.hc_pre import sinkhorn
from atom_vllm_bridge.models.quantization import mxfp4, two_buffer
from atom_vllm_bridge.models.quantization.kv_codecs import fp8_ds_mla, fp8_row

VERSIONS = Path(__file__).parent / "aiter_signatures"
BF16, FP32 = torch.bfloat16, torch.float32
E4M3 = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}
# Set by `install`; aiter asks the device.
ARCHITECTURE = ["gfx950"]


class QuantType(enum.Enum):
    per_1x32 = 4


def signatures(version):
    """ "module:function" → signature."""
    read = json.loads((VERSIONS / f"{version}.json").read_text())
    return {name: entry["signature"] for name, entry in read["functions"].items()}


def install(monkeypatch, version, architecture, changed=None):
    """Make this version importable, on a GPU of this architecture (None: of torch's); returns the calls that its functions get: (name, arguments)."""
    calls, modules = [], {"aiter": types.ModuleType("aiter")}
    modules["aiter"].QuantType = QuantType
    for place, signature in (signatures(version) | (changed or {})).items():
        path, _, name = place.partition(":")
        parts = path.split(".")
        for i in range(1, len(parts) + 1):
            path_ = ".".join(parts[:i])
            modules.setdefault(path_, types.ModuleType(path_))
        setattr(modules[path], name, function(name, signature, calls))
    for path, module in modules.items():
        module.__path__ = []
        monkeypatch.setitem(sys.modules, path, module)
    monkeypatch.setattr(entries, "_found", {})
    monkeypatch.setattr(installed.namesakes, "refusal", lambda: None)
    if architecture is None:
        return calls
    for module in (entries, installed):
        monkeypatch.setattr(module, "architecture", lambda device: architecture)
    ARCHITECTURE[0] = architecture
    for module in list(sys.modules.values()):
        named = getattr(module, "__name__", "")
        if named.startswith("atom_vllm_bridge.models.ops.aiter.") and hasattr(
            module, "architecture"
        ):
            monkeypatch.setattr(module, "architecture", lambda device: architecture)
    return calls


def function(name, signature, calls):
    """A function of this signature, which records and runs what it is named after."""
    scope = {"calls": calls, "run": globals().get(f"run_{name}")}
    exec(
        f"def {name}{signature}:\n"
        "    given = dict(locals())\n"
        f"    calls.append(({name!r}, given))\n"
        "    return run(**given)\n",
        scope,
    )
    return scope[name]


def has(tensor, dtype, *shape):
    assert tensor.dtype == dtype, (tensor.dtype, dtype)
    assert tuple(tensor.shape) == shape, (tuple(tensor.shape), shape)
    assert tensor.is_contiguous()


def run_mhc_pre(
    residual,
    fn,
    hc_scale,
    hc_base,
    rms_eps,
    hc_pre_eps,
    hc_sinkhorn_eps,
    hc_post_mult_value,
    sinkhorn_repeat,
    norm_weight,
    **rest,
):
    tokens, n, dim = residual.shape
    head = sinkhorn_repeat == 0
    rows = n if head else (2 + n) * n
    has(residual, BF16, tokens, n, dim)
    has(fn, FP32, rows, n * dim)
    has(hc_scale, FP32, 1 if head else 3)
    has(hc_base, FP32, rows)
    assert norm_weight is None
    z = residual.float()
    mix = F.linear(z.flatten(1), fn)
    mix = mix * torch.rsqrt(z.flatten(1).square().mean(1, keepdim=True) + rms_eps)
    pre = torch.sigmoid(mix[:, :n] * hc_scale[0] + hc_base[:n]) + hc_pre_eps
    y = (pre.unsqueeze(-1) * z).sum(1).to(BF16)
    if head:
        return torch.empty(tokens, n, 1), torch.empty(tokens, n, n), y
    post = torch.sigmoid(mix[:, n : 2 * n] * hc_scale[1] + hc_base[n : 2 * n])
    comb = (mix[:, 2 * n :] * hc_scale[2] + hc_base[2 * n :]).view(-1, n, n)
    comb = comb.softmax(-1) + hc_sinkhorn_eps
    comb = sinkhorn(comb, sinkhorn_repeat, hc_sinkhorn_eps)
    return (hc_post_mult_value * post).unsqueeze(-1), comb, y


def run_mhc_post(out, x, residual, post_layer_mix, comb_res_mix, **rest):
    tokens, n, dim = residual.shape
    for tensor in (out, residual):
        has(tensor, BF16, tokens, n, dim)
    has(x, BF16, tokens, dim)
    has(post_layer_mix, FP32, tokens, n, 1)
    has(comb_res_mix, FP32, tokens, n, n)
    mixed = torch.einsum("tij,tid->tjd", comb_res_mix, residual.float())
    out.copy_(post_layer_mix * x.float().unsqueeze(1) + mixed)


def run_topk_gating(
    topk_weights,
    topk_indices,
    gating_output,
    correction_bias,
    need_renorm,
    routed_scaling_factor,
    score_func="sqrtsoftplus",
):
    tokens, many = gating_output.shape
    k = topk_weights.shape[1]
    has(topk_weights, FP32, tokens, k)
    has(topk_indices, torch.int32, tokens, k)
    has(correction_bias, FP32, many)
    assert score_func == "sqrtsoftplus"
    assert need_renorm
    scores = F.softplus(gating_output.float()).sqrt()
    chosen = (scores + correction_bias).topk(k, 1).indices
    weights = scores.gather(1, chosen)
    weights = weights / weights.sum(1, keepdim=True) * routed_scaling_factor
    topk_weights.copy_(weights)
    topk_indices.copy_(chosen)


run_topk_softplus = run_topk_gating


def run_fused_clamp_act_mul(inp, swiglu_limit, activation, **rest):
    rows, width = inp.shape
    has(inp, BF16, rows, width)
    inner = width // 2
    assert inner >= 128
    assert inner & (inner - 1) == 0
    assert activation == "silu"
    gate, up = inp.float().chunk(2, 1)
    if swiglu_limit > 0:
        gate, up = gate.clamp(max=swiglu_limit), up.clamp(-swiglu_limit, swiglu_limit)
    return (F.silu(gate) * up).to(inp.dtype)


def turned(x, cos, sin, positions, sign=1):
    """The tail of rows [T, H, D] turned by the tables' angles."""
    pairs = cos.shape[1]
    has(cos, BF16, cos.shape[0], pairs)
    has(sin, BF16, cos.shape[0], pairs)
    assert positions.dtype == torch.int64
    c, s = (t.float()[positions].unsqueeze(1) for t in (cos, sign * sin))
    out = x.float().clone()
    tail = out[..., -2 * pairs :].unflatten(-1, (pairs, 2))
    even, odd = tail.clone().unbind(-1)
    tail[..., 0], tail[..., 1] = even * c - odd * s, even * s + odd * c
    return out


def run_rope_rotate_activation(
    out, input, cos, sin, positions, rope_dim, do_rotate_act, **rest
):
    has(input, BF16, input.shape[0], input.shape[1], 128)
    has(out, BF16, *input.shape)
    assert rope_dim == 2 * cos.shape[1]
    assert not do_rotate_act
    out.copy_(turned(input, cos, sin, positions))


def run_fused_kv_norm_rope_group_quant(
    kv,
    kv_weight,
    positions,
    slot_mapping,
    cos_cache,
    sin_cache,
    eps,
    k_nope_scale_buff,
    k_rope_buff,
    is_neox,
    quant_group_size,
    scale_dtype,
):
    tokens, dim = kv.shape
    has(kv, BF16, tokens, dim)
    has(kv_weight, BF16, dim)
    blocks, page, _ = k_nope_scale_buff.shape
    has(k_nope_scale_buff, torch.float8_e4m3fn, blocks, page, dim)
    has(k_rope_buff, BF16, blocks, page, 64)
    assert slot_mapping.dtype == torch.int64
    assert (is_neox, quant_group_size, scale_dtype) == (False, 64, "e8m0")
    x = kv.float()
    x = x * torch.rsqrt(x.square().mean(1, keepdim=True) + eps) * kv_weight.float()
    x = turned(x.unsqueeze(1), cos_cache, sin_cache, positions).squeeze(1)
    rows = two_buffer.encode(x, 64)
    k_nope_scale_buff.view(torch.uint8).flatten(0, 1)[slot_mapping] = rows.nope.view(
        torch.uint8
    )
    k_rope_buff.flatten(0, 1)[slot_mapping] = rows.rope


def run_indexer_k_quant_and_cache(
    k, kv_cache, slot_mapping, quant_block_size, scale_fmt, preshuffle=False
):
    has(k, BF16, k.shape[0], 128)
    blocks, size, width = kv_cache.shape
    has(kv_cache, torch.uint8, blocks, size, width)
    assert (quant_block_size, scale_fmt, preshuffle) == (128, "ue8m0", False)
    rows = fp8_row(128).encode(k.float())
    flat = kv_cache.view(blocks, size * width)
    for row, slot in zip(rows, slot_mapping.tolist(), strict=True):
        if slot >= 0:
            block, at = divmod(slot, size)
            flat[block, at * 128 : (at + 1) * 128] = row[:128]
            first = size * 128 + at * 4
            flat[block, first : first + 4] = row[128:]


def run_top_k_per_row_prefill(
    logits, rowStarts, rowEnds, indices, values, numRows, stride0, stride1, k, stable
):
    rows = logits.shape[0]
    assert logits.dtype == FP32
    assert (numRows, stride0, stride1) == (rows, *logits.stride())
    has(rowStarts, torch.int32, rows)
    has(rowEnds, torch.int32, rows)
    has(indices, torch.int32, rows, k)
    assert values is None
    assert stable
    indices.fill_(-1)
    for row in range(rows):
        start, end = int(rowStarts[row]), int(rowEnds[row])
        best = logits[row, start:end].sort(descending=True, stable=True).indices[:k]
        indices[row, : len(best)] = (best + start).sort().values.int()


def scored(q, weights, keys, scales):
    """Σ_h weight · relu(query · key) · scale, [T, N]."""
    product = torch.einsum("thd,nd->thn", q.float(), keys.float()).relu()
    return torch.einsum("thn,th->tn", product, weights) * scales


def run_deepgemm_fp8_paged_mqa_logits(
    q_fp8,
    kv_cache,
    weights,
    out_logits,
    context_lens,
    kv_indices,
    max_model_len,
    Preshuffle,
    KVBlockSize,
    **rest,
):
    batch, next_n, heads, dim = q_fp8.shape
    pages = kv_cache.shape[0]
    has(q_fp8, E4M3[ARCHITECTURE[0]], batch, next_n, heads, dim)
    has(kv_cache, torch.uint8, pages, KVBlockSize, 1, dim + 4)
    has(weights, FP32, batch * next_n, heads)
    has(out_logits, FP32, batch * next_n, max_model_len)
    has(context_lens, torch.int32, batch)
    has(kv_indices, torch.int32, batch, max_model_len // KVBlockSize)
    assert (Preshuffle, KVBlockSize, next_n) == (False, 1, 1)
    for row in range(batch):
        seen = int(context_lens[row])
        page = kv_cache[kv_indices[row, :seen].long(), 0, 0]
        keys = page[:, :dim].view(q_fp8.dtype)
        scales = page[:, dim:].contiguous().view(FP32).view(-1)
        out_logits[row, :seen] = scored(
            q_fp8[row], weights[row : row + 1], keys, scales
        )


def run_fp8_mqa_logits(Q, KV, kv_scales, weights, cu_starts, cu_ends, clean_logits):
    tokens, heads, dim = Q.shape
    count = KV.shape[0]
    has(Q, E4M3[ARCHITECTURE[0]], tokens, heads, dim)
    has(KV, E4M3[ARCHITECTURE[0]], count, dim)
    has(kv_scales, FP32, count)
    has(weights, FP32, tokens, heads)
    for ends in (cu_starts, cu_ends):
        has(ends, torch.int32, tokens)
    at = torch.arange(count)
    outside = (at < cu_starts.unsqueeze(1)) | (at >= cu_ends.unsqueeze(1))
    return scored(Q, weights, KV, kv_scales).masked_fill(outside, -torch.inf)


def attended(q, sink, scale, sources):
    """Attention of bf16 queries [T, H, D] over lists of rows: sources are (rows [P, D] float32, indices, indptr)."""
    out = torch.empty(q.shape)
    for t in range(q.shape[0]):
        found = [
            rows[indices[indptr[t] : indptr[t + 1]].long()]
            for rows, indices, indptr in sources
        ]
        keys = torch.cat(found)
        scores = torch.cat((q[t].float() @ keys.T * scale, sink.unsqueeze(1)), 1)
        out[t] = scores.softmax(1)[:, :-1] @ keys
    return out.to(q.dtype)


def listed(pool, indices, indptr, tokens):
    assert indices.dtype == indptr.dtype == torch.int32
    assert indices.is_contiguous()
    assert indptr.is_contiguous()
    assert tuple(indptr.shape) == (tokens + 1,)
    used = indices[: int(indptr[-1])]
    assert bool(((used >= 0) & (used < pool.shape[0])).all())


def run_pa_decode_sparse(
    q,
    unified_kv,
    kv_indices,
    kv_indptr,
    attn_sink,
    softmax_scale,
    has_invalid=True,
    extra_cache=None,
    extra_indices=None,
    extra_indptr=None,
    **rest,
):
    tokens, heads, _ = q.shape
    has(q, BF16, tokens, heads, 512)
    has(attn_sink, FP32, heads)
    pools = [(unified_kv, kv_indices, kv_indptr)]
    if extra_cache is not None:
        assert ARCHITECTURE[0] == "gfx950"
        assert unified_kv.dim() == 3
        pools.append((extra_cache, extra_indices, extra_indptr))
    sources = []
    for pool, indices, indptr in pools:
        listed(pool, indices, indptr, tokens)
        if pool.dim() == 3:
            assert ARCHITECTURE[0] == "gfx950"
            pool = pages(pool)
        else:
            assert pool.dtype == q.dtype
        sources.append((pool.float(), indices, indptr))
    return attended(q, attn_sink, softmax_scale, sources)


def pages(pool):
    """Rows [P, 512] of pages [B, N, C]: bfloat16, or 576 bytes a row and, after those of a page, 8 for each row's scales."""
    blocks, size, width = pool.shape
    if pool.dtype == BF16:
        return pool.flatten(0, 1)
    assert (pool.dtype, width) == (torch.uint8, 584)
    flat = pool.reshape(blocks, size * width)
    body = flat[:, : size * 576].view(blocks * size, 576)
    scales = flat[:, size * 576 :].view(blocks * size, 8)
    return fp8_ds_mla(512, 64).decode(torch.cat((body, scales), 1))


def run_pa_sparse_prefill_opus(
    q,
    unified_kv,
    kv_indices_prefix,
    kv_indptr_prefix,
    kv,
    kv_indices_extend,
    kv_indptr_extend,
    attn_sink,
    softmax_scale,
    **rest,
):
    tokens, heads, _ = q.shape
    has(q, BF16, tokens, heads, 512)
    assert ARCHITECTURE[0] == "gfx950"
    sources = []
    for pool, indices, indptr in (
        (unified_kv, kv_indices_prefix, kv_indptr_prefix),
        (kv, kv_indices_extend, kv_indptr_extend),
    ):
        assert pool.dim() == 2
        assert pool.dtype == BF16
        listed(pool, indices, indptr, tokens)
        sources.append((pool.float(), indices, indptr))
    return attended(q, attn_sink, softmax_scale, sources)


def run_gemm_a8w8_blockscale(XQ, WQ, x_scale, w_scale, dtype, **rest):
    rows, inputs = XQ.shape
    outputs = WQ.shape[0]
    fp8 = E4M3[ARCHITECTURE[0]]
    has(XQ, fp8, rows, inputs)
    has(WQ, fp8, outputs, inputs)
    has(x_scale, FP32, rows, inputs // 128)
    has(w_scale, FP32, outputs // 128, inputs // 128)
    assert dtype == BF16
    x = XQ.float() * x_scale.repeat_interleave(128, 1)
    return (x @ blocks(WQ, w_scale).T).to(dtype)


def blocks(codes, scale):
    whole = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return codes.float() * whole


def run_inverse_rope_group_quant(
    o, positions, cos_cache, sin_cache, num_groups, quant_group_size, **rest
):
    tokens, heads, dim = o.shape
    has(o, BF16, tokens, heads, dim)
    assert quant_group_size == 128
    layout = {k: v for k, v in rest.items() if k not in ("x_fp8", "x_scale")}
    assert layout in ({"scale_layout": "row"}, {"transpose_scale": False})
    x = turned(o, cos_cache, sin_cache, positions, -1).view(tokens, num_groups, -1)
    groups = x.unflatten(2, (-1, 128))
    amax = groups.abs().amax(-1).clamp(min=1e-10)
    exponent = (amax / 448).log2().ceil()
    codes = (groups / exponent.exp2().unsqueeze(-1)).to(torch.float8_e4m3fn)
    scale = (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
    return codes.flatten(2), scale


def run_batched_gemm_a8w8_mxscale(x, wo_a, x_scale, w_scale, dtype, **rest):
    tokens, groups, inputs = x.shape
    outputs = wo_a.shape[1]
    assert ARCHITECTURE[0] == "gfx950"
    has(x, torch.float8_e4m3fn, tokens, groups, inputs)
    has(wo_a, torch.float8_e4m3fn, groups, outputs, inputs)
    has(x_scale, torch.uint8, tokens, groups, inputs // 128)
    has(w_scale, torch.uint8, groups, outputs // 128, inputs // 128)
    xs, ws = (s.view(torch.float8_e8m0fnu).float() for s in (x_scale, w_scale))
    rows = x.float() * xs.repeat_interleave(128, 2)
    weights = torch.stack([blocks(w, s) for w, s in zip(wo_a, ws, strict=True)])
    return torch.einsum("tgk,gnk->tgn", rows, weights).to(dtype)


def untiled(tiled, of):
    """The inverse of a permutation of bytes [R, C]."""
    order = of(torch.arange(tiled.numel()).view(tiled.shape)).flatten()
    return (
        torch.empty_like(tiled)
        .view(-1)
        .index_copy_(0, order, tiled.flatten())
        .view(tiled.shape)
    )


def tiles_of_weights(x):
    """aiter's shuffle_weight of bytes, layout (16, 16), element by element."""
    rows, columns = x.shape
    out = torch.empty_like(x).view(-1)
    r, c = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    at = (
        (r // 16 * (columns // 32) + c // 32) * 512
        + c % 32 // 16 * 256
        + r % 16 * 16
        + c % 16
    )
    out[at.flatten()] = x.flatten()
    return out.view(rows, columns)


def tiles_of_scales(x):
    """aiter's shuffle_scale of bytes, element by element."""
    rows, columns = x.shape
    out = torch.empty_like(x).view(-1)
    r, c = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    at = (r // 32 * (columns // 8) + c // 8) * 256 + c % 4 * 64 + r % 16 * 4
    at = at + c % 8 // 4 * 2 + r % 32 // 16
    out[at.flatten()] = x.flatten()
    return out.view(rows, columns)


def run_fused_moe(
    hidden_states,
    w1,
    w2,
    topk_weight,
    topk_ids,
    quant_type,
    w1_scale,
    w2_scale,
    swiglu_limit,
    **rest,
):
    tokens, dim = hidden_states.shape
    many, _, half = w2.shape
    inner, k = 2 * half, topk_ids.shape[1]
    has(hidden_states, BF16, tokens, dim)
    has(w1, torch.float4_e2m1fn_x2, many, 2 * inner, dim // 2)
    has(w2, torch.float4_e2m1fn_x2, many, dim, inner // 2)
    assert w1.is_shuffled
    assert w2.is_shuffled
    has(w1_scale, torch.float8_e8m0fnu, many * 2 * inner, dim // 32)
    has(w2_scale, torch.float8_e8m0fnu, many * dim, inner // 32)
    has(topk_weight, FP32, tokens, k)
    has(topk_ids, torch.int32, tokens, k)
    assert bool(((topk_ids >= 0) & (topk_ids < many)).all())
    assert quant_type is QuantType.per_1x32

    def plain(codes, scale):
        bytes_ = untiled(codes.view(torch.uint8).flatten(0, 1), tiles_of_weights)
        exponents = untiled(scale.view(torch.uint8), tiles_of_scales)
        whole = mxfp4.dequantize(bytes_, exponents.view(torch.float8_e8m0fnu))
        return whole.view(many, -1, whole.shape[1])

    first, second = plain(w1, w1_scale), plain(w2, w2_scale)
    y = torch.zeros(tokens, dim)
    for t in range(tokens):
        for weight, e in zip(topk_weight[t], topk_ids[t], strict=True):
            gate, up = (first[e] @ hidden_states[t].float()).chunk(2)
            if swiglu_limit > 0:
                gate = gate.clamp(max=swiglu_limit)
                up = up.clamp(-swiglu_limit, swiglu_limit)
            y[t] += weight * (second[e] @ (F.silu(gate) * up))
    return y.to(BF16)
