"""CPUs: Model Runner V2 on Triton's interpreter and its replacements, and defaults that fit a small machine."""

import logging
import os
from typing import TYPE_CHECKING, ClassVar

import torch
from vllm import envs
from vllm.platforms.cpu import CpuPlatform

from atom_vllm_bridge.platforms.base import (
    WORKERS,
    AtomPlatform,
    serves,
    verifies_adaptively,
)
from atom_vllm_bridge.platforms.refusal import Refused

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.compilation import CUDAGraphMode

logger = logging.getLogger("vllm.atom_vllm_bridge")

GIB = 1 << 30
# A step's tokens all hold rows until it settles (and async scheduling keeps two steps in flight).
MAX_BATCHED_TOKENS = 1024
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


class AtomCpuPlatform(AtomPlatform, CpuPlatform):
    """vLLM's CPU platform; DeepSeek-V4 keeps chunked prefill, prefix caching and async scheduling on it."""

    # Environment variables that the bridge set for the model configured last, to be unset for the next.
    _set_here: ClassVar[dict[str, str]] = {}
    # Kernels are replaced once a process, engines come and go.
    _stock_replaced: ClassVar[bool] = False

    @classmethod
    def _set_environment(cls, values: dict[str, str]) -> None:
        """Set what the user did not set, and take back what was set for another model."""
        for name, value in cls._set_here.items():
            if os.environ.get(name) == value:
                del os.environ[name]
        cls._set_here = {k: v for k, v in values.items() if k not in os.environ}
        os.environ.update(cls._set_here)
        if envs._is_envs_cache_enabled():
            # An engine that runs in this process has frozen what vLLM reads of it.
            envs.disable_envs_cache()
            envs.enable_envs_cache()

    @staticmethod
    def _show_triton(present: bool) -> None:
        """Let modules that vLLM imports from now on see a Triton, or none, as without the plugin."""
        from vllm import triton_utils
        from vllm.triton_utils import importing

        triton_utils.HAS_TRITON = importing.HAS_TRITON = present

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: "VllmConfig") -> None:
        super().apply_config_platform_defaults(vllm_config)
        if vllm_config.model_config is None:
            return
        if not serves(vllm_config):
            # With a Triton backend present V2 would become the default of every model; without the plugin it is V1.
            cls._set_environment({RUNNER: "0"})
            cls._show_triton(os.environ[RUNNER] != "0")
            return
        cls._show_triton(True)
        # oneDNN keeps code for each shape of a product, and experts see every number of rows: at its default of 1,024 that
        # is hundreds of MiB, and no faster.
        environment = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128"}
        if torch.get_num_threads() <= 4:
            # On few cores vLLM's automatic binding would keep half of them, or all but one, for the scheduler.
            environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        cls._set_environment(environment)

    @classmethod
    def _check_and_update_deepseek_v4(cls, vllm_config: "VllmConfig") -> None:
        cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
        # vLLM's CPU platform switches these off, or to what its own DeepSeek-V4 kernels need.
        kept = [
            (scheduler, "async_scheduling"),
            (scheduler, "enable_chunked_prefill"),
            (scheduler, "max_num_batched_tokens"),
            (cache, "enable_prefix_caching"),
        ]
        before = [getattr(owner, name) for owner, name in kept]
        super()._check_and_update_deepseek_v4(vllm_config)
        for (owner, name), value in zip(kept, before, strict=True):
            setattr(owner, name, value)
        cls._limit_batched_tokens(vllm_config)
        cls._size_cache(vllm_config)
        worker = vllm_config.parallel_config.worker_cls
        if verifies_adaptively(vllm_config) and worker not in WORKERS.values():
            raise Refused(
                f"enable_adaptive_verification on a CPU needs a worker that times steps, and --worker-cls {worker} does not. "
                "Leave --worker-cls out, or drop enable_adaptive_verification from --speculative-config."
            )

    @classmethod
    def graph_mode(cls, vllm_config: "VllmConfig") -> "CUDAGraphMode":
        """Nothing is captured on a CPU; vLLM lets adaptive verification pass where graphs of decode steps are named."""
        from vllm.config.compilation import CUDAGraphMode

        if verifies_adaptively(vllm_config):
            return CUDAGraphMode.FULL_DECODE_ONLY
        return super().graph_mode(vllm_config)

    @staticmethod
    def graph_pool_handle() -> tuple[int, int]:
        """vLLM's graph managers ask for it where graphs are named; nothing is ever put into this one."""
        return 0, 0

    @classmethod
    def _limit_batched_tokens(cls, vllm_config: "VllmConfig") -> None:
        from vllm.engine.arg_utils import EngineArgs

        scheduler = vllm_config.scheduler_config
        world = vllm_config.parallel_config.world_size
        defaults = set(EngineArgs.get_batch_defaults(world)[0].values())
        asked = scheduler.max_num_batched_tokens
        # vLLM's default cannot be told from the same number typed by the user; any other number is the user's.
        if asked in defaults and scheduler.enable_chunked_prefill:
            scheduler.max_num_batched_tokens = max(
                MAX_BATCHED_TOKENS, scheduler.max_num_seqs
            )
            logger.info(
                "max_num_batched_tokens: %d (vLLM's default) → %d, which a CPU cache holds; pass another value to choose.",
                asked,
                scheduler.max_num_batched_tokens,
            )

    @classmethod
    def _size_cache(cls, vllm_config: "VllmConfig") -> None:
        import psutil

        cache = vllm_config.cache_config
        default = type(cache)().gpu_memory_utilization
        if (
            cache.kv_cache_memory_bytes is None
            and cache.gpu_memory_utilization == default
        ):
            parallel = vllm_config.parallel_config
            here = parallel.world_size * max(1, parallel.data_parallel_size_local)
            size = min(4 * GIB, psutil.virtual_memory().available // (4 * here))
            cache.kv_cache_memory_bytes = size
            logger.info(
                "KV cache: %.1f GiB; choose with --kv-cache-memory-bytes or VLLM_CPU_KVCACHE_SPACE.",
                size / GIB,
            )

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "atom_vllm_bridge.platforms.communicator.AtomCpuCommunicator"

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        from atom_vllm_bridge import engine_kernels

        if os.environ.get(RUNNER) != "0":
            engine_kernels.register()
            return
        # Another model, in a process that may not have seen its configuration: vLLM's own replacements for its V1 runner,
        # which it skips where Triton seems present.
        cls._show_triton(False)
        if not cls._stock_replaced:
            super().register_triton_kernel_overrides()
            cls._stock_replaced = True
