"""What every worker of ours adds: the draft's confidence is set beside the target's verdict."""

from typing import Any

from vllm.v1.worker.worker_base import CompilationTimes

from atom_vllm_bridge.verification import Verdicts


class ObservedWorker:
    """Mixed in before one of vLLM's workers."""

    model_runner: Any

    def compile_or_warm_up_model(self) -> CompilationTimes:
        times = super().compile_or_warm_up_model()  # type: ignore[misc]
        runner = self.model_runner
        if runner.adaptive_verification is not None:
            runner.model_state.verdicts = Verdicts(
                runner.speculator, runner.model_state.counted
            )
        return times
