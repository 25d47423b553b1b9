"""The two entry points that vLLM calls, in every process that it starts.

`register_platform` (group vllm.platform_plugins) names the platform class to use; `register_models` (group
vllm.general_plugins) registers the model classes under vLLM's own architecture names. Both may be called any number of
times and in any order.
"""

import logging
import os
from typing import Any

from atom_vllm_bridge import compat, rocm_atom
from atom_vllm_bridge.patches import registry
from atom_vllm_bridge.settings import Settings

logger = logging.getLogger("vllm.atom_vllm_bridge")

ROCM = "vllm.platforms.rocm.RocmPlatform"

# vLLM's platform class → ours. What vLLM finds elsewhere (XPU, TPU) is left alone.
PLATFORMS = {
    "vllm.platforms.cpu.CpuPlatform": "atom_vllm_bridge.platforms.cpu.AtomCpuPlatform",
    "vllm.platforms.cuda.CudaPlatform": "atom_vllm_bridge.platforms.cuda.AtomCudaPlatform",
    ROCM: "atom_vllm_bridge.platforms.rocm.AtomRocmPlatform",
}

# The names are vLLM's: it decides tokenizer mode, graph defaults and draft architecture by them.
MODELS = {
    "DeepseekV4ForCausalLM": "atom_vllm_bridge.target:AtomDeepseekV4ForCausalLM",
    "DSparkDraftModel": "atom_vllm_bridge.dspark:AtomDSparkDraftModel",
    "DeepSeekV4MTPModel": "atom_vllm_bridge.mtp:AtomDeepseekV4MTP",
}


def register_platform() -> str | None:
    """The platform class that vLLM should use, or None to leave the choice to vLLM.

    Raises:
        RuntimeError: the installed vLLM is outside the supported range.
        ValueError: an ATOM_BRIDGE_* variable is unknown or malformed.
    """
    try:
        settings = Settings.read(None, os.environ)
        if settings.disable:
            logger.info("atom-vllm-bridge is disabled by ATOM_BRIDGE_DISABLE=1.")
            return None
        registry.PATCHES.turn_off(settings.disabled_patches)
        compat.check_vllm_version(allow_untested=settings.allow_untested)
        stock = detected_platform()
        if rocm_atom.platform_plugin(os.environ):
            # vLLM allows one; what ours would have done, register_models() sees to.
            if stock != ROCM:
                logger.error(
                    "ROCm/ATOM's plugin brings a platform for AMD GPUs, and vLLM finds %s: set %s=1, which turns it off.",
                    stock or "none here",
                    rocm_atom.OFF,
                )
            return None
        chosen = PLATFORMS.get(stock or "")
        if chosen is None:
            logger.info(
                "atom-vllm-bridge has no platform for %s and leaves vLLM as it is.",
                stock or "this machine",
            )
            return None
        if chosen == PLATFORMS["vllm.platforms.cpu.CpuPlatform"]:
            from atom_vllm_bridge.engine_kernels import interpreter

            interpreter.install()
        return chosen
    except Exception as error:
        # vLLM swallows what a platform plugin raises (at DEBUG), and would go on without a word.
        logger.error("atom-vllm-bridge is not active: %s", error)
        raise


def detected_platform() -> str | None:
    """The qualified name of the platform that vLLM would choose without plugins."""
    from vllm import envs
    from vllm.platforms import builtin_platform_plugins

    if envs.VLLM_TARGET_DEVICE == "cpu":
        return builtin_platform_plugins["cpu"]()
    for name in ("cuda", "rocm", "tpu", "xpu", "cpu"):
        if found := builtin_platform_plugins[name]():
            return found
    return None


def register_models() -> None:
    """Register the model classes and the weight format, if the bridge's platform is the one in use.

    Raises:
        SystemExit: an ATOM_BRIDGE_* variable is unknown or malformed; ends the command with one line.
    """
    try:
        settings = Settings.read(None, os.environ)
    except ValueError as error:
        raise SystemExit(f"atom-vllm-bridge: {error}") from None
    if settings.disable:
        return
    registry.PATCHES.turn_off(settings.disabled_patches)
    try:
        compat.check_vllm_version(allow_untested=settings.allow_untested)
    except RuntimeError as error:
        # Every vLLM command loads this plugin: other models go on, DeepSeek-V4 is vLLM's own, and the log says so.
        logger.error("atom-vllm-bridge registers no model: %s", error)
        return

    from vllm.platforms import current_platform

    from atom_vllm_bridge.platforms.base import AtomPlatform

    if not isinstance(current_platform, AtomPlatform):
        name = type(current_platform).__name__
        if not (rocm_atom.platform_plugin(os.environ) and current_platform.is_rocm()):
            logger.warning(
                "atom-vllm-bridge registers no model: vLLM runs on %s, which it does not extend.",
                name,
            )
            return
        from atom_vllm_bridge.platforms import beside_atom

        beside_atom.extend(current_platform)
        logger.info(
            "ROCm/ATOM is installed and the platform, %s, left to it: DeepSeek-V4 with its MTP and DSpark drafts is "
            "atom-vllm-bridge's unless the setting model is atom, every other model as without it. ATOM_BRIDGE_DISABLE=1 leaves "
            "all to ATOM.",
            name,
        )

    from vllm.model_executor.layers.quantization import register_quantization_config

    register_classes()

    from atom_vllm_bridge.weights import CHECKPOINT_FORMAT, CheckpointFormat

    register_quantization_config(CHECKPOINT_FORMAT)(CheckpointFormat)

    state = registry.load().apply("draft-length", process="engine")
    if state.name not in (registry.APPLIED, registry.ALREADY_UPSTREAM):
        logger.warning(
            "A speculative configuration needs num_speculative_tokens: patch draft-length is %s.",
            state,
        )


# What an architecture meant before it meant the bridge's class: vLLM's own, or ATOM's.
_BEFORE: dict[str, Any] = {}


def register_classes() -> None:
    """Have vLLM's architecture names mean the bridge's classes, or what they meant before, where ATOM's model is chosen."""
    from vllm.model_executor.models.registry import ModelRegistry

    left = rocm_atom.serves_deepseek_v4(os.environ)
    for architecture, path in MODELS.items():
        known = ModelRegistry.models.get(architecture)
        if class_of(known) != path:
            _BEFORE[architecture] = known
            if not left:
                ModelRegistry.register_model(architecture, path)
        elif left and _BEFORE.get(architecture) is not None:
            ModelRegistry.models[architecture] = _BEFORE[architecture]


def class_of(registered: Any) -> str:
    """Of an entry of vLLM's registry, "module:class"."""
    return f"{getattr(registered, 'module_name', '')}:{getattr(registered, 'class_name', '')}"
