"""What is trained: the dimensions of `schoolbook`, and the files in which its weights go from phase to phase."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from atom_vllm_bridge.checkpoint.presets import build_config
from atom_vllm_bridge.models.deepseek_v4.config import DeepseekV4Config
from training.weights import Weights

LENGTH = 2048
"""Tokens a row."""

PARTS = {"target": "", "dspark": "mtp.", "mtp": "mtp."}


def config_of(part: str) -> dict[str, Any]:
    """The content of config.json of the target with one draft, "dspark" or "mtp" (for "target" too: with DSpark)."""
    return build_config("schoolbook", draft="mtp" if part == "mtp" else "dspark")


def dimensions() -> DeepseekV4Config:
    return DeepseekV4Config.from_hf(config_of("target"))


def new(part: str, seed: int, device: str) -> Weights:
    """Weights to start training from."""
    return Weights(config_of(part), PARTS[part], seed, device)


def save(weights: Weights, part: str, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    save_file(weights.state(), out / f"{part}.safetensors")


def saved(part: str, out: Path) -> dict[str, torch.Tensor]:
    """The leaves of a part that was trained before.

    Raises:
        FileNotFoundError: it was not.
    """
    path = out / f"{part}.safetensors"
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is missing: run the phase that trains the {part} first"
        )
    return load_file(path)


def restore(part: str, seed: int, device: str, out: Path) -> Weights:
    """Weights that hold `saved`, which raises FileNotFoundError."""
    state = saved(part, out)
    weights = new(part, seed, device)
    weights.restore(state)
    return weights


def frozen(weights: Weights) -> dict[str, torch.Tensor]:
    """The values that will be served, without gradients."""
    with torch.no_grad():
        view = weights.view(rounded=True)
    return {name: tensor.detach() for name, tensor in view.items()}
