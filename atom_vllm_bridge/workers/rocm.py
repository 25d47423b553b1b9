"""On an AMD GPU, where graphs that are thrown away would leave their addresses in aiter's collectives."""

import logging

from vllm.distributed import parallel_state

from atom_vllm_bridge.workers.gpu import AtomGpuWorker

logger = logging.getLogger("vllm.atom_vllm_bridge")


class AtomRocmWorker(AtomGpuWorker):
    """The bridge's GPU worker; with aiter's collectives no graphs are captured only to measure their memory."""

    def determine_available_memory(self) -> int:
        if has_aiter_collectives():
            logger.info(
                "The memory of graphs is not measured beforehand, which would leave the addresses of discarded graphs in aiter's "
                "collectives: if the capture runs out of memory, lower --gpu-memory-utilization."
            )
            self.model_runner.profile_cudagraph_memory = lambda: 0
        return super().determine_available_memory()


def has_aiter_collectives() -> bool:
    """Whether one of this rank's groups sums or gathers through aiter."""
    return any(
        getattr(group.device_communicator, "aiter_ar_comm", None) is not None
        for group in (parallel_state.get_tp_group(), parallel_state.get_dp_group())
    )
