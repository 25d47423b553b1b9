"""vLLM's model class for the DSpark draft of a DeepSeek-V4 checkpoint: what vLLM's speculator asks, answered by models/.

The draft is built after the target, and its cache layers with it; vLLM takes the layers that appear then for the draft's.
"""

import logging
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from vllm.config import VllmConfig

from atom_vllm_bridge import step
from atom_vllm_bridge import weights as checkpoint_weights
from atom_vllm_bridge.distributed import parallel_of
from atom_vllm_bridge.dummy_weights import DummyWeights
from atom_vllm_bridge.kv_cache import (
    WINDOW_BLOCK,
    CacheLayer,
    RingSpec,
    draft_spec,
    rings_of,
)
from atom_vllm_bridge.models.deepseek_v4.checkpoint import count_stages
from atom_vllm_bridge.models.deepseek_v4.config import DeepseekV4Config
from atom_vllm_bridge.models.deepseek_v4.dspark import DSparkConfig, DSparkDraft
from atom_vllm_bridge.models.deepseek_v4.state import BlockTable, Cache, window_cache
from atom_vllm_bridge.models.ops.torch.ring_slots import slots_in_rings
from atom_vllm_bridge.models.quantization.kv_codecs import kv_codec

logger = logging.getLogger("vllm.atom_vllm_bridge")


class AtomDSparkDraftModel(nn.Module):
    """Adapts `DSparkDraft` to vLLM's contract for DSpark drafts.

    `lm_head` and `model.embed_tokens` are the target's own and are set by vLLM when the draft is loaded.
    """

    # The draft's vocabulary is the target's.
    draft_id_to_target_id: torch.Tensor | None = None

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.vllm_config = vllm_config
        speculative = vllm_config.speculative_config
        model_config = speculative.draft_model_config
        hf = model_config.hf_config.to_dict()
        config, dspark = DeepseekV4Config.from_hf(hf), DSparkConfig.from_hf(hf)
        self.quant_method = DummyWeights.of(vllm_config, hf)
        names = checkpoint_weights.tensor_names(vllm_config, model_config)
        stages = count_stages(dict.fromkeys(names))
        confidence = f"mtp.{stages - 1}.confidence_head.proj.weight" in names
        if not confidence:
            logger.info(
                "The DSpark draft has no confidence head: acceptance is estimated where it is asked for."
            )
        codec = kv_codec(
            vllm_config.cache_config.cache_dtype, model_config.dtype, config
        )
        ranks = speculative.draft_parallel_config.tensor_parallel_size
        self.block = speculative.num_speculative_tokens
        self.model = DSparkDraft(
            config,
            dspark,
            stages,
            confidence=confidence,
            dtype=model_config.dtype,
            device=vllm_config.device_config.device,
            kv_codec=codec,
            parallel=parallel_of(vllm_config, ranks),
        )
        spec = draft_spec(window_cache(config, codec), rings_of(vllm_config, config))
        first = config.num_hidden_layers
        self.windows = nn.ModuleList(
            CacheLayer(f"model.layers.{first + i}.attn.window", spec)
            for i in range(stages)
        )

    def get_draft_kv_cache_layer_names(self) -> list[str]:
        return [layer.name for layer in self.windows]

    def get_draft_attn_causal(self) -> list[bool]:
        return [False] * len(self.windows)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed_tokens(input_ids)

    def combine_hidden_states(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[T, n · d], the target's taps side by side → context rows [T, d]."""
        return self.model.context(hidden_states)

    def precompute_and_store_context_kv(
        self,
        context_states: torch.Tensor,
        context_positions: torch.Tensor,
        context_slot_mapping: (
            torch.Tensor | Sequence[torch.Tensor | None] | None
        ) = None,
    ) -> None:
        """Store the context's keys in every stage's window.

        Args:
            context_states: [T, d], from `combine_hidden_states`.
            context_positions: [T] int64.
            context_slot_mapping: [T] int64, one for all stages or one each; −1 writes nothing, and so does None, with which
                vLLM profiles and idles.
        """
        if isinstance(context_slot_mapping, torch.Tensor):
            context_slot_mapping = [context_slot_mapping] * len(self.windows)
        slots = context_slot_mapping or [None] * len(self.windows)
        # One group holds all stages, so that the rows' ids are derived once for all of them.
        tables: dict[int, BlockTable] = {}
        windows = []
        for layer, to in zip(self.windows, slots, strict=True):
            rows = layer.kv_cache
            if to is None:
                to = torch.full_like(context_positions, -1)
                rows = layer.no_rows(context_states.device)
            if to.data_ptr() not in tables:
                tables[to.data_ptr()] = _table_to(layer, to, context_positions)
            windows.append(Cache(rows, tables[to.data_ptr()]))
        self.model.write_context(context_states, context_positions, windows)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T] ids and positions, a block for each request → [T, d], before the norm of the head."""
        batch, cache = step.current(positions, self.block)
        if inputs_embeds is None:
            inputs_embeds = self.embed_input_ids(input_ids)
        return self.model(
            inputs_embeds, batch, [cache(layer) for layer in self.windows]
        )

    def compute_draft_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[T, d] → [T, V] float32, without the Markov head."""
        return self.lm_head(self.model.head_input(hidden_states))

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.compute_draft_logits(hidden_states)

    def markov_embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.model.markov_embed(token_ids)

    def markov_bias(self, markov_embed: torch.Tensor) -> torch.Tensor:
        return self.model.markov_bias(markov_embed)

    def compute_confidence(
        self, head_hidden: torch.Tensor, markov_embeds: torch.Tensor
    ) -> torch.Tensor:
        return self.model.confidence(head_hidden, markov_embeds)

    def map_draft_to_target(self, draft_ids: torch.Tensor) -> torch.Tensor:
        return draft_ids

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return checkpoint_weights.load_draft(self, weights, self.vllm_config)


def _table_to(
    layer: CacheLayer, slots: torch.Tensor, positions: torch.Tensor
) -> BlockTable:
    """A table to write through; context is not read through it."""
    blocks = torch.zeros((1, 1), dtype=torch.int32, device=slots.device)
    if isinstance(layer.spec, RingSpec):
        # vLLM knows the one block of a ring, and not the row in it.
        block = torch.where(slots >= 0, slots // layer.spec.block_size, 0)
        to = slots_in_rings(block, positions, layer.rows)
        return BlockTable(blocks=blocks, slots=to, block_size=layer.rows)
    return BlockTable(blocks=blocks, slots=slots, block_size=WINDOW_BLOCK)
