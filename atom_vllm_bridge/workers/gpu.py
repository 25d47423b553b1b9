"""On a GPU, where vLLM's own graphs give the costs of steps."""

from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import CompilationTimes

from atom_vllm_bridge.verification import watch


class AtomGpuWorker(Worker):
    """vLLM's GPU worker; it watches the adaptive budget."""

    def compile_or_warm_up_model(self) -> CompilationTimes:
        times = super().compile_or_warm_up_model()
        watch(self.model_runner)
        return times
