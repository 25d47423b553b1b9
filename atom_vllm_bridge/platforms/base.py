"""What the bridge asks of vLLM's configuration for DeepSeek-V4, on any device. Every other model is left alone."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from atom_vllm_bridge.models.deepseek_v4 import checkpoint
from atom_vllm_bridge.models.deepseek_v4.config import DeepseekV4Config
from atom_vllm_bridge.models.deepseek_v4.shards import check_shards
from atom_vllm_bridge.models.ops import registry
from atom_vllm_bridge.platforms.refusal import Refused, prepare_command_line
from atom_vllm_bridge.settings import Settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.utils.argparse_utils import FlexibleArgumentParser

ARCHITECTURE = "DeepseekV4ForCausalLM"
DTYPES = (torch.bfloat16, torch.float32)
KV_CACHE_DTYPES = ("auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_ds_mla")
# Of --load-format, those that read *.safetensors and so are held to their headers.
SAFETENSORS_FORMATS = ("auto", "safetensors")
# Blocks of every group divide it, and a prefix hit lands on it.
BLOCK_SIZE = 128


def serves(vllm_config: "VllmConfig") -> bool:
    """Whether the configuration is of a model that the bridge brings."""
    model = vllm_config.model_config
    return model is not None and ARCHITECTURE in (model.architectures or ())


def refuse_what_cannot_be_honoured(vllm_config: "VllmConfig") -> None:
    """Raise `Refused` for what DeepSeek-V4 through the bridge does not do.

    Raises:
        Refused: Model Runner V1, a dtype, cache dtype, block size or kind of parallelism that is not supported.
    """
    from vllm import envs

    # Not at the top: it asks for the platform that this module helps to define.
    from atom_vllm_bridge.weights import CHECKPOINT_FORMAT

    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    own = "set ATOM_BRIDGE_DISABLE=1 to serve with vLLM's own model"
    if envs.VLLM_USE_V2_MODEL_RUNNER is False:
        raise Refused(
            "DeepSeek-V4 needs Model Runner V2, but VLLM_USE_V2_MODEL_RUNNER=0 is set. "
            f"Unset it, or {own}."
        )
    if not vllm_config.use_v2_model_runner:
        missing = ", ".join(vllm_config._get_v2_model_runner_unsupported_features())
        raise Refused(
            "DeepSeek-V4 needs Model Runner V2, which vLLM does not choose here "
            f"({missing or 'Triton is missing'}). Drop what it does not support, or {own}."
        )
    if model.dtype not in DTYPES:
        raise Refused(
            f"--dtype {str(model.dtype).removeprefix('torch.')} overflows in DeepSeek-V4's residual streams. "
            "Use bfloat16 or float32."
        )
    cache = vllm_config.cache_config
    if cache.cache_dtype not in KV_CACHE_DTYPES:
        raise Refused(
            f"--kv-cache-dtype {cache.cache_dtype} has no codec here. Use one of {', '.join(KV_CACHE_DTYPES)}."
        )
    if cache.user_specified_block_size and cache.block_size % BLOCK_SIZE:
        raise Refused(
            f"--block-size {cache.block_size} does not hold whole entries of 128 tokens. "
            "Use a multiple of 128, or leave it out."
        )
    for name, size in (
        ("--data-parallel-size", parallel.data_parallel_size),
        ("--tensor-parallel-size", parallel.tensor_parallel_size),
        ("--pipeline-parallel-size", parallel.pipeline_parallel_size),
        ("--decode-context-parallel-size", parallel.decode_context_parallel_size),
    ):
        if size > 1:
            raise Refused(
                f"{name} {size} is not supported: the native model runs on one rank. Use 1, or {own}."
            )
    if parallel.enable_expert_parallel:
        raise Refused(
            f"--enable-expert-parallel needs several ranks, and the native model runs on one. Drop it, or {own}."
        )
    if model.quantization not in (None, CHECKPOINT_FORMAT):
        raise Refused(
            f"--quantization {model.quantization} would be ignored: the layout is read from the checkpoint's tensors. "
            f"Drop it, or {own}."
        )
    for name, given in (
        ("--speculative-config", vllm_config.speculative_config is not None),
        ("--kv-transfer-config", vllm_config.kv_transfer_config is not None),
        ("--enable-lora", vllm_config.lora_config is not None),
        ("--enable-prompt-embeds", model.enable_prompt_embeds),
        ("--runner pooling", model.runner_type == "pooling"),
        (
            "--disable-hybrid-kv-cache-manager",
            vllm_config.scheduler_config.disable_hybrid_kv_cache_manager,
        ),
    ):
        if given:
            raise Refused(
                f"{name} is not supported with the native model. Drop it, or {own}."
            )


def refuse_an_unfit_checkpoint(vllm_config: "VllmConfig") -> None:
    """Raise `Refused` for a checkpoint that would fail to load, before any process is started for it.

    Reads config.json and, of a checkpoint in a local directory, the headers of the shards.

    Raises:
        Refused: a config that is not DeepSeek-V4's; a shard that is truncated; a tensor that is missing, left over, or of
            a wrong shape or dtype.
    """
    model = vllm_config.model_config
    directory = Path(model.model)
    try:
        DeepseekV4Config.from_hf(model.hf_config.to_dict())
        if (
            directory.is_dir()
            and vllm_config.load_config.load_format in SAFETENSORS_FORMATS
        ):
            headers = check_shards(directory)
            # Overrides change what the shards should hold; the loader still accounts for every tensor.
            if not model.hf_overrides:
                config = json.loads((directory / "config.json").read_bytes())
                layout = checkpoint.detect_layout(headers)
                checkpoint.check_headers(
                    checkpoint.tensor_table(config, layout, stages=0),
                    headers,
                    ignored=("mtp.",),
                )
    except checkpoint.CheckpointError as error:
        first, *others = error.problems
        more = f" {len(others)} more: atom-vllm-bridge doctor --model {directory} counts them."
        raise Refused(f"checkpoint: {first}" + more * bool(others)) from None
    except ValueError as error:
        raise Refused(str(error)) from None


class AtomPlatform:
    """Mixed in before one of vLLM's platform classes, whose `_enum` stays what it is."""

    @classmethod
    def pre_register_and_update(
        cls, parser: "FlexibleArgumentParser | None" = None
    ) -> None:
        super().pre_register_and_update(parser)  # type: ignore[misc]
        if parser is not None:
            prepare_command_line(parser)

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        """Validate and complete the configuration.

        Raises:
            Refused: the "atom" part of --additional-config is malformed, or see `refuse_what_cannot_be_honoured` and
                `refuse_an_unfit_checkpoint`.
        """
        try:
            settings = Settings.read(vllm_config.additional_config, os.environ)
        except ValueError as error:
            raise Refused(str(error)) from None
        if not serves(vllm_config):
            super().check_and_update_config(vllm_config)  # type: ignore[misc]
            return
        refuse_what_cannot_be_honoured(vllm_config)
        refuse_an_unfit_checkpoint(vllm_config)
        try:
            registry.configure(settings.ops)
        except ValueError as error:
            raise Refused(str(error)) from None
        cls._check_and_update_deepseek_v4(vllm_config)

    @classmethod
    def _check_and_update_deepseek_v4(cls, vllm_config: "VllmConfig") -> None:
        from vllm.config import CompilationMode
        from vllm.config.compilation import CUDAGraphMode

        cache = vllm_config.cache_config
        asked = cache.block_size if cache.user_specified_block_size else BLOCK_SIZE
        super().check_and_update_config(vllm_config)  # type: ignore[misc]
        cache.block_size = asked
        compilation = vllm_config.compilation_config
        compilation.mode = CompilationMode.NONE
        compilation.cudagraph_mode = CUDAGraphMode.NONE
