"""Decoder layers, one after another: attention, then mixture of experts, each read from and written to the residual streams."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Layer(Protocol):
    """The parts of a decoder layer; `Block` (models/deepseek_v4/model.py) is one."""

    hc_attn: Any
    attn_norm: torch.Tensor
    attn: Any
    hc_ffn: Any
    ffn_norm: torch.Tensor
    ffn: Any


def decoder_layers(
    layers: Sequence[Layer],
    streams: torch.Tensor,
    input_ids: torch.Tensor,
    plan: Any,
    state: Sequence[Any],
) -> torch.Tensor:
    """Run layers; their parts run the ops that they were built with.

    Args:
        layers: their parts, with the weights.
        streams: [T, n, d].
        input_ids: [T] int64, none negative.
        plan: the step (`Plan`, models/deepseek_v4/plan.py).
        state: the caches of each (`LayerState`, models/deepseek_v4/state.py), which get this step's rows.

    Returns:
        [T, n, d].
    """
    for layer, caches in zip(layers, state, strict=True):
        x, post, comb = layer.hc_attn.read(streams, layer.attn_norm)
        x = layer.attn(x, plan, caches)
        streams = layer.hc_attn.write(x, streams, post, comb)
        x, post, comb = layer.hc_ffn.read(streams, layer.ffn_norm)
        x = layer.ffn(x, input_ids)
        streams = layer.hc_ffn.write(x, streams, post, comb)
    return streams
