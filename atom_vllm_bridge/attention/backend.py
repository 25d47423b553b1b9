"""One backend, one metadata class and one builder for every cache group of DeepSeek-V4.

The metadata carries vLLM's own persistent device tensors: the model derives every per-token index from these inside its
forward, so a captured graph, a refreshed draft step and an adaptive split of the batch all read what is current without a
second code path. The one thing that is derived before a step are a window's lists (window_lists.py), for kernels that read lists.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from atom_vllm_bridge.attention.window_lists import WindowLists, window_lists
from atom_vllm_bridge.models.ops.ragged import Ragged
from atom_vllm_bridge.platforms.base import verifies_adaptively


@dataclass
class AtomMetadata(AttentionMetadata):
    """The batch as one cache group sees it.

    Attributes:
        query_start_loc: [R + 1] int32.
        seq_lens: [R] int32.
        block_table: [R, W] int32.
        slot_mapping: [T] int64, −1 where nothing is written.
        max_query_len, max_seq_len: upper bounds known to the host.
        block_size: tokens a block.
        visible_from: [R] int64, where the replay of each request's prefix hit began; None: none replays.
        positions: [T] int64, where the runner gives them.
        causal: whether a token sees none that comes after it; in a draft's block it does.
        window_lists: the slots that each query sees of a window, in the builder's persistent buffers; None: nobody reads them.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    max_query_len: int
    max_seq_len: int
    block_size: int
    visible_from: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    causal: bool = True
    window_lists: Ragged | None = None


class AtomMetadataBuilder(AttentionMetadataBuilder[AtomMetadata]):
    """Hands vLLM's persistent tensors through, and fills a window's lists where an op reads them."""

    # The model's forward derives everything from persistent tensors, on the device.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    # Both forms of a window are then up to date: what is dense is derived in the forward, and the lists are filled again.
    supports_draft_decode_metadata_update = True

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.block_size = kv_cache_spec.block_size
        self.lists: WindowLists | None = window_lists(
            kv_cache_spec, layer_names, vllm_config, device
        )

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> AtomMetadata:
        common = common_attn_metadata
        metadata = AtomMetadata(
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            block_size=self.block_size,
            positions=common.positions,
            causal=common.causal is not False,
        )
        if self.lists is not None and self.lists.take(metadata):
            metadata.window_lists = self.lists.buffers
            self.lists.fill(metadata)
        return metadata

    @classmethod
    def get_varlen_cudagraph_max_query_len(
        cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec
    ) -> int | None:
        """While a budget splits drafts over requests: as many tokens as a request can verify; else none."""
        if not verifies_adaptively(vllm_config):
            return None
        return 1 + vllm_config.speculative_config.num_speculative_tokens

    def update_draft_decode_metadata(self, metadata: AtomMetadata) -> None:
        """Fill the lists again; all else are vLLM's own tensors, and what follows from them is derived in the forward."""
        if metadata.window_lists is not None:
            assert self.lists is not None
            self.lists.fill(metadata)


class AtomBackend(AttentionBackend):
    """Declares what the model's caches look like; the model itself runs the attention."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = [
        "auto",
        "bfloat16",
        "fp8",
        "fp8_e4m3",
        "fp8_ds_mla",
    ]

    @staticmethod
    def get_name() -> str:
        return "ATOM_DEEPSEEK_V4"

    @staticmethod
    def get_impl_cls() -> type:
        raise NotImplementedError(
            "ATOM_DEEPSEEK_V4 has no vLLM attention layer to implement: "
            "the native model calls its own ops."
        )

    @staticmethod
    def get_builder_cls() -> type[AtomMetadataBuilder]:
        return AtomMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(
        kv_cache_spec: KVCacheSpec | None = None,
    ) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        # Block-outermost: with layers outermost the planner would inflate the block sizes of the smaller groups until
        # every page is as large as the largest.
        return (KVCacheLayout.BLHNC, KVCacheLayout.BLNHC)

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Every index is derived from the device's boundaries; said only where somebody splits a batch by it."""
        config = get_current_vllm_config_or_none()
        return config is not None and verifies_adaptively(config)
