"""vLLM's process groups, as models/ takes them.

Heads, vocabulary and experts are split over vLLM's tensor-parallel group. With expert parallelism the experts are also split
over data-parallel ranks, and tokens go between these: gathered before the experts, added up and handed back after them.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_dp_group, get_tp_group
from vllm.forward_context import get_forward_context

from atom_vllm_bridge.models.deepseek_v4.parallel import ALONE, Gathered, Parallel


def parallel_of(vllm_config: VllmConfig, size: int | None = None) -> Parallel:
    """This process's place, for a model that is about to be built.

    Args:
        size: tensor-parallel ranks that share the model; by default the target's. A draft may also be whole on each, 1.
    """
    config = vllm_config.parallel_config
    size = config.tensor_parallel_size if size is None else size
    place = ALONE
    if size > 1:
        group = get_tp_group()
        place = Parallel(
            group.rank_in_group,
            group.world_size,
            all_reduce=lambda x: group.all_reduce(x.contiguous()),
            all_gather=lambda x: group.all_gather(x.contiguous()),
        )
    if not config.enable_expert_parallel or config.data_parallel_size == 1:
        return place
    return replace(
        place,
        replica=get_dp_group().rank_in_group,
        replicas=get_dp_group().world_size,
        gather=_gather,
        scatter=_scatter,
    )


def _gather(tensors: Sequence[torch.Tensor]) -> Gathered:
    given = [tensor.contiguous() for tensor in tensors]
    return tuple(get_dp_group().all_gatherv(given, dim=0, sizes=_tokens()))


def _scatter(x: torch.Tensor) -> torch.Tensor:
    return get_dp_group().reduce_scatterv(x.contiguous(), dim=0, sizes=_tokens())


def _tokens() -> list[int]:
    """How many each data-parallel rank has in this forward; known on the host, so that a graph can hold it."""
    return get_forward_context().dp_metadata.num_tokens_across_dp_cpu.tolist()
