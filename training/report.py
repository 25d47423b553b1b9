"""How the drafts do on held-out text: acceptance and calibration of the confidence head by position.

Computed over given text with caches left out of play; acceptance of what a server generates is `atom-vllm-bridge eval`'s to tell.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from atom_vllm_bridge.models.deepseek_v4.checkpoint import draft_stages
from training import corpus, losses, model
from training.corpus import ANSWER, PROSE
from training.dense import Dense
from training.layer import Trace

SEED, ROWS, ANCHORS = 1 << 60, 16, 128


@torch.no_grad()
def drafts(out: Path, size: int, device: str) -> dict[str, Any]:
    """By position 1 … `size`, on answers and on prose that no training text holds.

    Returns:
        "answer" and "prose" → chance of acceptance at temperature 1 and share of equal likeliest tokens, each given that the
        text so far is the target's, and the expected calibration error against either.
    """
    hf = model.config_of("dspark")
    target = losses.Target(
        model.frozen(model.restore("target", 0, device, out)),
        tuple(hf["dspark_target_layer_ids"]),
    )
    view = model.frozen(model.restore("dspark", 0, device, out))
    dense = Dense(model.dimensions(), model.LENGTH, device)
    made = corpus.rows(out / "tokenizer", SEED, ROWS, split="text")
    ids = torch.from_numpy(made.tokens.astype(np.int64)).to(device)
    kinds = torch.from_numpy(made.kinds).to(device)
    found: dict[str, Any] = {}
    for name, kind in (("answer", ANSWER), ("prose", PROSE)):
        # Blocks that lie within one kind of text.
        inside = (kinds == kind).unfold(1, size + 1, 1).all(-1).float()
        generator = torch.Generator(device).manual_seed(0)
        parts = []
        for row in range(ROWS):
            if (inside[row] > 0).sum() < ANCHORS:
                continue
            anchors = inside[row : row + 1, : model.LENGTH - size]
            parts.append(
                losses.draft_blocks(
                    dense,
                    view,
                    draft_stages(hf),
                    hf["dspark_noise_token_id"],
                    target,
                    ids[row : row + 1, :-1],
                    anchors.multinomial(ANCHORS, generator=generator),
                    size,
                    Trace(),
                )
            )
        accepted = torch.cat([part.accepted for part in parts])
        hit = torch.cat([part.hit for part in parts])
        told = torch.cat([part.confidence for part in parts]).sigmoid()
        found[name] = {
            "accepted at temperature 1": _rounded(accepted.flatten(0, 1).mean(0)),
            "equal likeliest tokens": _rounded(hit.float().flatten(0, 1).mean(0)),
            "calibration error": _rounded(losses.calibration(told, accepted)),
            "calibration error, greedy": _rounded(losses.calibration(told, hit)),
        }
    return found


def _rounded(values: torch.Tensor) -> list[float]:
    return [round(float(v), 4) for v in values]
