"""What the safetensors shards of a checkpoint declare, read from their headers alone.

A shard is: 8 bytes, the header's length n (little endian); n bytes of JSON, name → dtype,
shape and [begin, end) of the data; then the data, packed. Standard library only. Nothing
that a file claims is believed, or given memory, before it is checked against its size.
"""

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from .checkpoint import BYTES, CheckpointError, TensorHeader

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLES = ("*.bin", "*.pt", "*.pth")
# The safetensors library reads no longer ones either.
LONGEST_HEADER = 100_000_000
LONGEST_INDEX = 100_000_000
# What an int64 counts, and what PyTorch iterates over.
LARGEST = 2**63 - 1
MOST_DIMENSIONS = 64


class Placed(NamedTuple):
    """A tensor's header and where its bytes lie in its shard."""

    name: str
    header: TensorHeader
    begin: int
    nbytes: int


def check_shards(directory: str | Path) -> dict[str, TensorHeader]:
    """Every tensor of a checkpoint, after checking that all of its bytes are there.

    Args:
        directory: holds `model.safetensors.index.json` and its shards, or a single
            `model.safetensors`.

    Returns:
        name → TensorHeader(shard, dtype, shape), shard by shard, in the order of the data.

    Raises:
        CheckpointError: no checkpoint there; a shard missing, truncated or unreadable; a
            tensor that the index places in a shard that lacks it, or that two shards hold,
            or that no index names; a header or an index that is not what it should be.
    """
    return {placed.name: placed.header for placed in place_tensors(directory)}


def place_tensors(directory: str | Path) -> list[Placed]:
    """Like `check_shards`, with the place of every tensor in its shard."""
    directory = Path(directory)
    weight_map = _read_index(directory)
    shards = sorted(set(weight_map.values())) if weight_map else [SINGLE]
    problems: list[str] = []
    placed: dict[str, Placed] = {}
    unread: set[str] = set()
    for shard in shards:
        try:
            tensors = list(_read_header(directory / shard))
        except CheckpointError as error:
            problems += error.problems
            unread.add(shard)
            continue
        for tensor in tensors:
            first = placed.setdefault(tensor.name, tensor)
            if first is not tensor:
                problems.append(
                    f"{tensor.name} is held twice, in {first.header.shard} and in {shard}."
                )
            elif weight_map is not None and tensor.name not in weight_map:
                problems.append(
                    f"{tensor.name} is in {shard}, but {INDEX} does not name it."
                )
    for name, shard in (weight_map or {}).items():
        if shard in unread:
            continue
        if name not in placed:
            problems.append(
                f"{name} should be in {shard}, says {INDEX}, but is in no shard."
            )
        elif placed[name].header.shard != shard:
            problems.append(
                f"{name} should be in {shard}, says {INDEX}, but is in "
                f"{placed[name].header.shard}."
            )
    if problems:
        raise CheckpointError(problems)
    return list(placed.values())


def _read_index(directory: Path) -> dict[str, str] | None:
    """name → shard, or None where one file holds everything."""
    index = directory / INDEX
    if not index.is_file():
        if (directory / SINGLE).exists():
            return None
        pickled = sorted(path.name for kind in PICKLES for path in directory.glob(kind))
        if pickled:
            raise CheckpointError(
                [
                    f"{directory} holds pickled weights ({pickled[0]!r}), which are never read, and no "
                    f"{INDEX} or {SINGLE}: give a checkpoint in safetensors."
                ]
            )
        raise CheckpointError(
            [
                f"{directory} holds neither {INDEX} nor {SINGLE}: give a checkpoint's directory."
            ]
        )
    try:
        if index.stat().st_size > LONGEST_INDEX:
            raise ValueError(f"longer than {LONGEST_INDEX} bytes")
        weight_map = json.loads(index.read_bytes())["weight_map"]
        if not isinstance(weight_map, dict):
            raise TypeError("weight_map is not an object")
        for name, shard in weight_map.items():
            _check_name(name)
            _check_shard(shard)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            [
                f"{index} is not an index ({type(error).__name__}: {error}): download it again."
            ]
        ) from error
    return weight_map


def _check_name(name: str) -> None:
    """Raise for a name that would tear a message's line, or that no terminal shows."""
    if not name.isprintable():
        raise ValueError(f"{name!a:.200} is not the name of a tensor")


def _check_shard(shard: Any) -> None:
    """Raise for what is not the name of a file in the checkpoint's own directory."""
    plain = isinstance(shard, str) and shard.isprintable() and len(shard) < 256
    if not plain or shard in ("", ".", "..") or "/" in shard or "\\" in shard:
        raise ValueError(f"{shard!a:.200} is not the name of a file beside it")


def _read_header(path: Path) -> Iterator[Placed]:
    """The tensors of one shard in the order of their data."""
    size, content = _read_json(path)
    try:
        entries = [
            _read_entry(name, entry)
            for name, entry in json.loads(content).items()
            if name != "__metadata__"
        ]
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise CheckpointError(
            [
                f"{path.name} has an unreadable header ({type(error).__name__}: {error}): "
                "download it again."
            ]
        ) from error
    data = 8 + len(content)
    tensors = []
    for name, dtype, shape, begin, end in entries:
        if dtype not in BYTES:
            raise CheckpointError(
                [f"{name} is {dtype}, a dtype not known here, in {path.name}."]
            )
        if prod(shape) * BYTES[dtype] != end - begin:
            raise CheckpointError(
                [
                    f"{name} is {dtype} {list(shape)}, which is not {end - begin} bytes, "
                    f"in {path.name}. Download it again."
                ]
            )
        header = TensorHeader(path.name, dtype, shape)
        tensors.append(Placed(name, header, data + begin, end - begin))
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.nbytes))
    expected = data
    for tensor in tensors:
        if tensor.begin != expected:
            raise CheckpointError(
                [
                    f"{tensor.name} begins at byte {tensor.begin}, where {expected} is expected, "
                    f"in {path.name}. Download it again."
                ]
            )
        expected += tensor.nbytes
    if size != expected:
        state = "truncated" if size < expected else "too long"
        raise CheckpointError(
            [
                f"{path.name} is {state}: {size} bytes, expected {expected}. Download it again."
            ]
        )
    yield from tensors


def _read_json(path: Path) -> tuple[int, bytes]:
    """A shard's size in bytes, and its header, read only if the shard can hold it."""
    # Not a directory, and not a pipe, which would be waited for.
    if not path.is_file():
        raise CheckpointError(
            [f"{path.name} is missing from {path.parent}: download it again."]
        )
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 + length:
                raise CheckpointError(
                    [
                        f"{path.name} is truncated: {size} bytes do not hold its header of {length}. "
                        "Download it again."
                    ]
                )
            if length > LONGEST_HEADER:
                raise CheckpointError(
                    [
                        f"{path.name} has a header of {length} bytes, expected at most {LONGEST_HEADER}: "
                        "download it again."
                    ]
                )
            return size, file.read(length)
    except OSError as error:
        raise CheckpointError(
            [f"{path.name} cannot be read: {error.strerror}, in {path.parent}."]
        ) from error


def _read_entry(
    name: str, entry: dict[str, Any]
) -> tuple[str, str, tuple[int, ...], int, int]:
    """(name, dtype, shape, begin, end), of the right types; a dtype may be unknown.

    Raises:
        ValueError, KeyError, TypeError: an entry that is not one, or counts beyond int64.
    """
    _check_name(name)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or not dtype.isprintable():
        raise ValueError(f"{name} has no dtype")
    if not _are_counts(shape) or len(shape) > MOST_DIMENSIONS:
        raise ValueError(f"{name} has no shape")
    # A tensor without elements has strides too, which must not overflow.
    if prod(max(size, 1) for size in shape) > LARGEST:
        raise ValueError(f"{name} has too large a shape")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise ValueError(f"{name} has no place")
    begin, end = offsets
    return name, dtype, tuple(shape), begin, end


def _are_counts(values: Any) -> bool:
    """Whether JSON holds a list of integers that an int64 can count."""
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value <= LARGEST for value in values
    )
