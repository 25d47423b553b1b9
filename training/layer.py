"""The pieces of a decoder layer, differentiable, which the target and both drafts are built of.

The formulas are those of atom_vllm_bridge/models/ops/torch, whose files name their sources.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from atom_vllm_bridge.models.deepseek_v4.config import (
    HASH_MOE,
    MOE,
    DeepseekV4Config,
)
from atom_vllm_bridge.models.deepseek_v4.rope import frequencies

Tensors = Mapping[str, torch.Tensor]


@dataclass
class Trace:
    """What a forward leaves beside its result.

    Attributes:
        index_losses: one a CSA layer.
        loads: name of a gate's bias → [E] fraction of choices that fell on each expert.
        select: let CSA layers attend only to what their indexers select, as they do when they serve.
    """

    select: bool = True
    index_losses: list[torch.Tensor] = field(default_factory=list)
    loads: dict[str, torch.Tensor] = field(default_factory=dict)


class Layer:
    """The weights of one layer or draft stage, by their names below `prefix`."""

    def __init__(self, tensors: Tensors, prefix: str) -> None:
        self.tensors, self.prefix = tensors, prefix

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[self.prefix + name]

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self[f"{name}.weight"])

    def below(self, prefix: str) -> "Layer":
        return Layer(self.tensors, self.prefix + prefix)


def rms(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x / √(mean(x²) + ε) · weight in float32."""
    x = x.float()
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def turns(
    config: DeepseekV4Config, positions: torch.Tensor, *, compressed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [..., P] of the rotation at `positions` [...]."""
    theta = frequencies(config, compressed=compressed).to(positions.device)
    angle = positions.unsqueeze(-1).float() * theta
    return angle.cos(), angle.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the interleaved pairs at the end of the last axis; cos and sin broadcast."""
    width = 2 * cos.shape[-1]
    head, tail = x[..., :-width], x[..., -width:]
    even, odd = tail[..., 0::2], tail[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1)
    return torch.cat((head, turned.flatten(-2)), -1)


def read(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm: torch.Tensor,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hyper-connection read (ops/torch/hc_pre.py): streams [N, n, d] → normed y [N, d], post [N, n], comb [N, n, n]."""
    n = streams.shape[1]
    flat = streams.flatten(1)
    inverse = torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    mix = F.linear(flat, fn) * inverse
    pre = torch.sigmoid(mix[:, :n] * scale[0] + base[:n]) + eps
    post = 2 * torch.sigmoid(mix[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    comb = (mix[:, 2 * n :] * scale[2] + base[2 * n :]).view(-1, n, n)
    comb = comb.softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    y = (pre.unsqueeze(-1) * streams).sum(1)
    return rms(y, norm, norm_eps), post, comb


def write(
    x: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """Hyper-connection write (ops/torch/hc_post.py): x [N, d] into streams [N, n, d]."""
    mixed = (comb.unsqueeze(-1) * streams.unsqueeze(2)).sum(1)
    return mixed + post.unsqueeze(-1) * x.float().unsqueeze(1)


def collapse(
    layer: Layer, streams: torch.Tensor, config: DeepseekV4Config
) -> torch.Tensor:
    """Hyper-connection head (ops/torch/hc_head.py): [..., n, d] → [..., d]."""
    flat = streams.flatten(-2)
    inverse = torch.rsqrt(flat.square().mean(-1, keepdim=True) + config.rms_norm_eps)
    mix = F.linear(flat, layer["hc_head_fn"]) * inverse
    pre = torch.sigmoid(mix * layer["hc_head_scale"] + layer["hc_head_base"])
    return ((pre + config.hc_eps).unsqueeze(-1) * streams).sum(-2)


def swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def gated(
    gate: torch.Tensor, up: torch.Tensor, weights: torch.Tensor, limit: float
) -> torch.Tensor:
    """All experts' hidden values [N, E · I], each expert's weighted by `weights` [N, E]."""
    hidden = swiglu(gate.float(), up.float(), limit)
    hidden = hidden.unflatten(-1, (weights.shape[-1], -1)) * weights.unsqueeze(-1)
    return hidden.flatten(1).to(gate.dtype)


def heads(
    query: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float
) -> torch.Tensor:
    """Queries [..., H, D] normed without weight and rotated."""
    return rotate(rms(query, None, eps), cos, sin).to(query.dtype)


def weigh(
    near: torch.Tensor,
    outside: torch.Tensor,
    far: torch.Tensor | None,
    unseen: torch.Tensor | None,
    sink: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Softmax over raw keys, entries and the sink: scores [B, b, H, w, K] and [B, b, H, w, E] → weights in their dtype.

    `outside` [b, w, K] and `unseen` [B or 1, b, w, E] hide; `sink` is [H].
    """
    logits = (near.float() * scale).masked_fill(outside[:, None], -torch.inf)
    extra = sink.view(-1, 1, 1)
    if far is None or unseen is None:
        top = torch.maximum(logits.amax(-1, keepdim=True), extra).detach()
        near_weights = (logits - top).exp()
        total = near_weights.sum(-1, keepdim=True) + (extra - top).exp()
        return (near_weights / total).to(near.dtype), None
    beyond = (far.float() * scale).masked_fill(unseen.unsqueeze(2), -torch.inf)
    top = torch.maximum(logits.amax(-1, keepdim=True), beyond.amax(-1, keepdim=True))
    top = torch.maximum(top, extra).detach()
    near_weights, far_weights = (logits - top).exp(), (beyond - top).exp()
    total = near_weights.sum(-1, keepdim=True) + far_weights.sum(-1, keepdim=True)
    total = total + (extra - top).exp()
    return (near_weights / total).to(near.dtype), (far_weights / total).to(far.dtype)


class Fused:
    """What a forward's pieces share: the dimensions, and the functions that `compile` fuses."""

    def __init__(self, config: DeepseekV4Config) -> None:
        self.config = config
        self.read: Callable[..., Any] = read
        self.write: Callable[..., Any] = write
        self.gated: Callable[..., Any] = gated
        self.heads: Callable[..., Any] = heads
        self.weigh: Callable[..., Any] = weigh

    def compile(self) -> None:
        """Fuse what only moves memory; the rest is matrix products."""
        for name in ("read", "write", "gated", "heads", "weigh"):
            setattr(self, name, torch.compile(getattr(self, name), dynamic=False))


def feed_forward(
    fused: Fused,
    layer: Layer,
    x: torch.Tensor,
    ids: torch.Tensor,
    mlp_type: str,
    trace: Trace,
) -> torch.Tensor:
    """Mixture of experts: x [N, d], ids [N] → [N, d]. Every expert sees every token; what the router did not choose weighs nothing."""
    config = fused.config
    with torch.autocast(x.device.type, enabled=False):
        scores = F.softplus(F.linear(x.float(), layer["gate.weight"])).sqrt()
        if mlp_type == HASH_MOE:
            chosen = layer["gate.tid2eid"][ids]
        else:
            biased = scores.detach() + layer["gate.bias"]
            chosen = biased.topk(config.num_experts_per_tok, -1).indices
        mask = torch.zeros_like(scores).scatter_(1, chosen, 1.0)
        weights = scores * mask
        scale = config.routed_scaling_factor / (weights.sum(-1, keepdim=True) + 1e-20)
        weights = weights * scale
        if mlp_type == MOE:
            trace.loads[layer.prefix + "gate.bias"] = mask.mean(0).detach()
    w1, w3 = layer["experts.w1"], layer["experts.w3"]
    gate = F.linear(x, w1.flatten(0, 1))
    up = F.linear(x, w3.flatten(0, 1))
    hidden = fused.gated(gate, up, weights, config.swiglu_limit)
    y = F.linear(hidden, layer["experts.w2"].transpose(0, 1).flatten(1))
    shared = layer.below("shared_experts.")
    gate, up = shared.linear(x, "w1"), shared.linear(x, "w3")
    return y + shared.linear(swiglu(gate, up, config.swiglu_limit), "w2")


def hyper_connected(
    fused: Fused,
    layer: Layer,
    streams: torch.Tensor,
    ids: torch.Tensor,
    mlp_type: str,
    trace: Trace,
    attend: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """One decoder layer around `attend`: [B, T, n, d] → [B, T, n, d]."""
    config, shape = fused.config, streams.shape
    numbers = (config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps)
    streams = streams.flatten(0, 1)

    def around(part: str, inner: Callable[[torch.Tensor], torch.Tensor]) -> None:
        nonlocal streams
        hc = [layer[f"hc_{part}_{name}"] for name in ("fn", "base", "scale")]
        with torch.autocast(streams.device.type, enabled=False):
            x, post, comb = fused.read(
                streams, *hc, layer[f"{part}_norm.weight"], *numbers
            )
        y = inner(x)
        with torch.autocast(streams.device.type, enabled=False):
            streams = fused.write(y, streams, post, comb)

    around("attn", lambda x: attend(x.view(*shape[:2], -1)).flatten(0, 1))
    ffn = layer.below("ffn.")
    flat = ids.flatten()
    around("ffn", lambda x: feed_forward(fused, ffn, x, flat, mlp_type, trace))
    return streams.view(shape)


def queries(
    fused: Fused,
    layer: Layer,
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., d] → the normed low-rank row [..., rank] and rotated queries [..., H, D]."""
    config, eps = fused.config, fused.config.rms_norm_eps
    low = rms(layer.linear(x, "wq_a"), layer["q_norm.weight"], eps)
    query = layer.linear(low, "wq_b").unflatten(-1, (config.num_attention_heads, -1))
    return low, fused.heads(query, cos, sin, eps)


def raw_keys(layer: Layer, x: torch.Tensor, config: DeepseekV4Config) -> torch.Tensor:
    """x [..., d] → keys [..., D], normed, not rotated."""
    return rms(layer.linear(x, "wkv"), layer["kv_norm.weight"], config.rms_norm_eps)


def project(
    layer: Layer,
    o: torch.Tensor,
    config: DeepseekV4Config,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> torch.Tensor:
    """Attention's output [B, T, H, D] turned back at positions [T] and projected to [B, T, d]."""
    o = rotate(o, cos.unsqueeze(-2), -sin.unsqueeze(-2))
    grouped = o.flatten(-2).unflatten(-1, (config.o_groups, -1))
    wo_a = layer["wo_a.weight"].unflatten(0, (config.o_groups, -1))
    low = torch.einsum("...gi,gri->...gr", grouped, wo_a)
    return layer.linear(low.flatten(-2), "wo_b")
