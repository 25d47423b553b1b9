"""AMD GPUs."""

from vllm.platforms.rocm import RocmPlatform

from atom_vllm_bridge.platforms.base import AtomPlatform


class AtomRocmPlatform(AtomPlatform, RocmPlatform):
    """vLLM's ROCm platform, with what DeepSeek-V4 through the bridge asks of a configuration."""
