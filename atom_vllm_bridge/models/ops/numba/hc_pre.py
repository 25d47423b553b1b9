"""ops/torch/hc_pre.py in one call."""

import numpy as np
import torch

from atom_vllm_bridge.models.ops.gradients import trained
from atom_vllm_bridge.models.ops.numba.dots import dots
from atom_vllm_bridge.models.ops.numba.exponential import exponential
from atom_vllm_bridge.models.ops.numba.few import MOST, compiled, few
from atom_vllm_bridge.models.ops.numba.rms_norm import NO_WEIGHT, norm_rows
from atom_vllm_bridge.models.ops.numba.team import array
from atom_vllm_bridge.models.ops.torch import hc_pre as reference


@compiled(fastmath={"contract", "reassoc", "arcp", "nsz"})
def _hc_pre(z, fn, base, scale, iterations, eps, norm_eps, weight, y, post, comb):
    tokens, n, d = z.shape
    one, two, eps = np.float32(1), np.float32(2), np.float32(eps)
    flat = z.reshape(tokens, n * d)
    mixes = np.empty((tokens, fn.shape[0]), np.float32)
    dots(flat, fn, mixes)
    for t in range(tokens):
        square = np.float32(0)
        for c in range(n * d):
            square += flat[t, c] * flat[t, c]
        inverse = one / np.sqrt(square / np.float32(n * d) + np.float32(norm_eps))
        mix = mixes[t]
        for m in range(mix.size):
            mix[m] *= inverse
        y[t] = 0
        for i in range(n):
            pre = one / (one + exponential(-(mix[i] * scale[0] + base[i]))) + eps
            for c in range(d):
                y[t, c] += pre * z[t, i, c]
            gate = mix[n + i] * scale[1] + base[n + i]
            post[t, i] = two / (one + exponential(-gate))
        if weight.size:
            norm_rows(y[t : t + 1], weight, norm_eps, y[t : t + 1])
        c_ = comb[t]
        for i in range(n):
            most = np.float32(-np.inf)
            for j in range(n):
                at = 2 * n + i * n + j
                c_[i, j] = mix[at] * scale[2] + base[at]
                most = max(most, c_[i, j])
            total = np.float32(0)
            for j in range(n):
                c_[i, j] = exponential(c_[i, j] - most)
                total += c_[i, j]
            for j in range(n):
                c_[i, j] = c_[i, j] / total + eps
        for step in range(iterations):
            if step:
                for i in range(n):
                    total = eps
                    for j in range(n):
                        total += c_[i, j]
                    for j in range(n):
                        c_[i, j] /= total
            for j in range(n):
                total = eps
                for i in range(n):
                    total += c_[i, j]
                for i in range(n):
                    c_[i, j] /= total


@compiled()
def read_some(words, at):
    """`hc_pre` with a weight, of the tokens `at`, for whoever forks with such words: after the counter and the number of chunks, tokens, n, d, iterations, then addresses."""
    tokens, n, d, iterations = words[2], words[3], words[4], words[5]
    mixes = (2 + n) * n
    z = array(words[6], (tokens, n, d), np.float32)
    fn = array(words[7], (mixes, n * d), np.float32)
    base = array(words[8], (mixes,), np.float32)
    scale = array(words[9], (3,), np.float32)
    eps = array(words[10], (2,), np.float64)
    weight = array(words[11], (d,), np.float32)
    y = array(words[12], (tokens, d), np.float32)
    post = array(words[13], (tokens, n), np.float32)
    comb = array(words[14], (tokens, n, n), np.float32)
    _hc_pre(
        z[at],
        fn,
        base,
        scale,
        iterations,
        eps[0],
        eps[1],
        weight,
        y[at],
        post[at],
        comb[at],
    )


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
    refused = streams.numel() > MOST or trained(fn, base, scale, weight)
    if refused or not few(z := streams.float()):
        return reference.hc_pre(
            streams, fn, base, scale, iterations, eps, norm_eps, weight
        )
    tokens, n, d = z.shape
    y, post, comb = (
        z.new_empty(tokens, d),
        z.new_empty(tokens, n),
        z.new_empty(tokens, n, n),
    )
    _hc_pre(
        z.numpy(),
        fn.numpy(),
        base.numpy(),
        scale.numpy(),
        iterations,
        eps,
        norm_eps,
        NO_WEIGHT if weight is None else weight.numpy(),
        y.numpy(),
        post.numpy(),
        comb.numpy(),
    )
    return y.to(streams.dtype), post, comb
