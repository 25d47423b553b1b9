"""From a published checkpoint to the model's parameters: every tensor consumed once, or the load stops and names it."""

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

from atom_vllm_bridge import dummy_weights, rocm_atom, snapshots
from atom_vllm_bridge.models.deepseek_v4 import loading
from atom_vllm_bridge.models.deepseek_v4.packing import pack
from atom_vllm_bridge.models.deepseek_v4.shards import INDEX

# vLLM's own name for this format lists no float32 and serves DeepSeek-V4.1 too, which stays vLLM's.
CHECKPOINT_FORMAT = "atom_deepseek_v4"


class CheckpointFormat(QuantizationConfig):
    """Claims DeepSeek-V4's block-fp8 and mxfp4 checkpoints for `load`, which reads the layout from the tensors."""

    def get_name(self) -> str:
        return CHECKPOINT_FORMAT

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "CheckpointFormat":
        return cls()

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        if rocm_atom.serves_deepseek_v4(os.environ):
            return None
        if user_quant == CHECKPOINT_FORMAT:
            return CHECKPOINT_FORMAT
        published = (
            isinstance(hf_quant_cfg, dict)
            and hf_quant_cfg.get("quant_method") in ("fp8", "deepseek_v4_fp8")
            and getattr(hf_config, "model_type", None) == "deepseek_v4"
        )
        return CHECKPOINT_FORMAT if published else None

    def get_quant_method(
        self, layer: nn.Module, prefix: str
    ) -> QuantizeMethodBase | None:
        return None


def tensor_names(vllm_config: VllmConfig, model_config: ModelConfig) -> set[str]:
    """The names of a checkpoint's tensors: in a local directory, in a hub's cache, or made up.

    Args:
        vllm_config: of the model that is built, which a draft has of its own.
        model_config: names the checkpoint.

    Raises:
        CheckpointError: no index and no shard tells them.
    """
    if dummy_weights.asked(vllm_config):
        return set(dummy_weights.table(model_config.hf_config.to_dict()))
    directory = snapshots.directory_of(model_config.model, model_config.revision)
    if directory is not None:
        return set(loading.check_shards(directory))
    index = get_hf_file_to_dict(INDEX, model_config.model, model_config.revision)
    if index is None:
        raise loading.CheckpointError(
            [f"{model_config.model} has no {INDEX}, which tells its draft's stages."]
        )
    return set(index["weight_map"])


def load_target(
    model: nn.Module,
    tensors: Iterable[tuple[str, torch.Tensor]],
    vllm_config: VllmConfig,
) -> set[str]:
    """Fill the target's parameters; the draft's tensors are left to the draft. Otherwise as `load_draft`."""
    return _load(model, tensors, vllm_config, _of_the_draft)


def load_draft(
    model: nn.Module,
    tensors: Iterable[tuple[str, torch.Tensor]],
    vllm_config: VllmConfig,
) -> set[str]:
    """Fill a draft's parameters from the `mtp.*` tensors, each used once.

    Args:
        model: the adapter; its `.model` names a slot for each published tensor.
        tensors: what vLLM's loader reads from the shards, in any order.
        vllm_config: tells where the shards are.

    Returns:
        The names of all parameters, as vLLM's loader asks.

    Raises:
        CheckpointError: a shard is truncated, or a tensor is missing, left over, or of another shape or dtype.
    """
    return _load(model, tensors, vllm_config, lambda name: not _of_the_draft(name))


def _of_the_draft(name: str) -> bool:
    return name.startswith("mtp.")


def _load(
    model: nn.Module,
    tensors: Iterable[tuple[str, torch.Tensor]],
    vllm_config: VllmConfig,
    ignore: Callable[[str], bool],
) -> set[str]:
    where: dict[str, str] = {}
    model_config, load_config = vllm_config.model_config, vllm_config.load_config
    directory = snapshots.directory_of(
        model_config.model, model_config.revision, load_config.download_dir
    )
    if directory is not None and not dummy_weights.asked(vllm_config):
        where = {
            name: found.shard for name, found in loading.check_shards(directory).items()
        }
    loading.load(model.model.weight_slots(), tensors, ignore=ignore, where=where.get)
    pack(model.model)
    return {name for name, _ in model.named_parameters()}
