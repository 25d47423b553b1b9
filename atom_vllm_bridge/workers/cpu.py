"""On a CPU, where vLLM captures no graphs and so would not know what a step costs."""

from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.worker_base import CompilationTimes

from atom_vllm_bridge.verification import watch
from atom_vllm_bridge.workers.step_costs import cost_curves


class AtomCpuWorker(CPUWorker):
    """vLLM's CPU worker; before it serves, it times steps for the adaptive budget, which it then watches."""

    def compile_or_warm_up_model(self) -> CompilationTimes:
        manager = self.model_runner.adaptive_verification
        if manager is not None:
            manager.set_cost_curves(*cost_curves(self.model_runner))
        times = super().compile_or_warm_up_model()
        watch(self.model_runner)
        return times
