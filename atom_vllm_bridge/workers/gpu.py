"""On a GPU, where vLLM's own graphs give the costs of steps."""

from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import CompilationTimes

from atom_vllm_bridge.verification import watch
from atom_vllm_bridge.workers.compile_ahead import compiling_ahead


class AtomGpuWorker(Worker):
    """vLLM's GPU worker; it compiles kernels side by side before it captures graphs, and watches the adaptive budget."""

    def compile_or_warm_up_model(self) -> CompilationTimes:
        if not self.model_config.enforce_eager:
            with compiling_ahead():
                for tokens in self._captured():
                    self.model_runner._dummy_run(tokens, uniform_decode=True)
        times = super().compile_or_warm_up_model()
        watch(self.model_runner)
        return times

    def _captured(self) -> list[int]:
        """The tokens of each decode step that will be captured: whole requests."""
        each = self.model_runner.decode_query_len
        most = self.model_runner.max_num_reqs * each
        sizes = self.vllm_config.compilation_config.cudagraph_capture_sizes or []
        whole = {-(-size // each) * each for size in sizes}
        return sorted(tokens for tokens in whole if tokens <= most)
