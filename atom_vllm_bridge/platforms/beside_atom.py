"""AMD GPUs where ROCm/ATOM's plugin brought the platform: it answers for every model but DeepSeek-V4."""

from typing import TYPE_CHECKING, Any, ClassVar

from vllm.platforms.rocm import RocmPlatform

from atom_vllm_bridge.platforms.rocm import AtomOnRocm, AtomRocmPlatform
from atom_vllm_bridge.settings import MODEL

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def extend(platform: Any) -> None:
    """Have the platform in use ask the bridge about DeepSeek-V4.

    Args:
        platform: `vllm.platforms.current_platform`. It stays an instance of the class that vLLM chose: ATOM's, or vLLM's own
            where ATOM's plugin could not be loaded.
    """
    kind = type(platform)
    platform.__class__ = AtomRocmPlatform if kind is RocmPlatform else _beside(kind)


def _beside(kind: Any) -> type:
    class AtomBesidePlatform(AtomOnRocm, kind):
        """The given platform, and the bridge's answers for DeepSeek-V4."""

        left_to = kind.__name__
        # Ray hands these on; processes of this machine inherit them.
        additional_env_vars: ClassVar[list[str]] = [*kind.additional_env_vars, MODEL]

        @classmethod
        def _check_of_vllm(cls, vllm_config: "VllmConfig") -> None:
            # ATOM's own prepares vLLM for ATOM's DeepSeek-V4, whose windows lie outside the blocks: it takes blocks off every
            # prefix hit, and the bridge's windows with them.
            RocmPlatform.check_and_update_config.__func__(cls, vllm_config)

    return AtomBesidePlatform
