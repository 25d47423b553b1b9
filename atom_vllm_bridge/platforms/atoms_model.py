"""The setting `model` = `atom`: DeepSeek-V4 as the installed ROCm/ATOM serves it, and when that is refused.

The class is ATOM's, which its plugin registered, and so are the configuration, the caches and the kernels: the bridge steps
aside. It does so before anything is decided, by a variable that the processes of a server inherit.
"""

import functools
import logging
import os
from typing import TYPE_CHECKING, Any

from atom_vllm_bridge import atom_contract, plugin, rocm_atom
from atom_vllm_bridge.platforms.refusal import Refused
from atom_vllm_bridge.settings import ATOM, MODEL, Settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.atom_vllm_bridge")

BREAKABLE = "VLLM_USE_BREAKABLE_CUDAGRAPH"
TARGET = "DeepseekV4ForCausalLM"
DRAFTS = {"mtp": "DeepSeekV4MTPModel", "dspark": "DSparkDraftModel"}
# Settings that say something of the native model alone.
NATIVES = ("ops", "state_layout", "prefix_rollback")


def choose(additional_config: dict[str, Any]) -> None:
    """Have this process, and those that it starts, use the model that --additional-config names."""
    try:
        asked = Settings.read(additional_config, os.environ).model
    except ValueError:
        # Refused in one line with the rest of the configuration.
        return
    if asked != Settings.read(None, os.environ).model:
        os.environ[MODEL] = asked


def refuse_what_it_cannot_honour(vllm_config: "VllmConfig", settings: Settings) -> None:
    """Raise `Refused` where ATOM's model is asked for and cannot serve; where it serves, say so in the log.

    Args:
        vllm_config: of DeepSeek-V4.
        settings: of this configuration.
    """
    from vllm.platforms import current_platform

    process = Settings.read(None, os.environ).model
    late = (
        f"model = {settings.model} comes too late, since the classes of model = {process} are in place before a configuration is "
        f"made in Python. Set {MODEL}={settings.model} before vLLM is imported."
    )
    if settings.model != ATOM:
        if rocm_atom.serves_deepseek_v4(os.environ):
            raise Refused(late)
        return
    back = "or leave model = atom out to serve with the native model"
    if not current_platform.is_rocm():
        raise Refused(
            f"model = atom needs an AMD GPU, and vLLM runs on {vllm_config.device_config.device_type} here. Leave it out."
        )
    if reason := rocm_atom.absence(os.environ):
        raise Refused(f"model = atom, but {reason}, {back}.")
    if process != ATOM:
        raise Refused(late)
    for name in NATIVES:
        if getattr(settings, name) != getattr(Settings(), name):
            raise Refused(
                f"{name} is a setting of the native model, and model = atom is asked for. Leave one of them out."
            )
    speculative = vllm_config.speculative_config
    method = None if speculative is None else speculative.method
    needed = {TARGET: "DeepSeek-V4"}
    if method in DRAFTS:
        needed[DRAFTS[method]] = f"{method} draft of DeepSeek-V4"
    classes = registered(*needed)
    for architecture, what in needed.items():
        if not rocm_atom.brings(classes[architecture]):
            raise Refused(
                f"model = atom, but the plugin of the installed ROCm/ATOM registers no {architecture}, so it has no {what}. "
                f"Install another ATOM, {back}."
            )
    if lack := atom_contract.lack(*classes.values()):
        raise Refused(
            f"model = atom, but the installed ROCm/ATOM {lack}, against what is called. Install another ATOM, {back}."
        )
    if method != "dspark" and vllm_config.use_v2_model_runner:
        raise Refused(
            "model = atom needs Model Runner V1, under which alone ATOM tries its DeepSeek-V4 and drives its MTP draft, and "
            f"vLLM chooses V2. Set VLLM_USE_V2_MODEL_RUNNER=0, {back}."
        )
    if os.environ.get(BREAKABLE) == "1":
        raise Refused(
            f"{BREAKABLE}=1 would capture ATOM's attention with the batch at hand, and replay that for others. "
            f"Set it to 0, {back}."
        )
    _say(", ".join(classes.values()))


def registered(*architectures: str) -> dict[str, str]:
    """What each means in this process, as "module:class"."""
    from vllm.model_executor.models.registry import ModelRegistry

    return {
        name: plugin.class_of(ModelRegistry.models.get(name)) for name in architectures
    }


@functools.cache
def _say(classes: str) -> None:
    logger.info("model = atom: DeepSeek-V4 is served by ROCm/ATOM's %s.", classes)
