"""ops/torch/hc_pre.py in two kernels, whatever the number of tokens.

The first projects the flattened streams and sums their squares (split_projection). In the second a token has two programs side
by side: one makes the read weights, collapses the streams and norms the result; the other makes the write weights, with
Sinkhorn's iterations in registers. Nothing but the partial sums goes through memory in between.
"""

import torch
import triton
import triton.language as tl

from atom_vllm_bridge.models.ops.gradients import trained
from atom_vllm_bridge.models.ops.torch import hc_pre as reference
from atom_vllm_bridge.models.ops.triton.split_projection import split_projection

SPLITS = 128


@triton.jit
def _write_weights(
    rows,
    live,
    inverse,
    base,
    scale,
    post,
    comb,
    iterations,
    eps,
    N: tl.constexpr,
    STREAMS: tl.constexpr,
):
    """One token's post [N] and comb [N, N]; `rows` [SPLITS] point at its partial sums."""
    i = tl.arange(0, STREAMS)
    mask = live[:, None] & (i < N)[None, :]
    mix = tl.sum(tl.load(rows[:, None] + N + i[None, :], mask=mask, other=0.0), 0)
    shift = tl.load(base + N + i, mask=i < N, other=0.0)
    gate = tl.sigmoid(mix * inverse * tl.load(scale + 1) + shift)
    tl.store(post + i, 2.0 * gate, mask=i < N)

    place = i[:, None] * N + i[None, :]
    inside = (i < N)[:, None] & (i < N)[None, :]
    mix2 = tl.load(
        rows[:, None, None] + 2 * N + place[None, :, :],
        mask=live[:, None, None] & inside[None, :, :],
        other=0.0,
    )
    shift2 = tl.load(base + 2 * N + place, mask=inside, other=0.0)
    logit = tl.sum(mix2, 0) * inverse * tl.load(scale + 2) + shift2
    logit = tl.where((i < N)[None, :], logit, float("-inf"))
    c = tl.exp(logit - tl.max(logit, 1)[:, None])
    c = tl.where(inside, c / tl.sum(c, 1)[:, None] + eps, 0.0)
    c = c / (tl.sum(c, 0)[None, :] + eps)
    for _ in range(iterations - 1):
        c = c / (tl.sum(c, 1)[:, None] + eps)
        c = c / (tl.sum(c, 0)[None, :] + eps)
    tl.store(comb + place, c, mask=inside)


@triton.jit(do_not_specialize=["splits"])
def collapse(
    streams,
    partials,
    base,
    scale,
    weight,
    y,
    post,
    comb,
    dim,
    outputs,
    width,
    splits,
    iterations,
    eps,
    norm_eps,
    N: tl.constexpr,
    STREAMS: tl.constexpr,
    WRITES: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The second kernel, over (T, 2); or (T, 1) without the write weights, which are then not made."""
    token = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    live = split < splits
    rows = partials + (token * splits + split) * width
    square = tl.sum(tl.load(rows + outputs, mask=live, other=0.0), 0)
    inverse = tl.rsqrt(square / (N * dim) + norm_eps)
    if WRITES and tl.program_id(1) == 1:
        _write_weights(
            rows,
            live,
            inverse,
            base,
            scale,
            post + token * N,
            comb + token * N * N,
            iterations,
            eps,
            N,
            STREAMS,
        )
        return
    i = tl.arange(0, STREAMS)
    column = tl.arange(0, BLOCK)
    inside = column < dim
    z = tl.load(
        streams + token * N * dim + i[:, None] * dim + column[None, :],
        mask=(i < N)[:, None] & inside[None, :],
        other=0.0,
    )
    mask = live[:, None] & (i < N)[None, :]
    mix = tl.sum(tl.load(rows[:, None] + i[None, :], mask=mask, other=0.0), 0)
    shift = tl.load(base + i, mask=i < N, other=0.0)
    pre = tl.sigmoid(mix * inverse * tl.load(scale) + shift) + eps
    value = tl.sum(pre[:, None] * z.to(tl.float32), 0)
    if WEIGHTED:
        # Rounded as the collapsed streams are, before their norm.
        value = value.to(y.dtype.element_ty).to(tl.float32)
        value = value * tl.rsqrt(tl.sum(value * value, 0) / dim + norm_eps)
        value = value * tl.load(weight + column, mask=inside, other=0.0)
    tl.store(y + token * dim + column, value.to(y.dtype.element_ty), mask=inside)


def warps(elements: int) -> int:
    """Warps of a program that holds `elements` values."""
    return 4 if elements <= 4096 else 8 if elements <= 16384 else 16


def hc_pre(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    iterations: int,
    eps: float,
    norm_eps: float,
    weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if trained(streams, fn, base, scale, weight):
        return reference.hc_pre(
            streams, fn, base, scale, iterations, eps, norm_eps, weight
        )
    tokens, n, dim = streams.shape
    streams = streams.contiguous()
    fp32 = {"dtype": torch.float32, "device": streams.device}
    y = torch.empty((tokens, dim), dtype=streams.dtype, device=streams.device)
    post, comb = torch.empty((tokens, n), **fp32), torch.empty((tokens, n, n), **fp32)
    if not tokens:
        return y, post, comb
    partials = split_projection(streams.view(tokens, -1), fn, True, SPLITS)
    block, streams_ = triton.next_power_of_2(dim), triton.next_power_of_2(n)
    collapse[(tokens, 2)](
        streams,
        partials.sums,
        base,
        scale,
        y if weight is None else weight,
        y,
        post,
        comb,
        dim,
        fn.shape[0],
        partials.width,
        partials.splits,
        iterations,
        eps,
        norm_eps,
        N=n,
        STREAMS=streams_,
        WRITES=True,
        WEIGHTED=weight is not None,
        SPLITS=SPLITS,
        BLOCK=block,
        num_warps=warps(streams_ * block),
    )
    return y, post, comb
