"""Matrices after a load: kept as the ops of this device like them best, and given back plain when weights come again."""

from typing import ClassVar, TypeAlias

import torch
from torch import nn

from atom_vllm_bridge.models.deepseek_v4.sharding import Cut, Elsewhere
from atom_vllm_bridge.models.ops import panels
from atom_vllm_bridge.models.ops.registry import resolve
from atom_vllm_bridge.models.quantization.kept import Kept, Part

# What a matrix of a checkpoint is copied to: memory for all of it,
Whole: TypeAlias = torch.Tensor | Part
# or for a part, or none.
Slot: TypeAlias = Whole | Cut | Elsewhere


class Packable(nn.Module):
    """A module with matrices that only ops multiply with, all of which take them plain and packed."""

    # Parameters stored [..., inputs, outputs]; and those stored [..., outputs, inputs].
    by_input: ClassVar[tuple[str, ...]] = ()
    by_output: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        super().__init__()
        self._plain: dict[str, tuple[int, torch.dtype]] = {}

    def pack(self) -> None:
        """Pack this module's own matrices, where a provider packs."""
        for name in (*self.by_input, *self.by_output):
            parameter = getattr(self, name)
            if parameter is None or isinstance(parameter, Kept):
                continue
            if parameter.requires_grad or name in self._plain:
                continue
            w = parameter.data.mT if name in self.by_output else parameter.data
            packed = resolve("pack", w.device)(w)
            if packed is not None:
                self._plain[name] = (w.shape[-1], w.dtype)
                parameter.data = packed

    def unpack(self) -> None:
        """Undo `pack`: new values may need the shape, and a dtype that holds them."""
        for name, (outputs, dtype) in self._plain.items():
            parameter = getattr(self, name)
            w = panels.join(parameter.data)[..., :outputs].to(dtype)
            w = w.mT if name in self.by_output else w
            parameter.data = w.contiguous()
        self._plain.clear()


def rows(
    w: nn.Parameter | Kept, first: int = 0, end: int | None = None, number: int = 0
) -> Whole:
    """Outputs `first` … `end` − 1 of a matrix stored input by input, [r, a]; of several, of that of this number."""
    if isinstance(w, Kept):
        end = w.outputs if end is None else end
        before = number * w.outputs
        return w.rows(before + first, before + end)
    one = w.data if w.dim() == 2 else w.data[number]
    return one.mT[first:end]


def pack(model: nn.Module) -> None:
    """Pack every matrix of a loaded model."""
    for module in model.modules():
        if isinstance(module, Packable):
            module.pack()
