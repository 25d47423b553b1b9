"""The life of requests on the worker, as vLLM's Model Runner V2 tells it to a model.

With paged state nothing is kept for a request outside its blocks, so that all of vLLM's defaults hold; the class is ours so
that only Model Runner V2 can run the model, and so that what the model cannot take is refused.
"""

from typing import ClassVar

from vllm.distributed.parallel_state import is_global_first_rank
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from atom_vllm_bridge import startup


class AtomModelState(DefaultModelState):
    """Token ids in; the hash layers route by id, so prompt embeddings are refused by vLLM's own check."""

    supports_prompt_embeds: ClassVar[bool] = False
    _shown = False

    def initialize_kv_cache(
        self, kv_cache_config: KVCacheConfig, block_tables: BlockTables
    ) -> None:
        """The model is loaded and the groups are known: say once what serves it. Called again after vLLM has profiled."""
        super().initialize_kv_cache(kv_cache_config, block_tables)
        if not self._shown and is_global_first_rank():
            startup.log_table(self.vllm_config, self.model, kv_cache_config)
            self._shown = True
