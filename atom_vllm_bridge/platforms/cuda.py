"""NVIDIA GPUs."""

from vllm.platforms.cuda import CudaPlatform

from atom_vllm_bridge.platforms.base import AtomPlatform


class AtomCudaPlatform(AtomPlatform, CudaPlatform):
    """vLLM's CUDA platform, with what DeepSeek-V4 through the bridge asks of a configuration."""
