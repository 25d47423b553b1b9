"""vLLM's model class for the MTP draft of a DeepSeek-V4 checkpoint; the mathematics is in models/."""

from collections.abc import Iterable

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.sequence import IntermediateTensors

from atom_vllm_bridge import step
from atom_vllm_bridge import weights as checkpoint_weights
from atom_vllm_bridge.distributed import parallel_of
from atom_vllm_bridge.dummy_weights import DummyWeights
from atom_vllm_bridge.kv_cache import CacheLayer, draft_spec, rings_of
from atom_vllm_bridge.models.deepseek_v4.config import DeepseekV4Config
from atom_vllm_bridge.models.deepseek_v4.mtp import MTPDraft
from atom_vllm_bridge.models.deepseek_v4.state import window_cache
from atom_vllm_bridge.models.quantization.kv_codecs import kv_codec


class AtomDeepseekV4MTP(nn.Module):
    """Adapts `MTPDraft` to vLLM's contract for MTP drafts.

    `lm_head` and `model.embed_tokens` are the target's own and are set by vLLM when the draft is loaded.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.vllm_config = vllm_config
        speculative = vllm_config.speculative_config
        model_config = speculative.draft_model_config
        hf = model_config.hf_config.to_dict()
        config = DeepseekV4Config.from_hf(hf)
        self.quant_method = DummyWeights.of(vllm_config, hf)
        codec = kv_codec(
            vllm_config.cache_config.cache_dtype, model_config.dtype, config
        )
        ranks = speculative.draft_parallel_config.tensor_parallel_size
        self.model = MTPDraft(
            config,
            dtype=model_config.dtype,
            device=vllm_config.device_config.device,
            kv_codec=codec,
            parallel=parallel_of(vllm_config, ranks),
        )
        self.streams = (config.hc_mult, config.hidden_size)
        self.window = CacheLayer(
            f"model.layers.{config.num_hidden_layers}.attn.window",
            draft_spec(window_cache(config, codec), rings_of(vllm_config, config)),
        )

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        spec_step_idx: int = 0,
    ) -> torch.Tensor:
        """One step of drafting.

        Args:
            input_ids: [T], the token after each position.
            positions: [T] int64.
            hidden_states: [T, n · d], the target's streams, or what this returned before.

        Returns:
            [T, n · d] streams, from which the next step goes on.
        """
        batch, cache = step.current(positions)
        if inputs_embeds is None:
            inputs_embeds = self.embed_input_ids(input_ids)
        streams = hidden_states.unflatten(-1, self.streams)
        return self.model(inputs_embeds, streams, batch, cache(self.window)).flatten(1)

    def compute_logits(
        self, hidden_states: torch.Tensor, spec_step_idx: int = 0
    ) -> torch.Tensor:
        """[T, n · d] → [T, V] float32."""
        streams = hidden_states.unflatten(-1, self.streams)
        return self.lm_head(self.model.head_input(streams))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return checkpoint_weights.load_draft(self, weights, self.vllm_config)
