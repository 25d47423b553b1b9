"""Load a checkpoint into a model: pair, dequantise or keep, copy, and account for every tensor.

The model offers slots, name → view of a parameter in its logical shape. Tensors arrive one
by one in any order; a quantised weight waits for its scale. Nothing is taken on trust: at
the end every slot was filled once and every tensor was used once, or the load fails and
says which.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import torch
from tqdm import tqdm

from atom_vllm_bridge.models.deepseek_v4.checkpoint import CheckpointError
from atom_vllm_bridge.models.deepseek_v4.packing import Slot, Whole
from atom_vllm_bridge.models.deepseek_v4.sharding import Cut, Elsewhere
from atom_vllm_bridge.models.deepseek_v4.shards import check_shards, place_tensors
from atom_vllm_bridge.models.quantization import block_fp8, mxfp4
from atom_vllm_bridge.models.quantization.kept import Part

__all__ = ["CheckpointError", "LoadReport", "check_shards", "iterate", "load"]

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
}
_PLAIN = (torch.bfloat16, torch.float16, torch.float32)
_INTEGER = (torch.int32, torch.int64)
_PACKED = (torch.int8, torch.uint8)
_SCALES = (torch.float8_e8m0fnu, torch.float32)


Held: TypeAlias = Whole | Cut

_UNSCALED = "is left over: its weight is not quantised"


@dataclass
class LoadReport:
    """What a load did.

    Attributes:
        filled: slots filled.
        tensors: tensors used; a quantised weight and its scale are two.
        nbytes: bytes of those tensors as stored.
        ignored: names that the caller asked to leave out.
        elsewhere: names that came and are another rank's.
    """

    filled: int = 0
    tensors: int = 0
    nbytes: int = 0
    ignored: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)


def load(
    slots: Mapping[str, Slot],
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    ignore: Callable[[str], bool] = lambda name: False,
    where: Callable[[str], str | None] | None = None,
    optional: Callable[[str], bool] = lambda name: False,
) -> LoadReport:
    """Fill every slot from a stream of checkpoint tensors.

    A tensor may come as float (bf16, f16 or f32); as float8_e4m3fn [out, in] with a scale
    for each 128 × 128; or as int8 [out, in/2], two e2m1 a byte, with a scale for each 32
    inputs. The scale of `x.weight` is `x.scale`, E8M0 or float32. Integer slots take int32
    and int64.

    Args:
        slots: checkpoint name → destination, in the logical (dequantised) shape. Values
            are converted to its dtype; a `Part` keeps those that are quantised, a `Cut` takes
            its part of them, and what is `Elsewhere` need not come.
        tensors: (name, tensor) in any order; one at a time is held, and the halves of
            pairs that are not complete.
        ignore: names to leave out, counted in the report.
        where: name → the shard that holds it, or None, for messages.
        optional: slots that may stay unfilled.

    Raises:
        CheckpointError: tensors missing, left over, twice there, of a wrong shape or dtype,
            scales missing, or experts named that do not exist: all of them, in one exception, after the stream has ended.
    """
    loading = _Loading(slots, where)
    for name, tensor in tensors:
        if ignore(name):
            loading.report.ignored.append(name)
        else:
            loading.take(name, tensor)
    loading.finish(optional)
    if loading.problems:
        raise CheckpointError(loading.problems)
    return loading.report


def iterate(
    directory: str | Path,
    *,
    wanted: Callable[[str], bool] = lambda name: True,
    progress: bool = True,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Read a checkpoint's tensors in the order in which they lie on disk.

    Each tensor is read into memory of its own, so that at no time more is held than the
    caller keeps.

    Args:
        directory: of the checkpoint.
        wanted: names to read; others are skipped.
        progress: show a bar in bytes.

    Raises:
        CheckpointError: as `check_shards`, before the first tensor is read.
    """
    placed = [tensor for tensor in place_tensors(directory) if wanted(tensor.name)]
    bar = tqdm(
        total=sum(tensor.nbytes for tensor in placed),
        desc="Loading weights",
        unit="B",
        unit_scale=True,
        disable=not progress,
    )
    shard, file = None, None
    with bar:
        try:
            for name, header, begin, nbytes in placed:
                if header.shard != shard:
                    if file is not None:
                        file.close()
                    shard = header.shard
                    file = open(os.path.join(directory, shard), "rb")  # noqa: SIM115
                assert file is not None
                tensor = torch.empty(header.shape, dtype=_DTYPES[header.dtype])
                if nbytes:
                    file.seek(begin)
                    read = file.readinto(tensor.view(-1).view(torch.uint8).numpy())
                    if read != nbytes:
                        raise CheckpointError(
                            [
                                f"{shard} has become shorter while {name} was read from it."
                            ]
                        )
                bar.update(nbytes)
                yield name, tensor
        finally:
            if file is not None:
                file.close()


class _Loading:
    """The state of one load: halves of pairs, slots filled, faults found."""

    def __init__(
        self,
        slots: Mapping[str, Slot],
        where: Callable[[str], str | None] | None,
    ):
        others = {n for n, slot in slots.items() if isinstance(slot, Elsewhere)}
        self.elsewhere = others | set(map(_scale_name, others))
        self.slots: dict[str, Held] = {
            n: slot for n, slot in slots.items() if not isinstance(slot, Elsewhere)
        }
        self.where = where
        self.report = LoadReport()
        self.problems: list[str] = []
        self.seen: set[str] = set()
        self.refused: set[str] = set()
        self.weights: dict[str, torch.Tensor] = {}
        self.scales: dict[str, torch.Tensor] = {}

    def take(self, name: str, tensor: torch.Tensor) -> None:
        """Use a tensor now, or keep it until its other half arrives."""
        if name in self.seen:
            self.fault(name, "came twice, expected once")
            return
        self.seen.add(name)
        if name in self.elsewhere:
            self.report.elsewhere.append(name)
        elif name in self.slots:
            self.take_weight(name, tensor)
        elif name.endswith(".scale") and _weight_name(name) in self.slots:
            weight = _weight_name(name)
            if weight in self.weights:
                self.fill_quantized(weight, self.weights.pop(weight), tensor)
            elif weight not in self.seen:
                self.scales[weight] = tensor
            elif weight not in self.refused:
                self.fault(name, _UNSCALED)
        else:
            self.fault(name, "is left over: nothing in the model takes it")

    def check_experts(self, name: str, table: torch.Tensor) -> bool:
        """Whether a hash layer's table names only experts that its gate, [E, d], has."""
        gate = self.slots.get(name.removesuffix("tid2eid") + "weight")
        if not name.endswith("gate.tid2eid") or gate is None or not table.numel():
            return True
        lowest, highest = (int(bound) for bound in table.aminmax())
        if lowest >= 0 and highest < len(gate):
            return True
        self.fault(
            name,
            f"names experts {lowest} to {highest}, expected 0 to {len(gate) - 1}",
            "n_routed_experts may be of another checkpoint.",
        )
        return False

    def take_weight(self, name: str, tensor: torch.Tensor) -> None:
        slot = self.slots[name]
        quantized = tensor.dtype == torch.float8_e4m3fn or tensor.dtype in _PACKED
        if quantized and slot.is_floating_point() and name.endswith(".weight"):
            if name in self.scales:
                self.fill_quantized(name, tensor, self.scales.pop(name))
            else:
                self.weights[name] = tensor
            return
        accepted = _PLAIN if slot.is_floating_point() else _INTEGER
        scale = self.scales.pop(name, None)
        if tensor.dtype not in accepted:
            expected = " or ".join(map(_short, accepted))
            self.refuse(name, f"is {_short(tensor.dtype)}, expected {expected}")
        elif tensor.shape != slot.shape:
            self.refuse(name, f"is {_shape(tensor)}, expected {_shape(slot)}")
        elif self.check_experts(name, tensor):
            with torch.no_grad():
                slot.copy_(tensor)
            self.count(tensor)
            if scale is not None:
                self.fault(_scale_name(name), _UNSCALED)

    def fill_quantized(
        self, name: str, weight: torch.Tensor, scale: torch.Tensor
    ) -> None:
        """Check a weight and its scale against the slot, dequantise, copy."""
        slot, scale_name = self.slots[name], _scale_name(name)
        if slot.dim() != 2:
            self.fault(
                name, f"is {_short(weight.dtype)}, but only matrices are quantised"
            )
            return
        rows, columns = slot.shape
        if weight.dtype == torch.float8_e4m3fn:
            stored, kind = (rows, columns), "one scale for 128 × 128 weights"
            scales = block_fp8.scale_shape(rows, columns)
        else:
            stored, kind = (rows, columns // 2), "one scale for 32 inputs"
            scales = mxfp4.scale_shape(rows, columns)
        if tuple(weight.shape) != stored:
            packed = " (two inputs a byte)" if weight.dtype in _PACKED else ""
            self.fault(name, f"is {_shape(weight)}, expected {list(stored)}{packed}")
        elif tuple(scale.shape) != scales:
            self.fault(
                scale_name,
                f"is {_shape(scale)}, expected {list(scales)} ({kind})",
                "The shard may be from another layout.",
            )
        elif scale.dtype not in _SCALES:
            expected = " or ".join(map(_short, _SCALES))
            self.fault(scale_name, f"is {_short(scale.dtype)}, expected {expected}")
        else:
            dequantize = (
                block_fp8.dequantize
                if weight.dtype == torch.float8_e4m3fn
                else mxfp4.dequantize
            )
            if isinstance(slot, Part | Cut):
                slot.keep(weight, scale)
            else:
                device = slot.device
                with torch.no_grad():
                    slot.copy_(dequantize(weight.to(device), scale.to(device)))
            self.count(weight, scale)

    def refuse(self, name: str, what: str) -> None:
        """Report a weight, and expect its scale to come to nothing."""
        self.refused.add(name)
        self.fault(name, what)

    def count(self, *stored: torch.Tensor) -> None:
        self.report.filled += 1
        self.report.tensors += len(stored)
        self.report.nbytes += sum(tensor.nbytes for tensor in stored)

    def finish(self, optional: Callable[[str], bool]) -> None:
        """Name what never came."""
        for name in self.weights:
            self.fault(
                _scale_name(name),
                f"is missing, though {name} is {_short(self.weights[name].dtype)}",
                near=name,
            )
        for name, scale in self.scales.items():
            self.fault(
                name,
                f"is missing, expected {_shape(self.slots[name])}, though its scale "
                f"{_shape(scale)} is there",
                near=_scale_name(name),
            )
        for name, slot in self.slots.items():
            if name not in self.seen and name not in self.scales and not optional(name):
                self.fault(name, f"is missing, expected {_shape(slot)}")

    def fault(
        self, name: str, what: str, advice: str = "", near: str | None = None
    ) -> None:
        shard = self.where(near or name) if self.where else None
        place = f", in {shard}" if shard else ""
        self.problems.append(
            f"{name} {what}{place}." + (f" {advice}" if advice else "")
        )


def _weight_name(scale: str) -> str:
    return scale.removesuffix(".scale") + ".weight"


def _scale_name(weight: str) -> str:
    return weight.removesuffix(".weight") + ".scale"


def _shape(tensor: Held) -> str:
    return str(list(tensor.shape))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
