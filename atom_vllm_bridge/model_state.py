"""The life of requests on the worker, as vLLM's Model Runner V2 tells it to a model.

With paged state nothing is kept for a request outside its blocks, so that all of vLLM's defaults hold. Rings are filled again
after a prefix hit: which requests do so is kept here, and their blocks are protected. The class is ours also so that only
Model Runner V2 can run the model, and so that what the model cannot take is refused.
"""

from typing import Any, ClassVar

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed.parallel_state import is_global_first_rank
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from atom_vllm_bridge import metrics, startup
from atom_vllm_bridge.attention import AtomMetadata
from atom_vllm_bridge.kv_cache import replayed_tokens
from atom_vllm_bridge.replay import Replays
from atom_vllm_bridge.verification import Verdicts


class AtomModelState(DefaultModelState):
    """Token ids in; the hash layers route by id, so prompt embeddings are refused by vLLM's own check."""

    supports_prompt_embeds: ClassVar[bool] = False
    _shown = False
    # None: nothing is replayed.
    _replays: Replays | None = None
    counted: metrics.Requests
    # None: drafts are verified whole.
    verdicts: Verdicts | None = None

    def initialize_kv_cache(
        self, kv_cache_config: KVCacheConfig, block_tables: BlockTables
    ) -> None:
        """The model is loaded and the groups are known: say once what serves it. Called again after vLLM has profiled."""
        super().initialize_kv_cache(kv_cache_config, block_tables)
        tokens = replayed_tokens(kv_cache_config)
        self._replays = Replays(tokens, self.max_num_reqs) if tokens else None
        metrics.show_patches()
        self.counted = metrics.Requests(self.vllm_config, kv_cache_config)
        if not self._shown and is_global_first_rank():
            startup.log_table(self.vllm_config, self.model, kv_cache_config)
            self._shown = True

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        super().add_request(req_index, new_req_data)
        if self._replays is not None:
            self._replays.add(req_index, new_req_data)
        self.counted.added(new_req_data)

    def remove_request(self, req_id: str) -> None:
        super().remove_request(req_id)
        self.counted.removed(req_id)
        if self.verdicts is not None:
            self.verdicts.show()

    def prepare_attn(
        self,
        input_batch: InputBatch,
        cudagraph_mode: CUDAGraphMode,
        block_tables: tuple[torch.Tensor, ...],
        slot_mappings: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> dict[str, AtomMetadata]:
        """As vLLM's, with replayed tokens kept out of blocks, and what they cannot see said to the model."""
        visible_from = None
        if self._replays is not None:
            visible_from = self._replays.begin(input_batch, slot_mappings)
        metadata = super().prepare_attn(
            input_batch, cudagraph_mode, block_tables, slot_mappings, *args, **kwargs
        )
        if visible_from is not None:
            for group in metadata.values():
                group.visible_from = visible_from
        return metadata

    def preprocess_state(
        self,
        input_batch: InputBatch,
        block_tables: tuple[torch.Tensor, ...],
        kv_cache_config: KVCacheConfig,
        num_computed_tokens: torch.Tensor,
    ) -> None:
        super().preprocess_state(
            input_batch, block_tables, kv_cache_config, num_computed_tokens
        )
        self.counted.stepped(input_batch)
        if self.verdicts is not None:
            self.verdicts.begin(input_batch)

    def postprocess_state(
        self, idx_mapping: torch.Tensor, num_sampled: torch.Tensor, *args: Any
    ) -> None:
        super().postprocess_state(idx_mapping, num_sampled, *args)
        if self.verdicts is not None:
            self.verdicts.end(idx_mapping, num_sampled)
