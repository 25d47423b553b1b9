"""Runs a Triton kernel in the interpreter and its stand-in, and compares memory.

Every tensor is given twice, in allocations of its own with guard bytes on both
sides; after the two launches all bytes must agree, guards and the gaps between
strided rows included. Only a NaN may be another NaN.
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.triton_utils.dispatcher import KernelOverride, _registry

from atom_vllm_bridge.engine_kernels import find_kernel, overrides

GUARD = 256  # bytes
POISON = 0x5A  # int32 1515870810, float32 1.5e16


@dataclass(frozen=True)
class Pointers:
    """A table of addresses: the kernel gets uint64 data pointers of these tensors."""

    tensors: Sequence[torch.Tensor]


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    Attributes:
        kernel: its qualified name.
        grid: as between the brackets.
        arguments: by the kernel's parameter names; tensors, Pointers, scalars.
        outputs: names of tensors whose every byte is poisoned before. Name here
            what the kernel must write whatever was there before.
    """

    kernel: str
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    outputs: Collection[str] = field(default=())


def check(launch: Launch) -> dict[str, Any]:
    """Launch kernel and stand-in; fail unless they leave the same bits.

    Returns:
        The arguments after the stand-in ran (Pointers as a list of tensors), so that
        a test can also look at the values.
    """
    expected, memory_expected = _materialise(launch)
    actual, memory_actual = _materialise(launch)
    original_kernel(launch.kernel)[launch.grid](**_plain(expected))
    run_stand_in(launch.kernel, launch.grid, _plain(actual))
    for name, want, got in zip(
        memory_expected.names,
        memory_expected.allocations,
        memory_actual.allocations,
        strict=True,
    ):
        _compare(f"{launch.kernel}: {name}", want, got)
    return {
        name: list(value.tensors) if isinstance(value, Pointers) else value
        for name, value in actual.items()
    }


def original_kernel(name: str) -> Any:
    """The Triton kernel itself, even after stand-ins were registered."""
    kernel = find_kernel(name)
    while isinstance(kernel, KernelOverride):
        original = _registry[name][0]
        assert original is not kernel
        kernel = original
    return kernel


def run_stand_in(name: str, grid: tuple[int, ...], arguments: dict[str, Any]) -> None:
    """Call the stand-in as a launch would: every argument by name, and the grid."""
    overrides()[name](**arguments, grid=grid)


def microseconds(launch: Launch, *, interpreted: bool, repeats: int) -> float:
    """Median time of one launch, each on memory of its own."""
    kernel, stand_in = original_kernel(launch.kernel), overrides()[launch.kernel]
    times = []
    for _ in range(repeats + 1):
        copies, _memory = _materialise(launch)
        arguments = _plain(copies)
        start = time.perf_counter()
        if interpreted:
            kernel[launch.grid](**arguments)
        else:
            stand_in(**arguments, grid=launch.grid)
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[repeats // 2] * 1e6


@dataclass
class _Memory:
    names: list[str] = field(default_factory=list)
    dtypes: list[torch.dtype] = field(default_factory=list)
    allocations: list[tuple[torch.Tensor, torch.dtype]] = field(default_factory=list)
    copies: dict[int, torch.Tensor] = field(default_factory=dict)


def _materialise(launch: Launch) -> tuple[dict[str, Any], _Memory]:
    memory = _Memory()
    copies: dict[str, Any] = {}
    for name, value in launch.arguments.items():
        poisoned = name in launch.outputs
        if isinstance(value, torch.Tensor):
            copies[name] = _copy(memory, name, value, poisoned)
        elif isinstance(value, Pointers):
            copies[name] = Pointers(
                [
                    _copy(memory, f"{name}[{i}]", tensor, poisoned)
                    for i, tensor in enumerate(value.tensors)
                ]
            )
        else:
            copies[name] = value
    missing = set(launch.outputs) - launch.arguments.keys()
    assert not missing, f"{launch.kernel}: no argument {missing}"
    return copies, memory


def _copy(
    memory: _Memory, name: str, tensor: torch.Tensor, poisoned: bool
) -> torch.Tensor:
    """A copy with the same strides; tensors of one storage share one again."""
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    allocation = memory.copies.get(storage.data_ptr()) if size else None
    if allocation is None:
        allocation = torch.full((size + 2 * GUARD,), POISON, dtype=torch.uint8)
        inside = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (size,), (1,))
        allocation[GUARD : GUARD + size] = inside
        memory.copies[storage.data_ptr()] = allocation
        memory.names.append(name)
        memory.allocations.append((allocation, tensor.dtype))
    if poisoned:
        # Any byte but 0 and 1 would make a bool that is neither.
        allocation[GUARD : GUARD + size] = 1 if tensor.dtype is torch.bool else POISON
    offset = GUARD // tensor.element_size() + tensor.storage_offset()
    return torch.empty(0, dtype=tensor.dtype).set_(
        allocation.untyped_storage(), offset, tensor.size(), tensor.stride()
    )


def _plain(arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        name: (
            torch.tensor([t.data_ptr() for t in value.tensors], dtype=torch.uint64)
            if isinstance(value, Pointers)
            else value
        )
        for name, value in arguments.items()
    }


def _compare(
    name: str,
    want: tuple[torch.Tensor, torch.dtype],
    got: tuple[torch.Tensor, torch.dtype],
) -> None:
    if torch.equal(want[0], got[0]):
        return
    dtype = want[1]
    for guard in (slice(None, GUARD), slice(want[0].numel() - GUARD, None)):
        same = torch.equal(want[0][guard], got[0][guard])
        assert same, f"{name}: written outside its memory"
    a, b = (pair[0][GUARD:-GUARD].clone().view(dtype) for pair in (want, got))
    differs = (
        a.view(torch.uint8)
        .view(-1, dtype.itemsize)
        .ne(b.view(torch.uint8).view(-1, dtype.itemsize))
        .any(-1)
    )
    if dtype.is_floating_point:
        differs &= ~(a.isnan() & b.isnan())
    at = differs.nonzero().flatten().tolist()
    assert not at, (
        f"{name}: {len(at)} of {a.numel()} elements differ, first at {at[0]}: "
        f"kernel {a[at[0]].item()}, stand-in {b[at[0]].item()}"
    )
