"""The interpreter must be installed before any vLLM module decorates a kernel."""

from atom_vllm_bridge.engine_kernels import interpreter

interpreter.install()
