"""The drafts of DeepSeek-V4 as the formulas say them: an oracle that shares nothing with `models/deepseek_v4`.

Slow loops in float64 over the tensors of a bf16 checkpoint; `plain_block` has the layers. T tokens, d hidden_size,
n hc_mult streams, V vocabulary.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from plain_block import (
    Config,
    Tensors,
    block,
    hyper_head,
    key_value,
    norm,
    unembed,
    weight,
)
from safetensors.torch import load_file


def read_checkpoint(directory: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """All tensors of a checkpoint, and its config."""
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(directory.glob("*.safetensors")):
        tensors.update(load_file(shard))
    return tensors, json.loads((directory / "config.json").read_text())


def dspark_context(
    tensors: Tensors, config: Config, taps: torch.Tensor
) -> torch.Tensor:
    """What the draft knows of the tokens before its block: c = main_norm(main_proj(taps)).

    Args:
        taps: [T, m·d]; side by side, for each of the m target layers of `dspark_target_layer_ids` in that order, the
            mean over the streams of the residual after the layer.

    Returns:
        [T, d] float64.
    """
    context = torch.empty(len(taps), config["hidden_size"], dtype=torch.float64)
    for row, tap in enumerate(taps.double()):
        projected = weight(tensors, "mtp.0.main_proj.weight") @ tap
        context[row] = norm(tensors, config, "mtp.0.main_norm.weight", projected)
    return context


def dspark_block(
    tensors: Tensors,
    config: Config,
    context: torch.Tensor,
    context_positions_first: int,
    anchor_token: int,
    k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The draft's backbone for one request: the slots [anchor, noise, …, noise] in one pass.

    The context ends at position P, the slots stand at P+1 … P+k. Every slot attends to the context at P−window+1 … P,
    as far as it has rows (the same keys for all of them), and to all k slots, later ones included. The context enters
    a stage as keys only: c goes through that stage's wkv, kv_norm and rotation, past hyper-connections and attn_norm.

    Args:
        context: [rows, d] of `dspark_context`; row i stands at position context_positions_first + i.
        context_positions_first: earlier positions have no row, and nobody attends to them.
        anchor_token: the last token that is certain; the context has no row of its own for it.
        k: slots, the anchor's included.

    Returns:
        hidden [k, d], the streams reduced but not normed; base logits U [k, V], without the Markov bias.
    """
    anchor_position = context_positions_first + len(context)
    ids = [anchor_token] + [config["dspark_noise_token_id"]] * (k - 1)
    positions = [anchor_position + slot for slot in range(k)]
    streams = [
        weight(tensors, "embed.weight", row=token).repeat(config["hc_mult"], 1)
        for token in ids
    ]
    stages = count_stages(tensors)
    for stage in range(stages):
        window = [
            key_value(tensors, config, f"mtp.{stage}.attn", c, position)
            for position, c in enumerate(context.double(), context_positions_first)
            if position >= anchor_position - config["sliding_window"]
        ]
        streams = block(
            tensors,
            config,
            f"mtp.{stage}",
            streams,
            positions,
            sees=lambda _: range(k),
            context=window,
        )
    hidden = [
        hyper_head(tensors, config, f"mtp.{stages - 1}.hc_head", R) for R in streams
    ]
    logits = [unembed(tensors, config, f"mtp.{stages - 1}", h) for h in hidden]
    return torch.stack(hidden), torch.stack(logits)


def dspark_sample_greedy(
    tensors: Tensors, config: Config, U: torch.Tensor, anchor_token: int
) -> tuple[list[int], torch.Tensor]:
    """Walk the slots: logits_k = U_k + W1[x_{k−1}] · W2ᵀ, x_k = argmax, among equals the lowest id; x_0 is the anchor.

    Args:
        U: [k, V], base logits of `dspark_block`.

    Returns:
        the k drafted ids; the biased logits [k, V].
    """
    head = f"mtp.{count_stages(tensors) - 1}.markov_head"
    previous, ids, biased = anchor_token, [], []
    for base in U.double():
        w1 = weight(tensors, f"{head}.markov_w1.weight", row=previous)
        logits = base + weight(tensors, f"{head}.markov_w2.weight") @ w1
        previous = int((logits == logits.max()).nonzero()[0])
        ids.append(previous)
        biased.append(logits)
    return ids, torch.stack(biased)


def dspark_confidence(
    tensors: Tensors, config: Config, hidden: torch.Tensor, previous_ids: Sequence[int]
) -> torch.Tensor:
    """The chance that the target accepts a draft, given that it accepts those before: σ(w · [h_k; W1[x_{k−1}]]).

    Args:
        hidden: [k, d] of `dspark_block`, before the norm.
        previous_ids: for each slot the token before its draft: the anchor, then the drafts but the last.

    Returns:
        [k] float64.

    Raises:
        KeyError: the checkpoint has no confidence head, which is optional.
    """
    last = f"mtp.{count_stages(tensors) - 1}"
    w = weight(tensors, f"{last}.confidence_head.proj.weight")[0]
    chances = []
    for h, previous in zip(hidden.double(), previous_ids, strict=True):
        w1 = weight(tensors, f"{last}.markov_head.markov_w1.weight", row=previous)
        chances.append(torch.sigmoid(w @ torch.cat((h, w1))))
    return torch.stack(chances)


def count_stages(tensors: Tensors) -> int:
    """How many different `mtp.{i}` there are."""
    return len({name.split(".")[1] for name in tensors if name.startswith("mtp.")})


def mtp_forward(
    tensors: Tensors,
    config: Config,
    streams: torch.Tensor,
    ids: Sequence[int] | torch.Tensor,
    positions: Sequence[int] | torch.Tensor,
) -> torch.Tensor:
    """The one draft layer over a request, from nothing cached: R = e_proj(enorm(embed(id))) + h_proj(hnorm(R_target)).

    The row at position t joins the target's streams at t with the token at t+1, rotates by t, and attends to the rows
    at t−window+1 … t. Its logits are about the token at t+2. hnorm norms each stream on its own, all with one weight.
    At position 0 the embedding counts as zero, as in vLLM (there, a mask before enorm; zero stays zero).

    A second draft needs nothing more: append the row (streams out at the last position, first draft, next position).
    Earlier rows do not change by it, since a row's key depends on nothing but the row.

    Args:
        streams: [T, n, d], the residual after the target's last layer, before it is reduced.
        ids: [T], the token after each.
        positions: [T], consecutive.

    Returns:
        [T, n, d] float64, the streams after the layer.
    """
    combined, places = [], [int(position) for position in positions]
    for R, token, position in zip(streams.double(), ids, places, strict=True):
        embedding = weight(tensors, "embed.weight", row=int(token))
        if position == 0:
            embedding = torch.zeros_like(embedding)
        x = norm(tensors, config, "mtp.0.enorm.weight", embedding)
        e = weight(tensors, "mtp.0.e_proj.weight") @ x
        rows = []
        for stream in R:
            x = norm(tensors, config, "mtp.0.hnorm.weight", stream)
            rows.append(e + weight(tensors, "mtp.0.h_proj.weight") @ x)
        combined.append(torch.stack(rows))
    window = config["sliding_window"]
    out = block(
        tensors,
        config,
        "mtp.0",
        combined,
        places,
        sees=lambda t: range(max(0, t - window + 1), t + 1),
    )
    return torch.stack(out)


def mtp_logits(tensors: Tensors, config: Config, streams: torch.Tensor) -> torch.Tensor:
    """[T, n, d] streams of `mtp_forward` to logits [T, V]: the draft's own hc_head and norm, the target's head."""
    logits = []
    for R in streams.double():
        h = hyper_head(tensors, config, "mtp.0.hc_head", R)
        logits.append(unembed(tensors, config, "mtp.0", h))
    return torch.stack(logits)
