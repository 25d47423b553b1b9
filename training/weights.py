"""The weights while they are trained: float32 leaves under the checkpoint's names, and the view that the forward takes of them.

Routed experts are stacked, one leaf for all of a layer. What the checkpoint will store in fp8 or mxfp4 is seen by the forward
as it will be stored, so that training ends on the values that are served; gradients pass the rounding unchanged.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from atom_vllm_bridge.checkpoint.weights import GAINS, draw
from atom_vllm_bridge.models.deepseek_v4.checkpoint import tensor_table
from atom_vllm_bridge.models.quantization import block_fp8, mxfp4

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(w[123])\.weight")


class Weights:
    """Leaves by name: `layers.0.attn.wq_a.weight`, and `layers.0.ffn.experts.w1` [E, I, d] for a layer's routed experts.

    Args:
        hf: the content of config.json.
        prefix: of the names to hold; "" for all tensors of the target.
        seed: of the values to start from.
        device: where.
    """

    def __init__(
        self, hf: Mapping[str, Any], prefix: str, seed: int, device: str
    ) -> None:
        self.stored = tensor_table(hf, "mxfp4")
        logical = tensor_table(hf, "bf16")
        self.names = [n for n in logical if _belongs(n, prefix)]
        values: dict[str, torch.Tensor] = {}
        for name in self.names:
            value = draw(name, logical[name].shape, hf, GAINS, seed)
            values[name] = _start(name, value, hf["hc_mult"])
        self.leaves: dict[str, torch.Tensor] = {}
        for name, value in stacked(values).items():
            leaf = value.to(device)
            trained = leaf.is_floating_point() and not name.endswith("gate.bias")
            self.leaves[name] = leaf.requires_grad_(trained)

    def trained(self) -> list[torch.Tensor]:
        return [leaf for leaf in self.leaves.values() if leaf.requires_grad]

    def view(self, *, rounded: bool) -> dict[str, torch.Tensor]:
        """What a forward computes with: the leaves, rounded as the checkpoint stores them if asked."""
        view = dict(self.leaves)
        if rounded:
            with torch.no_grad():
                offsets = self._offsets()
            view |= {name: view[name] + offset for name, offset in offsets.items()}
        return view

    def state(self) -> dict[str, torch.Tensor]:
        """Copies of the leaves on the CPU, to be saved; `restore` takes them back."""
        return {
            name: leaf.detach().cpu().contiguous() for name, leaf in self.leaves.items()
        }

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Raises KeyError if a leaf is missing."""
        with torch.no_grad():
            for name, leaf in self.leaves.items():
                leaf.copy_(state[name])

    def _offsets(self) -> dict[str, torch.Tensor]:
        """Stored value − leaf, for every leaf that is stored in fewer bits.

        Matrices of a kind are rounded together: hundreds of small operations a step would take longer than the step.
        """
        offsets: dict[str, torch.Tensor] = {}
        kinds: dict[tuple[str, int], dict[str, torch.Tensor]] = defaultdict(dict)
        for name, leaf in self.leaves.items():
            if leaf.requires_grad:
                dtype = self.stored[_one_of(name)].dtype
                columns = leaf.shape[-1] if dtype == "I8" else 0
                kinds[dtype, columns][name] = leaf
        for (dtype, columns), leaves in kinds.items():
            if dtype == "I8":
                rows = torch.cat(
                    [leaf.reshape(-1, columns) for leaf in leaves.values()]
                )
                rows = mxfp4.dequantize(*mxfp4.quantize(rows)) - rows
                counts = [leaf.numel() // columns for leaf in leaves.values()]
                for (name, leaf), part in zip(
                    leaves.items(), rows.split(counts), strict=True
                ):
                    offsets[name] = part.view_as(leaf)
            elif dtype == "F8_E4M3":
                offsets |= _fp8_offsets(leaves)
            elif dtype == "BF16":
                for name, leaf in leaves.items():
                    offsets[name] = leaf.bfloat16().float() - leaf
        return offsets


def _fp8_offsets(leaves: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same for block fp8: the blocks of all matrices under one another, which is one tall matrix of blocks."""
    side = block_fp8.BLOCK
    blocks, counts = [], []
    for leaf in leaves.values():
        rows, columns = leaf.shape
        padded = F.pad(leaf, (0, -columns % side, 0, -rows % side))
        cut = padded.unflatten(0, (-1, side)).unflatten(2, (-1, side)).transpose(1, 2)
        blocks.append(cut.flatten(0, 1))
        counts.append(len(blocks[-1]))
    tall = torch.cat(blocks).flatten(0, 1)
    tall = (block_fp8.dequantize(*block_fp8.quantize(tall)) - tall).unflatten(
        0, (-1, side)
    )
    offsets = {}
    for (name, leaf), part in zip(leaves.items(), tall.split(counts), strict=True):
        rows, columns = leaf.shape
        down = -(-rows // side)
        whole = part.unflatten(0, (down, -1)).transpose(1, 2).flatten(2).flatten(0, 1)
        offsets[name] = whole[:rows, :columns]
    return offsets


def published(state: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Saved leaves under the checkpoint's names, experts one by one."""
    for name, value in state.items():
        layer, _, matrix = name.rpartition(".")
        if layer.endswith(".experts"):
            for expert, one in enumerate(value):
                yield f"{layer}.{expert}.{matrix}.weight", one
        else:
            yield name, value


def _belongs(name: str, prefix: str) -> bool:
    return name.startswith(prefix) if prefix else not name.startswith("mtp.")


def _start(name: str, value: torch.Tensor, streams: int) -> torch.Tensor:
    """Where training starts: hyper-connections that hardly depend on the token and mostly keep streams apart."""
    if name.endswith("_scale") and "hc_" in name:
        return value * 0.1
    if name.endswith("_base") and "hc_" in name and len(value) > streams:
        value[2 * streams :] += 2.0 * torch.eye(streams).flatten()
    if name.endswith(("embed.weight", "confidence_head.proj.weight")):
        return value * 0.5
    if name.endswith("gate.bias"):
        return torch.zeros_like(value)
    return value


def stacked(values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors under the checkpoint's names, experts in ascending order → leaves; what `published` undoes."""
    stacked: dict[str, Any] = {}
    for name, value in values.items():
        if found := _EXPERT.fullmatch(name):
            stacked.setdefault(f"{found[1]}.{found[3]}", []).append(value)
        else:
            stacked[name] = value
    return {n: torch.stack(v) if isinstance(v, list) else v for n, v in stacked.items()}


def _one_of(name: str) -> str:
    """A checkpoint's name that stands for the leaf."""
    layer, _, matrix = name.rpartition(".")
    return f"{layer}.0.{matrix}.weight" if layer.endswith(".experts") else name
