"""DeepSeek-V4's configuration is seen as it was asked for, before vLLM decides anything.

Where breakable graphs are its default, vLLM puts CompilationMode.NONE in place of any mode, and only then shows the
configuration to the platform. Before that it asks its class for the architecture, which for DeepSeek-V4 is the one for
all that have nothing to say.
"""

import functools
from collections.abc import Callable
from typing import Any

from atom_vllm_bridge.patches.registry import PATCHES, Fingerprint, Patch

LOOKS: list[Callable[[Any], None]] = []
"""What looks at a configuration first; each once."""


def look_first(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """The same, after `LOOKS`."""

    @functools.wraps(original)
    def verify_and_update_config(vllm_config: Any) -> None:
        for look in LOOKS:
            look(vllm_config)
        original(vllm_config)

    return verify_and_update_config


def _platform_sees_what_was_asked() -> bool:
    from vllm.config import VllmConfig

    # The replacement of the mode.
    return not hasattr(VllmConfig, "_maybe_enable_breakable_cudagraph")


PATCHES.add(
    Patch(
        id="early-look",
        target="vllm.model_executor.models.config:VerifyAndUpdateConfig.verify_and_update_config",
        runner="any",
        process="engine",
        why=(
            "The compilation mode that was asked for is gone before the platform sees "
            "it, so that the start could not say what became of it."
        ),
        upstream="no issue known",
        without=(
            "The table at the start may show vLLM's default where it should show what was "
            "asked for."
        ),
        test="tests/plugin/test_patches.py::TestWithout::test_the_mode_that_was_asked_for_is_gone",
        remove_when=_platform_sees_what_was_asked,
        expects=Fingerprint(signature="(vllm_config)", source="45d8cdebd7117e6f"),
        apply=look_first,
    )
)
