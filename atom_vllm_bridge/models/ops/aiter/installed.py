"""For which GPUs the adapters are, and that AMD's aiter is there."""

import torch

from atom_vllm_bridge.models.ops.aiter import namesakes

# CDNA 3 multiplies e4m3fnuz, whose values are half of those that the same bits have in e4m3fn; CDNA 4 multiplies e4m3fn.
FP8 = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}


def architecture(device: torch.device) -> str:
    """As "gfx950", without the features that follow it."""
    return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]


def fp8_type(device: torch.device) -> torch.dtype:
    """What the device's matrix units take for fp8."""
    return FP8[architecture(device)]


def refusal(device: torch.device) -> str | None:
    """Why no op of aiter is taken on an AMD GPU, or None."""
    name = architecture(device)
    if name not in FP8:
        return f"is adapted for {' and '.join(FP8)}, and this is {name}"
    return namesakes.refusal()
