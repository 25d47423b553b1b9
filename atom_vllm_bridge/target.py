"""vLLM's model class for DeepSeek-V4: caches, batch and weights come in here, the mathematics is in models/."""

import os
from collections.abc import Callable, Iterable

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.sequence import IntermediateTensors

from atom_vllm_bridge import weights as checkpoint_weights
from atom_vllm_bridge.attention import AtomMetadata
from atom_vllm_bridge.kv_cache import CacheLayer, cache_spec
from atom_vllm_bridge.model_state import AtomModelState
from atom_vllm_bridge.models.deepseek_v4.config import DeepseekV4Config
from atom_vllm_bridge.models.deepseek_v4.model import DeepseekV4Model
from atom_vllm_bridge.models.deepseek_v4.state import (
    Batch,
    BlockTable,
    Cache,
    LayerState,
    layer_caches,
)
from atom_vllm_bridge.models.ops import registry
from atom_vllm_bridge.models.quantization.kv_codecs import kv_codec
from atom_vllm_bridge.settings import Settings


class AtomDeepseekV4ForCausalLM(nn.Module):
    """Adapts `DeepseekV4Model` to vLLM's contract for text generation."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        model_config = vllm_config.model_config
        self.vllm_config = vllm_config
        # Once more, in the process that builds the model.
        registry.configure(Settings.read(vllm_config.additional_config, os.environ).ops)
        self.config = DeepseekV4Config.from_hf(model_config.hf_config.to_dict())
        codec = kv_codec(
            vllm_config.cache_config.cache_dtype, model_config.dtype, self.config
        )
        device = vllm_config.device_config.device
        self.model = DeepseekV4Model(
            self.config, dtype=model_config.dtype, device=device, kv_codec=codec
        )
        self.caches = nn.ModuleList()
        block_size = vllm_config.cache_config.block_size
        for layer in range(self.config.num_hidden_layers):
            shapes = layer_caches(self.config, layer, codec)
            self.caches.append(
                nn.ModuleDict(
                    {
                        role.value: CacheLayer(
                            f"model.layers.{layer}.attn.{role.value}",
                            cache_spec(role, shape, block_size),
                        )
                        for role, shape in shapes.items()
                    }
                )
            )

    @staticmethod
    def get_model_state_cls() -> type[AtomModelState]:
        return AtomModelState

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T] ids and positions → [T, d] final hidden states, after the head's hyper-connection and norm."""
        metadata = get_forward_context().attn_metadata
        if metadata is None:
            batch, state = self._without_caches(positions)
        else:
            batch, state = self._with_caches(positions, metadata)
        streams, _ = self.model(input_ids, batch, state)
        return self.model.reduce(streams)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.model.logits(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = checkpoint_weights.load(self, weights, self.vllm_config)
        if self.vllm_config.device_config.device_type == "cpu":
            self._compile_ops()
        return loaded

    @torch.inference_mode()
    def _compile_ops(self) -> None:
        """A first token, so that a CPU's ops are compiled (once a machine; they are cached) before the first request."""
        token = torch.zeros(1, dtype=torch.int64)
        streams, _ = self.model(token, *self._without_caches(token))
        self.model.logits(self.model.reduce(streams))

    def _state(self, cache: Callable[[CacheLayer], Cache]) -> list[LayerState]:
        """The caches of every layer, each as `cache` sees it."""
        return [
            LayerState(**{role: cache(layer) for role, layer in caches.items()})
            for caches in self.caches
        ]

    def _with_caches(
        self, positions: torch.Tensor, metadata: dict[str, AtomMetadata]
    ) -> tuple[Batch, list[LayerState]]:
        tables: dict[tuple[int, int], BlockTable] = {}

        def cache(layer: CacheLayer) -> Cache:
            group = metadata[layer.name]
            # Layers of one group share one metadata object, hence one table and the indices derived from it. Two cache
            # shapes of one group (main and indexer entries) have the same tokens a row only if the ratio is the same.
            key = (id(group), layer.tokens_per_row)
            if key not in tables:
                tables[key] = BlockTable(
                    blocks=group.block_table,
                    slots=group.slot_mapping,
                    block_size=group.block_size,
                    tokens_per_row=layer.tokens_per_row,
                )
            return Cache(rows=layer.kv_cache, table=tables[key])

        first = next(iter(metadata.values()))
        batch = Batch(
            positions=positions,
            query_start_loc=first.query_start_loc,
            seq_lens=first.seq_lens,
            max_query_len=first.max_query_len,
            max_seq_len=first.max_seq_len,
        )
        return batch, self._state(cache)

    def _without_caches(
        self, positions: torch.Tensor
    ) -> tuple[Batch, list[LayerState]]:
        """vLLM's profiling run: one request of T tokens over null blocks; nothing is written, memory is what it would be."""
        tokens, device = positions.numel(), positions.device
        length = torch.tensor([0, tokens], dtype=torch.int32, device=device)
        slots = torch.full((tokens,), -1, dtype=torch.int64, device=device)

        def cache(layer: CacheLayer) -> Cache:
            spec = layer.spec
            blocks = -(-tokens // spec.block_size)
            return Cache(
                rows=torch.zeros(
                    (1, spec.num_states, spec.head_size),
                    dtype=spec.dtype,
                    device=device,
                ),
                table=BlockTable(
                    blocks=torch.zeros((1, blocks), dtype=torch.int32, device=device),
                    slots=slots,
                    block_size=spec.block_size,
                    tokens_per_row=layer.tokens_per_row,
                ),
            )

        batch = Batch(
            positions=torch.arange(tokens, device=device),
            query_start_loc=length,
            seq_lens=length[1:],
            max_query_len=tokens,
            max_seq_len=tokens,
        )
        return batch, self._state(cache)
