"""On a GPU, where vLLM's own graphs give the costs of steps."""

from vllm.v1.worker.gpu_worker import Worker

from atom_vllm_bridge.workers.observed import ObservedWorker


class AtomGpuWorker(ObservedWorker, Worker):
    """vLLM's GPU worker, observed."""
