"""The two drafts over whole rows, differentiable: training twins of models/deepseek_v4/{dspark,mtp}.py."""

from functools import partial

import torch
import torch.nn.functional as F

from atom_vllm_bridge.models.deepseek_v4.config import MOE, SLIDING, DeepseekV4Config
from training.dense import Dense
from training.layer import (
    Layer,
    Tensors,
    Trace,
    collapse,
    hyper_connected,
    project,
    queries,
    raw_keys,
    rms,
    rotate,
    turns,
)


def context_rows(
    tensors: Tensors, taps: list[torch.Tensor], eps: float
) -> torch.Tensor:
    """Taps [B, T, d] each → context rows [B, T, d]."""
    first = Layer(tensors, "mtp.0.")
    mixed = first.linear(torch.cat(taps, -1), "main_proj")
    return rms(mixed, first["main_norm.weight"], eps)


def dspark_blocks(
    dense: Dense,
    tensors: Tensors,
    stages: int,
    context: torch.Tensor,
    anchors: torch.Tensor,
    embedded: torch.Tensor,
    trace: Trace,
) -> torch.Tensor:
    """Run the stages over blocks that begin at `anchors`.

    Args:
        dense: dimensions and fused parts.
        tensors: the draft's.
        stages: how many.
        context: [B, T, d], from `context_rows`.
        anchors: [B, A] int64, position of the first token of each block.
        embedded: [B, A, K, d], of that token and of noise after it.
        trace: gets the experts' loads.

    Returns:
        [B, A, K, d], collapsed, before the norm; row k predicts the token at anchor + k + 1.
    """
    config, window = dense.config, dense.config.sliding_window
    rows, count, size, width = embedded.shape
    device = embedded.device
    at = anchors.unsqueeze(-1) + torch.arange(size, device=device)
    cos, sin = turns(config, at, compressed=False)
    before = anchors.unsqueeze(-1) - window + torch.arange(window, device=device)
    missing = F.pad(before < 0, (0, size))[:, :, None, None]
    which = before.clamp(min=0).flatten(1)
    all_cos, all_sin = dense.turns[SLIDING]

    def attend(layer: Layer, x: torch.Tensor) -> torch.Tensor:
        x = x.view(rows, count, size, width)
        _, query = queries(dense, layer, x, cos.unsqueeze(-2), sin.unsqueeze(-2))
        own = rotate(raw_keys(layer, x, config), cos, sin)
        keys = rotate(raw_keys(layer, context, config), all_cos, all_sin)
        keys = keys.to(query.dtype)
        index = which.unsqueeze(-1).expand(-1, -1, keys.shape[-1])
        near = keys.gather(1, index).unflatten(1, (count, window))
        near = torch.cat((near, own.to(near.dtype)), 2)
        query = query.transpose(2, 3).flatten(2, 3)
        scores = torch.matmul(query, near.transpose(2, 3)).float()
        scores = (scores * config.head_dim**-0.5).unflatten(2, (-1, size))
        scores = scores.masked_fill(missing, -torch.inf)
        sink = layer["attn_sink"].view(-1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
        o = torch.matmul(weights.flatten(2, 3).to(near.dtype), near).float()
        o = o.unflatten(2, (-1, size)).transpose(2, 3)
        return project(layer, o, config, cos, sin).flatten(1, 2)

    streams = embedded.flatten(1, 2).unsqueeze(2)
    streams = streams.expand(-1, -1, config.hc_mult, -1)
    ids = torch.zeros(streams.shape[:2], dtype=torch.int64, device=device)
    for stage in range(stages):
        layer = Layer(tensors, f"mtp.{stage}.")
        inner = layer.below("attn.")
        streams = hyper_connected(
            dense, layer, streams, ids, MOE, trace, partial(attend, inner)
        )
    last = Layer(tensors, f"mtp.{stages - 1}.")
    return collapse(last, streams, config).unflatten(1, (count, size))


def mtp_step(
    dense: Dense,
    tensors: Tensors,
    embedded: torch.Tensor,
    streams: torch.Tensor,
    trace: Trace,
) -> torch.Tensor:
    """One step of multi-token prediction at every position.

    Args:
        embedded: [B, T, d], of the token after each position.
        streams: [B, T, n, d], of the target, or of the step before.

    Returns:
        [B, T, n, d], not reduced.
    """
    eps, layer = dense.config.rms_norm_eps, Layer(tensors, "mtp.0.")
    first = torch.arange(embedded.shape[1], device=embedded.device) == 0
    embedded = embedded.masked_fill(first.unsqueeze(-1), 0.0)
    token = layer.linear(rms(embedded, layer["enorm.weight"], eps), "e_proj")
    mixed = layer.linear(rms(streams, layer["hnorm.weight"], eps), "h_proj")
    mixed = (mixed + token.unsqueeze(2)).float()
    ids = torch.zeros(mixed.shape[:2], dtype=torch.int64, device=mixed.device)
    return dense.block(layer, mixed, ids, SLIDING, MOE, trace)


def mtp_hidden(
    config: DeepseekV4Config, tensors: Tensors, streams: torch.Tensor
) -> torch.Tensor:
    """[..., n, d] → what the target's output head takes [..., d]."""
    layer = Layer(tensors, "mtp.0.")
    return rms(
        collapse(layer, streams, config), layer["norm.weight"], config.rms_norm_eps
    )
