"""What data-parallel ranks with shared experts need of a communicator, and vLLM's for CPUs lacks."""

from itertools import pairwise

import torch
from torch import distributed
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


class AtomCpuCommunicator(CpuCommunicator):
    """vLLM's, with collectives of tensors that differ in length between ranks; signatures and results as its CUDA communicator's."""

    def all_gatherv(
        self,
        input_: torch.Tensor | list[torch.Tensor],
        dim: int = 0,
        sizes: list[int] | None = None,
    ) -> torch.Tensor | list[torch.Tensor]:
        """Rows of all ranks, one rank's after another's.

        Args:
            input_: [rows, …], or several.
            dim: 0.
            sizes: rows of each rank; None: as many as here.
        """
        if dim != 0:
            raise NotImplementedError(
                f"all_gatherv over dimension {dim}: ranks differ in rows alone; pass dim=0."
            )
        if isinstance(input_, list):
            return [self._gather_rows(one, sizes) for one in input_]
        return self._gather_rows(input_, sizes)

    def _gather_rows(self, rows: torch.Tensor, sizes: list[int] | None) -> torch.Tensor:
        sizes = sizes or [len(rows)] * self.world_size
        # Gloo gathers tensors of one shape.
        longest = max(sizes)
        mine = rows.new_zeros(longest, *rows.shape[1:])
        mine[: len(rows)] = rows
        all_ = rows.new_empty(self.world_size * longest, *rows.shape[1:])
        distributed.all_gather_into_tensor(all_, mine, group=self.device_group)
        parts = all_.split(longest)
        return torch.cat([part[:n] for part, n in zip(parts, sizes, strict=True)])

    def reduce_scatterv(
        self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> torch.Tensor:
        """The sum over ranks of this rank's rows.

        Args:
            input_: [rows of all ranks, …].
            dim: 0.
            sizes: rows of each rank; None: equal parts.
        """
        if dim not in (0, -input_.dim()):
            raise NotImplementedError(
                f"reduce_scatterv over dimension {dim}: ranks differ in rows alone; pass dim=0."
            )
        sizes = sizes or [len(input_) // self.world_size] * self.world_size
        total = input_.clone()
        distributed.all_reduce(total, group=self.device_group)
        ends = [sum(sizes[:n]) for n in range(len(sizes) + 1)]
        first, end = list(pairwise(ends))[self.rank_in_group]
        return total[first:end].clone()
