"""How the DSpark draft of a checkpoint does on held-out text: `python -m training.report DIR`.

Acceptance and calibration of the confidence head by position, over given text, with caches left out of play; acceptance of
what a server generates is `atom-vllm-bridge eval`'s to tell.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from safetensors.torch import load_file

from atom_vllm_bridge.checkpoint.schoolbook import FOLDER, reader
from atom_vllm_bridge.models.deepseek_v4.checkpoint import draft_stages, tensor_table
from training import corpus, losses, model
from training.corpus import ANSWER, INPUTS, PROSE
from training.dense import Dense
from training.layer import Trace
from training.weights import stacked

SEED, ANCHORS = 1 << 60, 128


@torch.no_grad()
def drafts(folder: Path, size: int, rows: int, device: str) -> dict[str, Any]:
    """By position 1 … `size`, on answers and on prose that no training text holds.

    Args:
        folder: a checkpoint with a DSpark draft and its tokenizer.
        size: tokens a block.
        rows: of 2,048 tokens.
        device: where.

    Returns:
        "answer" and "prose" → chance of acceptance at temperature 1 and share of equal likeliest tokens, each given that the
        text so far is the target's, and the expected calibration error against either.
    """
    hf = model.config_of("dspark")
    view = _view(folder, device)
    target = losses.Target(view, tuple(hf["dspark_target_layer_ids"]))
    dense = Dense(model.dimensions(), INPUTS, device)
    made = corpus.rows(folder, SEED, rows, split="text")
    ids = torch.from_numpy(made.tokens.astype(np.int64)).to(device)
    kinds = torch.from_numpy(made.kinds).to(device)
    found: dict[str, Any] = {}
    for name, kind in (("answer", ANSWER), ("prose", PROSE)):
        # Blocks that lie within one kind of text.
        inside = (kinds == kind).unfold(1, size + 1, 1).all(-1).float()
        generator = torch.Generator(device).manual_seed(0)
        parts = []
        for row in range(rows):
            if (inside[row] > 0).sum() < ANCHORS:
                continue
            anchors = inside[row : row + 1, : INPUTS - size]
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


def _view(folder: Path, device: str) -> dict[str, torch.Tensor]:
    """The values of a published checkpoint, as a forward takes them."""
    stored: dict[str, torch.Tensor] = {}
    for shard in sorted(folder.glob("model-*.safetensors")):
        stored |= load_file(shard)
    read = reader(stored)
    # A shard's own order puts expert 10 before expert 2.
    names = tensor_table(model.config_of("dspark"), "bf16")
    values = stacked({name: read(name) for name in names})
    return {name: value.to(device) for name, value in values.items()}


def main(
    folder: Annotated[Path, typer.Argument(help="A checkpoint.")] = FOLDER,
    rows: Annotated[int, typer.Option(help="Of 2,048 tokens.")] = 16,
    device: Annotated[str, typer.Option()] = "cpu",
) -> None:
    """Print the figures for K = 5 and 7."""
    for size in (5, 7):
        print(json.dumps({f"K = {size}": drafts(folder, size, rows, device)}, indent=1))


if __name__ == "__main__":
    typer.run(main)
