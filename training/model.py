"""What is trained: the dimensions of `schoolbook`, and the files in which its weights go from phase to phase."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from atom_vllm_bridge.checkpoint.presets import build_config
from atom_vllm_bridge.models.deepseek_v4.config import DeepseekV4Config
from training.weights import Weights

PARTS = {"target": "", "dspark": "mtp.", "mtp": "mtp."}
"""Part → what the names of its tensors begin with."""

FINISHED = {"target": "target-2", "dspark": "dspark", "mtp": "mtp"}
"""Part → the phase that finishes it, and so the file that holds it."""


def config_of(part: str) -> dict[str, Any]:
    """The content of config.json of the target with one draft, "dspark" or "mtp" (for "target" too: with DSpark)."""
    return build_config("schoolbook", draft="mtp" if part == "mtp" else "dspark")


def dimensions() -> DeepseekV4Config:
    return DeepseekV4Config.from_hf(config_of("target"))


def new(part: str, seed: int, device: str) -> Weights:
    """Weights to start training from."""
    return Weights(config_of(part), PARTS[part], seed, device)


def save(weights: Weights, phase: str, out: Path, target: str = "") -> None:
    """Write what a phase trained; `target`: the `digest` of the target that it is for."""
    out.mkdir(parents=True, exist_ok=True)
    metadata = {"target": target} if target else None
    save_file(weights.state(), out / f"{phase}.safetensors", metadata)


def saved(phase: str, out: Path) -> dict[str, torch.Tensor]:
    """The leaves that a phase trained.

    Raises:
        FileNotFoundError: it was not run.
    """
    return load_file(_file(phase, out))


def restore(
    part: str, seed: int, device: str, out: Path, phase: str | None = None
) -> Weights:
    """Weights of a part as a phase left them, by default the one that finishes it; raises as `saved`."""
    state = saved(phase or FINISHED[part], out)
    weights = new(part, seed, device)
    weights.restore(state)
    return weights


def digest(phase: str, out: Path) -> str:
    """SHA-256 of what a phase saved; raises as `saved`."""
    return hashlib.sha256(_file(phase, out).read_bytes()).hexdigest()


def target_of(phase: str, out: Path) -> str:
    """The digest of the target for which a phase trained a draft; raises as `saved`."""
    with safe_open(_file(phase, out), "pt") as file:
        return (file.metadata() or {}).get("target", "")


def _file(phase: str, out: Path) -> Path:
    path = out / f"{phase}.safetensors"
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: run the phase {phase} first")
    return path


def frozen(weights: Weights) -> dict[str, torch.Tensor]:
    """The values that will be served, without gradients."""
    with torch.no_grad():
        view = weights.view(rounded=True)
    return {name: tensor.detach() for name, tensor in view.items()}
