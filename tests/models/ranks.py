"""Ranks of a model as threads of this process, which meet at each collective."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import torch

from atom_vllm_bridge.models.deepseek_v4.parallel import Parallel


class _Meeting:
    """Where so many threads show each other a value."""

    def __init__(self, size: int) -> None:
        self.shown: list[Any] = [None] * size
        self.barrier = Barrier(size)

    def __call__(self, place: int, value: Any) -> list[Any]:
        self.shown[place] = value
        self.barrier.wait(60)
        shown = list(self.shown)
        self.barrier.wait(60)
        return shown


def ranks(size: int, replicas: int = 1) -> list[Parallel]:
    """A `Parallel` for each thread, replica by replica."""
    beside = [_Meeting(size) for _ in range(replicas)]
    across = [_Meeting(replicas) for _ in range(size)]
    return [
        _one(rank, size, replica, replicas, beside[replica], across[rank])
        for replica in range(replicas)
        for rank in range(size)
    ]


def _one(
    rank: int,
    size: int,
    replica: int,
    replicas: int,
    beside: _Meeting,
    across: _Meeting,
) -> Parallel:
    lengths: list[int] = []

    def gather(tensors):
        shown = across(replica, tensors)
        lengths[:] = [len(other[0]) for other in shown]
        return tuple(torch.cat(parts) for parts in zip(*shown, strict=True))

    def scatter(x):
        total = torch.stack(across(replica, x)).sum(0)
        return total.split(lengths)[replica]

    return Parallel(
        rank,
        size,
        all_reduce=lambda x: torch.stack(beside(rank, x.clone())).sum(0),
        all_gather=lambda x: torch.cat(beside(rank, x), -1),
        replica=replica,
        replicas=replicas,
        gather=gather,
        scatter=scatter,
    )


def at_once(work: Callable[[Any], Any], items: list[Any]) -> list[Any]:
    """`work` of every item, each on a thread of its own."""
    with ThreadPoolExecutor(len(items)) as threads:
        return list(threads.map(work, items))
