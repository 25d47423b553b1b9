"""Which rank a model is of how many, and how it talks to the others; the default is a model that is whole.

Two kinds of ranks. Those of a tensor-parallel group have the same tokens, and a part of every layer each: what they compute is
added up. Replicas are such groups with tokens of their own, which share routed experts where a model is built with several:
then each gives its tokens to all, and gets back the sum for its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Gathered = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Parallel:
    """A rank's place, and its collectives, which all ranks call in the same order.

    Attributes:
        rank, size: within the tensor-parallel group.
        all_reduce: the sum over that group; may write into its argument.
        all_gather: tensors of one shape side by side, along the last dimension, in the order of ranks.
        replica, replicas: place among those that share experts; 1: a group holds all experts.
        gather: tensors [T, …] of this replica → of all, one after another; T may differ between replicas.
        scatter: [sum of T, …] → the sum over replicas of the rows that this one gave.
    """

    rank: int = 0
    size: int = 1
    all_reduce: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
    all_gather: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
    replica: int = 0
    replicas: int = 1
    gather: Callable[[Sequence[torch.Tensor]], Gathered] = tuple
    scatter: Callable[[torch.Tensor], torch.Tensor] = lambda x: x

    @property
    def alone(self) -> bool:
        """Whether nothing is shared with another rank."""
        return self.size == self.replicas == 1


ALONE = Parallel()
