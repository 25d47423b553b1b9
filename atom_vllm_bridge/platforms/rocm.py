"""AMD GPUs."""

import os
from typing import TYPE_CHECKING, ClassVar

from vllm.platforms.rocm import RocmPlatform

from atom_vllm_bridge import plugin
from atom_vllm_bridge.platforms import rocm_variables
from atom_vllm_bridge.platforms.base import WORKERS, AtomPlatform

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.utils.argparse_utils import FlexibleArgumentParser

VLLMS_WORKER = "vllm.v1.worker.gpu_worker.Worker"
WORKER = "atom_vllm_bridge.workers.rocm.AtomRocmWorker"


class AtomOnRocm(AtomPlatform):
    """Mixed in before a ROCm platform: vLLM's, or one that was made from it.

    Entry points run in any order, and ROCm/ATOM's registers DeepSeek-V4 too. So the bridge's classes are registered once more in
    the two hooks that vLLM calls after all entry points and before it looks a model up, in the front end and in a worker.
    """

    # The class that ROCm/ATOM's plugin brought, by name.
    left_to: ClassVar[str] = ""

    @classmethod
    def pre_register_and_update(
        cls, parser: "FlexibleArgumentParser | None" = None
    ) -> None:
        plugin.register_classes()
        super().pre_register_and_update(parser)

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        plugin.register_classes()
        super().register_triton_kernel_overrides()  # type: ignore[misc]

    @classmethod
    def _check_and_update_deepseek_v4(cls, vllm_config: "VllmConfig") -> None:
        rocm_variables.refuse_what_is_not_honoured(os.environ)
        super()._check_and_update_deepseek_v4(vllm_config)
        parallel = vllm_config.parallel_config
        if parallel.worker_cls in (VLLMS_WORKER, WORKERS[VLLMS_WORKER]):
            parallel.worker_cls = WORKER


class AtomRocmPlatform(AtomOnRocm, RocmPlatform):
    """vLLM's ROCm platform, with what DeepSeek-V4 through the bridge asks of a configuration."""
