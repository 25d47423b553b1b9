"""Random weights: the value of a tensor depends on its name and the seed, nothing else.

Values come from uniform noise scaled so that activations neither grow nor die: a matrix
has standard deviation gain / √fan_in. The maps that write into the residual stream
(`wo_b`, `w2`) have a smaller gain, because the routing of a random model is full of near
ties: of 600 tokens on the tiny preset, bfloat16 alone changes the likeliest next token for
10 % at gain 1, 3 % at 0.25 and 2 % at 0.15.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

GAINS: dict[str, float] = {"wo_b": 0.15, "w2": 0.15}
"""Gain by the end of a name, without `.weight`; the longest match wins, else 1."""


def draw(
    name: str,
    shape: tuple[int, ...],
    config: Mapping[str, Any],
    gains: Mapping[str, float],
    seed: int,
) -> torch.Tensor:
    """The unquantised values of one tensor.

    Args:
        name: its name in the checkpoint.
        shape: its logical shape.
        config: for the number of experts.
        gains: factors by the end of a name, such as {"w1": 8.0, "shared_experts.w2": 1.0}.
        seed: of the whole checkpoint.

    Returns:
        float32 of `shape`; int64 for a routing table.
    """
    generator = torch.Generator().manual_seed(_seed(name, seed))
    if name.endswith(".tid2eid"):
        return _routing_table(shape, config["n_routed_experts"], generator)
    # Uniform, not normal: whole numbers times one factor are the same on every CPU.
    noise = torch.rand(shape, generator=generator).sub_(0.5).mul_(12**0.5)
    gain = gain_of(name, gains)
    leaf = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if leaf.endswith("norm"):
        return noise.mul_(0.1 * gain).add_(1.0)
    if leaf.startswith("hc_") and leaf.endswith("_scale"):
        return noise.mul_(0.1 * gain).add_(1.0)
    if leaf.startswith("hc_") and leaf.endswith("_base"):
        return noise.mul_(0.5 * gain)
    if leaf == "embed" or leaf == "attn_sink":
        return noise.mul_(gain)
    if leaf == "ape":
        return noise.mul_(0.5 * gain)
    if leaf == "bias":
        return noise.mul_(0.1 * gain)
    if leaf.startswith("markov_w"):
        # Each bias is a sum of `rank` products and should have deviation gain².
        return noise.mul_(gain * shape[-1] ** -0.25)
    return noise.mul_(gain * shape[-1] ** -0.5)


def _seed(name: str, seed: int) -> int:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def gain_of(name: str, gains: Mapping[str, float]) -> float:
    """The factor on the tensor of this name."""
    stem = "." + name.removesuffix(".weight")
    matches = [key for key in gains if stem.endswith("." + key)]
    return gains[max(matches, key=len)] if matches else 1.0


def _routing_table(
    shape: tuple[int, ...], experts: int, generator: torch.Generator
) -> torch.Tensor:
    """[vocab, k] distinct experts a token: start + i · stride, never a full turn."""
    vocab, chosen = shape
    longest = (experts - 1) // (chosen - 1) if chosen > 1 else 1
    start = torch.randint(experts, (vocab, 1), generator=generator)
    stride = torch.randint(1, longest + 1, (vocab, 1), generator=generator)
    return (start + stride * torch.arange(chosen)) % experts
