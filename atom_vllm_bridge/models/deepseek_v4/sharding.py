"""Which part of each published tensor a rank holds.

Split: query heads and what belongs to them (rows of wq_b, sinks, groups of wo_a, columns of wo_b), routed experts, each whole on
one rank; rows of the embedding and of the head; and the shared expert along its inner dimension, where that divides in whole
blocks of scales. All else is on every rank: keys are shared by all heads, and the indexer has to select the same everywhere.
"""

import torch

from atom_vllm_bridge.models.deepseek_v4.config import DeepseekV4Config
from atom_vllm_bridge.models.deepseek_v4.parallel import Parallel
from atom_vllm_bridge.models.quantization import block_fp8, mxfp4
from atom_vllm_bridge.models.quantization.kept import Part

Pair = tuple[torch.Tensor, torch.Tensor]


class Cut:
    """Rows and columns of a published tensor, which `to` holds; for `loading` it looks like a tensor of the published shape.

    Args:
        to: memory for the part.
        shape: of the whole.
        rows: which of its first dimension.
        columns: which of its second; None: all, or there is none.
    """

    def __init__(
        self,
        to: torch.Tensor | Part,
        shape: tuple[int, ...],
        rows: range,
        columns: range | None = None,
    ) -> None:
        self.to, self.shape = to, torch.Size(shape)
        self.dtype, self.device = to.dtype, to.device
        self.rows = rows
        self.columns = range(self.shape[-1]) if columns is None else columns
        held = (len(self.rows), len(self.columns))[: len(shape)]
        if held != tuple(to.shape):
            raise ValueError(f"sharding: {held} of {shape} do not fit {to.shape}.")

    def __len__(self) -> int:
        return self.shape[0]

    def dim(self) -> int:
        return len(self.shape)

    def is_floating_point(self) -> bool:
        return True

    def copy_(self, values: torch.Tensor) -> None:
        """Fill with this part of plain values."""
        part = values[self.rows.start : self.rows.stop]
        if self.dim() == 2:
            part = part[:, self.columns.start : self.columns.stop]
        self.to.copy_(part)

    def keep(self, weight: torch.Tensor, scale: torch.Tensor) -> None:
        """Fill with this part of a quantised pair, whose shapes are right; plain where it does not begin with a block of scales."""
        fp8 = weight.dtype == torch.float8_e4m3fn
        dequantize = block_fp8.dequantize if fp8 else mxfp4.dequantize
        pair = self.part_of(weight, scale)
        if pair is None:
            self.copy_(dequantize(weight.to(self.device), scale.to(self.device)))
        elif isinstance(self.to, Part):
            self.to.keep(*pair)
        else:
            weight, scale = (half.to(self.device) for half in pair)
            self.to.copy_(dequantize(weight, scale))

    def part_of(self, weight: torch.Tensor, scale: torch.Tensor) -> Pair | None:
        """The pair of this part; None where it does not begin with a block, so that it has none."""
        block = block_fp8.BLOCK
        fp8 = weight.dtype == torch.float8_e4m3fn
        tall, wide, packed = (block, block, 1) if fp8 else (1, mxfp4.GROUP, 2)
        rows, columns = self.rows, self.columns
        if rows.start % tall or columns.start % wide:
            return None
        weight = weight[
            rows.start : rows.stop, columns.start // packed : columns.stop // packed
        ]
        scale = scale[
            rows.start // tall : -(-rows.stop // tall),
            columns.start // wide : -(-columns.stop // wide),
        ]
        return weight.contiguous(), scale.contiguous()


class Elsewhere:
    """A published tensor that another rank holds: it is named, and not read."""


ELSEWHERE = Elsewhere()


def check(config: DeepseekV4Config, size: int, replicas: int = 1) -> None:
    """Raise ValueError, in one line, for a model that does not divide among so many ranks."""
    heads, groups = config.num_attention_heads, config.o_groups
    if groups % size:
        raise ValueError(
            f"config: o_groups = {groups}, of {heads} heads, does not divide among {size} tensor-parallel ranks; "
            f"use a size that divides {groups}."
        )
    experts, holders = config.n_routed_experts, size * replicas
    if experts % holders:
        among = f" · {replicas} data-parallel" if replicas > 1 else ""
        raise ValueError(
            f"config: n_routed_experts = {experts} does not divide among {size} tensor-parallel{among} ranks; "
            f"use sizes whose product divides {experts}."
        )


def share(count: int, rank: int, size: int) -> range:
    """The equal part of `count` that a rank has."""
    return range(count * rank // size, count * (rank + 1) // size)


def experts_of(config: DeepseekV4Config, parallel: Parallel) -> range:
    """The routed experts of a rank."""
    holder = parallel.replica * parallel.size + parallel.rank
    return share(config.n_routed_experts, holder, parallel.replicas * parallel.size)


def shared_of(config: DeepseekV4Config, parallel: Parallel) -> range:
    """The rank's part of the shared expert's inner dimension; all of it, on every rank, where blocks do not divide."""
    inner = config.shared_intermediate_size
    if inner % (block_fp8.BLOCK * parallel.size):
        return range(inner)
    return share(inner, parallel.rank, parallel.size)


def vocabulary_of(config: DeepseekV4Config, parallel: Parallel) -> tuple[range, int]:
    """The rank's token ids, and how many rows it has for them: the same on each, so that the last may have some of nobody's."""
    each = -(-config.vocab_size // parallel.size)
    first = min(each * parallel.rank, config.vocab_size)
    return range(first, min(first + each, config.vocab_size)), each


def cut(
    to: torch.Tensor | Part,
    whole: tuple[int, ...],
    rows: range,
    columns: range | None = None,
) -> torch.Tensor | Part | Cut:
    """`to`, where it holds all of a tensor of shape `whole`; else a `Cut`."""
    held = (len(rows), *whole[1:]) if columns is None else (len(rows), len(columns))
    return to if held == whole else Cut(to, whole, rows, columns)
