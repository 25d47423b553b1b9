"""What the bridge asks of vLLM's configuration for DeepSeek-V4, on any device. Every other model is left alone."""

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from atom_vllm_bridge import engine_ops, metrics, rocm_atom, snapshots
from atom_vllm_bridge.models.deepseek_v4 import checkpoint, sharding
from atom_vllm_bridge.models.deepseek_v4.config import DeepseekV4Config
from atom_vllm_bridge.models.deepseek_v4.dspark import DSparkConfig
from atom_vllm_bridge.models.deepseek_v4.shards import check_shards
from atom_vllm_bridge.patches import early_look
from atom_vllm_bridge.patches.registry import PATCHES, VARIABLE, load
from atom_vllm_bridge.platforms import atoms_model
from atom_vllm_bridge.platforms.refusal import Refused, prepare_command_line
from atom_vllm_bridge.settings import Settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.compilation import CUDAGraphMode
    from vllm.utils.argparse_utils import FlexibleArgumentParser

ARCHITECTURE = "DeepseekV4ForCausalLM"
DTYPES = (torch.bfloat16, torch.float32)
KV_CACHE_DTYPES = ("auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_ds_mla")
# Methods of --speculative-config, for drafts within the target's checkpoint.
DRAFTS = ("dspark", "mtp")
# Of --load-format, those that read *.safetensors and so are held to their headers.
SAFETENSORS_FORMATS = ("auto", "safetensors")
# vLLM's workers, and those that also watch adaptive verification.
WORKERS = {
    "vllm.v1.worker.cpu_worker.CPUWorker": "atom_vllm_bridge.workers.cpu.AtomCpuWorker",
    "vllm.v1.worker.gpu_worker.Worker": "atom_vllm_bridge.workers.gpu.AtomGpuWorker",
}
PICKLED_FORMATS = ("pt", "npcache")
# Of a compilation config: the model config with which it was completed. Copies of a configuration share both, those pickled for
# a worker too; a configuration that is made anew for the same model does not.
COMPLETED = "_atom_bridge_completed"
# Blocks of every group divide it, and a prefix hit lands on it.
BLOCK_SIZE = 128


def serves(vllm_config: "VllmConfig") -> bool:
    """Whether the configuration is of a model that the bridge brings."""
    return is_deepseek_v4(vllm_config) and not rocm_atom.serves_deepseek_v4(os.environ)


def is_deepseek_v4(vllm_config: "VllmConfig") -> bool:
    model = vllm_config.model_config
    return model is not None and ARCHITECTURE in (model.architectures or ())


def method_of(vllm_config: "VllmConfig") -> str | None:
    """The speculative method, or None."""
    speculative = vllm_config.speculative_config
    return None if speculative is None else speculative.method


def verifies_adaptively(vllm_config: "VllmConfig") -> bool:
    """Whether a budget of draft tokens is split over requests on the device."""
    speculative = vllm_config.speculative_config
    return speculative is not None and speculative.enable_adaptive_verification


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
        ("--pipeline-parallel-size", parallel.pipeline_parallel_size),
        ("--decode-context-parallel-size", parallel.decode_context_parallel_size),
        ("--prefill-context-parallel-size", parallel.prefill_context_parallel_size),
    ):
        if size > 1:
            raise Refused(
                f"{name} {size} is not supported: of the native model, layers are split by heads, experts and vocabulary, "
                f"by --tensor-parallel-size and --enable-expert-parallel. Use 1, or {own}."
            )
    _refuse_other_ways_of_experts(vllm_config)
    if model.quantization not in (None, CHECKPOINT_FORMAT):
        raise Refused(
            f"--quantization {model.quantization} would be ignored: the layout is read from the checkpoint's tensors. "
            f"Drop it, or {own}."
        )
    speculative = vllm_config.speculative_config
    of_draft = None if speculative is None else speculative.draft_load_config
    for name, config in (
        ("--load-format", vllm_config.load_config),
        ("draft_load_config's load_format", of_draft),
    ):
        if config is not None and str(config.load_format) in PICKLED_FORMATS:
            raise Refused(
                f"{name} {config.load_format} unpickles weights, which can run code. "
                "Take a checkpoint in *.safetensors, and leave it out."
            )
    _refuse_a_draft_of_another_kind(vllm_config)
    for name, given in (
        ("--kv-transfer-config", vllm_config.kv_transfer_config is not None),
        ("--cpu-offload-gb", vllm_config.offload_config.uva.cpu_offload_gb > 0),
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


def _refuse_other_ways_of_experts(vllm_config: "VllmConfig") -> None:
    parallel, default = vllm_config.parallel_config, "allgather_reducescatter"
    for name, given in (
        ("--enable-eplb", parallel.enable_eplb),
        ("--enable-elastic-ep", parallel.enable_elastic_ep),
    ):
        if given:
            raise Refused(
                f"{name} is not supported: experts of the native model stay where they are. Drop it."
            )
    if not parallel.enable_expert_parallel:
        return
    if parallel.all2all_backend != default:
        raise Refused(
            f"--all2all-backend {parallel.all2all_backend} is not supported: the native model gathers tokens. "
            f"Leave it out, or use {default}."
        )
    if parallel.expert_placement_strategy != "linear":
        raise Refused(
            f"--expert-placement-strategy {parallel.expert_placement_strategy} is not supported: experts lie in order. "
            "Leave it out, or use linear."
        )
    speculative, size = vllm_config.speculative_config, parallel.tensor_parallel_size
    if speculative is not None and size > 1:
        of_draft = speculative.draft_parallel_config.tensor_parallel_size
        if of_draft != size:
            raise Refused(
                f"draft_tensor_parallel_size {of_draft} is not supported with --enable-expert-parallel, whose experts are the "
                "draft's too. Leave it out."
            )


def _refuse_a_draft_of_another_kind(vllm_config: "VllmConfig") -> None:
    speculative, hf = vllm_config.speculative_config, vllm_config.model_config.hf_config
    if speculative is None:
        return
    method, own = speculative.method, vllm_config.model_config.model
    if method not in DRAFTS:
        raise Refused(
            f"speculative method {method} does not run with the native model. "
            f"Use {' or '.join(DRAFTS)}, which draft with the checkpoint's own stages."
        )
    if speculative.model != own:
        raise Refused(
            f"the {method} draft of {speculative.model} cannot draft for {own}: drafts are read from the target's "
            "checkpoint. Leave out the draft's model."
        )
    found = checkpoint.draft_kind(hf.to_dict())
    if found != method:
        raise Refused(
            f"speculative method {method} is asked for, but {own} holds {f'a {found} draft' if found else 'no draft'}. "
            + (
                f"Use {found}."
                if found
                else "Drop --speculative-config, or take a checkpoint with mtp.* tensors."
            )
        )
    if method == "mtp" and hf.num_nextn_predict_layers != 1:
        raise Refused(
            f"num_nextn_predict_layers = {hf.num_nextn_predict_layers} in config.json: one MTP layer is supported."
        )


def _refuse_adaptive_verification_without_graphs(vllm_config: "VllmConfig") -> None:
    """vLLM's own refusal comes in a report of many lines."""
    graphs = vllm_config.compilation_config.cudagraph_mode
    if verifies_adaptively(vllm_config) and not graphs.has_full_cudagraphs():
        raise Refused(
            "enable_adaptive_verification needs full graphs of decode steps, and --enforce-eager or the cudagraph_mode turns "
            "them off. Drop that, or drop enable_adaptive_verification from --speculative-config."
        )


def _refuse_without_a_needed_patch(device: str, turned_off: frozenset[str]) -> None:
    for patch in load():
        if patch.needed_on == device and patch.id in turned_off:
            raise Refused(
                f"{VARIABLE} turns the patch {patch.id} off, and DeepSeek-V4 does not run on {device} without it. "
                "Leave it out there, or set ATOM_BRIDGE_DISABLE=1 to serve with vLLM's own model."
            )


def _note_what_is_asked(vllm_config: "VllmConfig") -> None:
    from atom_vllm_bridge import startup

    if serves(vllm_config):
        startup.note_what_was_asked(vllm_config)


def _refuse_a_head_that_is_not_there(
    hf: Mapping[str, Any], headers: Mapping[str, object]
) -> None:
    head = f"mtp.{checkpoint.count_stages(headers) - 1}.confidence_head.proj.weight"
    if hf.get("enable_confidence_head") and head not in headers:
        raise Refused(
            f"enable_confidence_head is true, but the checkpoint has no {head}. Pass --hf-overrides "
            "'{\"enable_confidence_head\": false}' to have acceptance estimated from what was accepted before."
        )


def refuse_an_unfit_checkpoint(vllm_config: "VllmConfig") -> None:
    """Raise `Refused` for a checkpoint that would fail to load, before any process is started for it.

    Reads config.json and, of a checkpoint that is on this machine, the headers of the shards. One that is yet to be fetched from
    a hub is checked when its weights are loaded.

    Raises:
        Refused: a config that is not DeepSeek-V4's, or does not divide among the ranks; a shard that is truncated; a tensor that is missing, left over, or of
            a wrong shape or dtype.
    """
    model = vllm_config.model_config
    directory = snapshots.directory_of(
        model.model, model.revision, vllm_config.load_config.download_dir
    )
    try:
        hf = model.hf_config.to_dict()
        parallel = vllm_config.parallel_config
        sharding.check(
            DeepseekV4Config.from_hf(hf),
            parallel.tensor_parallel_size,
            parallel.data_parallel_size if parallel.enable_expert_parallel else 1,
        )
        if method_of(vllm_config) == "dspark":
            DSparkConfig.from_hf(hf)
        if (
            directory is not None
            and vllm_config.load_config.load_format in SAFETENSORS_FORMATS
        ):
            headers = check_shards(directory)
            drafts = vllm_config.speculative_config is not None
            if verifies_adaptively(vllm_config):
                _refuse_a_head_that_is_not_there(hf, headers)
            # Overrides change what the shards should hold; the loader still accounts for every tensor.
            if not model.hf_overrides:
                config = json.loads((directory / "config.json").read_bytes())
                layout = checkpoint.detect_layout(headers)
                stages = checkpoint.count_stages(headers) if drafts else 0
                checkpoint.check_headers(
                    checkpoint.tensor_table(config, layout, stages=max(stages, drafts)),
                    headers,
                    # Tensors of a draft that is not used are nobody's.
                    ignored=() if drafts else ("mtp.",),
                )
    except checkpoint.CheckpointError as error:
        first, *others = error.problems
        more = f" {len(others)} more: atom-vllm-bridge doctor --model {directory} counts them."
        raise Refused(f"checkpoint: {first}" + more * bool(others)) from None
    except ValueError as error:
        raise Refused(str(error)) from None


def _is_a_copy(vllm_config: "VllmConfig") -> bool:
    """Whether it is of a configuration that was completed: vLLM copies a running engine's to hash it, and there what was planned
    for its cache looks asked for."""
    completed = getattr(vllm_config.compilation_config, COMPLETED, None)
    return completed is not None and completed is vllm_config.model_config


class AtomPlatform:
    """Mixed in before one of vLLM's platform classes, whose `_enum` stays what it is."""

    device_type: str

    @classmethod
    def pre_register_and_update(
        cls, parser: "FlexibleArgumentParser | None" = None
    ) -> None:
        super().pre_register_and_update(parser)  # type: ignore[misc]
        if parser is not None:
            prepare_command_line(parser, atoms_model.choose)
        else:
            # A configuration is about to be made.
            if _note_what_is_asked not in early_look.LOOKS:
                early_look.LOOKS.append(_note_what_is_asked)
            PATCHES.apply("early-look", process="engine")

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: "VllmConfig") -> None:
        # Nothing new, unless the early look was missed: a configuration made without EngineArgs, or the patch refused.
        _note_what_is_asked(vllm_config)
        super().apply_config_platform_defaults(vllm_config)  # type: ignore[misc]

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        """Validate and complete the configuration.

        Raises:
            Refused: the "atom" part of --additional-config is malformed, or see `refuse_what_cannot_be_honoured`,
                `refuse_an_unfit_checkpoint` and `atoms_model.refuse_what_it_cannot_honour`.
        """
        try:
            settings = Settings.read(vllm_config.additional_config, os.environ)
        except ValueError as error:
            raise Refused(str(error)) from None
        if is_deepseek_v4(vllm_config):
            atoms_model.refuse_what_it_cannot_honour(vllm_config, settings)
        if not serves(vllm_config):
            super().check_and_update_config(vllm_config)  # type: ignore[misc]
            return
        if _is_a_copy(vllm_config):
            # With vLLM's own defaults set again.
            cls._check_and_update_deepseek_v4(vllm_config)
            return
        _refuse_without_a_needed_patch(cls.device_type, settings.disabled_patches)
        refuse_what_cannot_be_honoured(vllm_config)
        refuse_an_unfit_checkpoint(vllm_config)
        try:
            engine_ops.configure(settings.ops)
        except ValueError as error:
            raise Refused(str(error)) from None
        cls._check_and_update_deepseek_v4(vllm_config)
        setattr(vllm_config.compilation_config, COMPLETED, vllm_config.model_config)
        metrics.offer()

    @classmethod
    def _check_and_update_deepseek_v4(cls, vllm_config: "VllmConfig") -> None:
        from vllm.config import CompilationMode

        cache = vllm_config.cache_config
        given = cache.user_specified_block_size or _is_a_copy(vllm_config)
        asked = cache.block_size if given else BLOCK_SIZE
        cls._check_of_vllm(vllm_config)
        cache.block_size = asked
        if method_of(vllm_config) == "dspark":
            # Context rows follow from verified tokens alone, so that the last block of a hit is as good as the others. An
            # MTP row also holds the next token, which another request may continue differently: there vLLM's drop stays.
            vllm_config.speculative_config.disable_eagle_block_drop = True
        compilation = vllm_config.compilation_config
        compilation.mode = CompilationMode.NONE
        compilation.cudagraph_mode = cls.graph_mode(vllm_config)
        _refuse_adaptive_verification_without_graphs(vllm_config)
        if verifies_adaptively(vllm_config):
            parallel = vllm_config.parallel_config
            parallel.worker_cls = WORKERS.get(parallel.worker_cls, parallel.worker_cls)

    @classmethod
    def _check_of_vllm(cls, vllm_config: "VllmConfig") -> None:
        super().check_and_update_config(vllm_config)  # type: ignore[misc]

    @classmethod
    def graph_mode(cls, vllm_config: "VllmConfig") -> "CUDAGraphMode":
        """What the model honours: full graphs of decode steps, and nothing piecewise, since nothing is compiled."""
        return vllm_config.compilation_config.cudagraph_mode.without_piecewise()
