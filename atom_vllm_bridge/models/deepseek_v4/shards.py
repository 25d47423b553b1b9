"""What the safetensors shards of a checkpoint declare, read from their headers alone.

A shard is: 8 bytes, the header's length n (little endian); n bytes of JSON, name → dtype,
shape and [begin, end) of the data; then the data, packed. Standard library only.
"""

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import NamedTuple

from .checkpoint import BYTES, CheckpointError, TensorHeader

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


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
            or that no index names.
    """
    return {placed.name: placed.header for placed in place_tensors(directory)}


def place_tensors(directory: str | Path) -> list[Placed]:
    """Like `check_shards`, with the place of every tensor in its shard."""
    directory = Path(directory)
    weight_map = _read_index(directory)
    shards = sorted(set(weight_map.values())) if weight_map else [SINGLE]
    problems: list[str] = []
    placed: dict[str, Placed] = {}
    for shard in shards:
        try:
            tensors = list(_read_header(directory / shard))
        except CheckpointError as error:
            problems += error.problems
            weight_map = {n: s for n, s in (weight_map or {}).items() if s != shard}
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
    if not index.exists():
        if (directory / SINGLE).exists():
            return None
        raise CheckpointError(
            [
                f"{directory} holds neither {INDEX} nor {SINGLE}: give a checkpoint's directory."
            ]
        )
    try:
        return json.loads(index.read_bytes())["weight_map"]
    except (ValueError, KeyError) as error:
        raise CheckpointError(
            [
                f"{index} is not an index ({type(error).__name__}: {error}): download it again."
            ]
        ) from error


def _read_header(path: Path) -> Iterator[Placed]:
    """The tensors of one shard in the order of their data."""
    if not path.exists():
        raise CheckpointError(
            [f"{path.name} is missing from {path.parent}: download it again."]
        )
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
        content = file.read(length)
    try:
        entries = [
            (name, entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"])
            for name, entry in json.loads(content).items()
            if name != "__metadata__"
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            [
                f"{path.name} has an unreadable header ({type(error).__name__}: {error}): "
                "download it again."
            ]
        ) from error
    data = 8 + length
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
    tensors.sort(key=lambda tensor: tensor.begin)
    expected = data + sum(tensor.nbytes for tensor in tensors)
    if size != expected:
        state = "truncated" if size < expected else "too long"
        raise CheckpointError(
            [
                f"{path.name} is {state}: {size} bytes, expected {expected}. Download it again."
            ]
        )
    yield from tensors
