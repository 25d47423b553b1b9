"""`--speculative-config '{"method": "dspark"}'` alone takes the length of a draft from the checkpoint.

vLLM looks a length up only for a draft that has a checkpoint of its own. A draft inside the target's is found once a
length is given, and without one its configuration ends half made. The length given here is what the draft was trained for:
`dspark_block_size`, or for MTP the number of its layers.
"""

import functools
from collections.abc import Callable
from typing import Any

from atom_vllm_bridge.patches.registry import PATCHES, Fingerprint, Patch

ARCHITECTURE = "DeepseekV4ForCausalLM"
TRAINED_LENGTH = {"dspark": "dspark_block_size", "mtp": "num_nextn_predict_layers"}


def fill_in_the_length(original: Callable[..., Any]) -> Callable[..., Any]:
    """A `create_speculative_config` that completes what names only a method."""

    @functools.wraps(original)
    def create_speculative_config(
        self: Any, target_model_config: Any, target_parallel_config: Any
    ) -> Any:
        given = {
            key.replace("-", "_"): value
            for key, value in (self.speculative_config or {}).items()
        }
        method = given.get("method", self.spec_method)
        complete = (
            given.get("model", self.spec_model) is not None
            or given.get("num_speculative_tokens", self.spec_tokens) is not None
        )
        ours = ARCHITECTURE in target_model_config.architectures
        if ours and method in TRAINED_LENGTH:
            key = TRAINED_LENGTH[method]
            length = getattr(target_model_config.hf_config, key, None)
            if not length:
                raise ValueError(
                    f"atom-vllm-bridge: speculative method {method} is asked for, but config.json has no {key}: the "
                    "checkpoint holds no such draft. Name the method that it has, or drop --speculative-config."
                )
            if not complete:
                self.speculative_config = {**given, "num_speculative_tokens": length}
        return original(self, target_model_config, target_parallel_config)

    return create_speculative_config


def _vllm_looks_it_up() -> bool:
    import inspect

    from vllm.config import SpeculativeConfig

    source = inspect.getsource(SpeculativeConfig.__post_init__)
    return (
        "self.model is None and self.num_speculative_tokens is not None" not in source
    )


PATCHES.add(
    Patch(
        id="draft-length",
        target="vllm.engine.arg_utils:EngineArgs.create_speculative_config",
        runner="any",
        process="engine",
        why=(
            "A speculative configuration that names only the method of a draft inside "
            "the target's checkpoint is not completed."
        ),
        upstream="no issue known",
        without=(
            "`num_speculative_tokens` must be given beside the method; vLLM says so and "
            "stops."
        ),
        test="tests/plugin/test_patches.py::TestWithout::test_a_method_alone_is_incomplete",
        remove_when=_vllm_looks_it_up,
        expects=Fingerprint(
            signature="(self, target_model_config, target_parallel_config)",
            source="f64805340e5ddc72",
        ),
        apply=fill_in_the_length,
    )
)
