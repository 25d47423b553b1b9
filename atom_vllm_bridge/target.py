"""vLLM's model class for DeepSeek-V4: caches, batch and weights come in here, the mathematics is in models/."""

import os
from collections.abc import Callable, Iterable

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.model_executor.models.interfaces import SupportsEagle3
from vllm.sequence import IntermediateTensors

from atom_vllm_bridge import engine_ops, step
from atom_vllm_bridge import weights as checkpoint_weights
from atom_vllm_bridge.distributed import parallel_of
from atom_vllm_bridge.dummy_weights import DummyWeights
from atom_vllm_bridge.kv_cache import CacheLayer, cache_spec, rings_of
from atom_vllm_bridge.model_state import AtomModelState
from atom_vllm_bridge.models.deepseek_v4.config import DeepseekV4Config
from atom_vllm_bridge.models.deepseek_v4.model import DeepseekV4Model
from atom_vllm_bridge.models.deepseek_v4.state import LayerState, layer_caches
from atom_vllm_bridge.models.ops import registry
from atom_vllm_bridge.models.quantization.kv_codecs import kv_codec
from atom_vllm_bridge.settings import Settings


class AtomDeepseekV4ForCausalLM(nn.Module, SupportsEagle3):
    """Adapts `DeepseekV4Model` to vLLM's contract for text generation, and to what its speculators ask of a target."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        model_config = vllm_config.model_config
        self.vllm_config = vllm_config
        # Once more, in the process that builds the model.
        engine_ops.configure(
            Settings.read(vllm_config.additional_config, os.environ).ops
        )
        hf = model_config.hf_config.to_dict()
        self.config = DeepseekV4Config.from_hf(hf)
        self.quant_method = DummyWeights.of(vllm_config, hf)
        codec = kv_codec(
            vllm_config.cache_config.cache_dtype, model_config.dtype, self.config
        )
        device = vllm_config.device_config.device
        self.model = DeepseekV4Model(
            self.config,
            dtype=model_config.dtype,
            device=device,
            kv_codec=codec,
            parallel=parallel_of(vllm_config),
        )
        self.caches = nn.ModuleList()
        block_size = vllm_config.cache_config.block_size
        rings = rings_of(vllm_config, self.config)
        for layer in range(self.config.num_hidden_layers):
            shapes = layer_caches(self.config, layer, codec)
            self.caches.append(
                nn.ModuleDict(
                    {
                        role.value: CacheLayer(
                            f"model.layers.{layer}.attn.{role.value}",
                            cache_spec(role, shape, block_size, rings),
                        )
                        for role, shape in shapes.items()
                    }
                )
            )
        self.aux_layers: tuple[int, ...] | None = None
        self.mtp_streams = self._buffer_for_mtp(device)

    @staticmethod
    def get_model_state_cls() -> type[AtomModelState]:
        return AtomModelState

    @property
    def lm_head(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """The output head, as vLLM hands it to a draft: final hidden states [T, d] → logits [T, V] float32."""
        return self.model.logits

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed_tokens(input_ids)

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        """Choose the taps, once; vLLM calls it when the model is loaded.

        Args:
            layers: L + 1 for the streams after layer L; up to `num_hidden_layers`, after the last.

        Raises:
            ValueError: no such layer.
            RuntimeError: other taps were chosen before; what has been compiled or captured holds those.
        """
        chosen = tuple(sorted(set(layers)))
        depth = self.config.num_hidden_layers
        if not chosen or not 1 <= chosen[0] <= chosen[-1] <= depth:
            raise ValueError(
                f"aux layers {list(layers)} must lie between 1 and {depth} (L + 1 is after layer L); "
                "correct dspark_target_layer_ids in config.json."
            )
        if self.aux_layers not in (None, chosen):
            raise RuntimeError(
                f"aux layers are {self.aux_layers} since the model was loaded and cannot become {chosen}; "
                "build the engine again."
            )
        self.aux_layers = chosen

    def get_eagle3_default_aux_hidden_state_layers(self) -> tuple[int, ...]:
        raise ValueError(
            "config: dspark_target_layer_ids is missing; a draft must say which layers it reads."
        )

    def get_mtp_target_hidden_states(self) -> torch.Tensor | None:
        """[max tokens, n · d], the last forward's streams; None unless an MTP draft reads them."""
        return self.mtp_streams

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]:
        """[T] ids and positions → [T, d] final hidden states, after the head's hyper-connection and norm.

        With taps chosen, also the mean of the streams [T, d] at each.
        """
        batch, cache = step.current(positions)
        streams, taps = self.model(
            input_ids, batch, self._state(cache), self.aux_layers or ()
        )
        if self.mtp_streams is not None:
            self.mtp_streams[: len(streams)] = streams.flatten(1)
        hidden = self.model.reduce(streams)
        return hidden if self.aux_layers is None else (hidden, taps)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.model.logits(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = checkpoint_weights.load_target(self, weights, self.vllm_config)
        if self.vllm_config.device_config.device_type == "cpu":
            self._compile_ops()
        return loaded

    @torch.inference_mode()
    def _compile_ops(self) -> None:
        """A first token, so that a CPU's ops are compiled (once a machine; they are cached) before the first request."""
        token = torch.zeros(1, dtype=torch.int64)
        batch, cache = step.without_caches(token)
        state, plan = self._state(cache), self.model.plan(batch)
        each = torch.ones(
            self.vllm_config.parallel_config.data_parallel_size, dtype=torch.int32
        )
        with set_forward_context(
            None, self.vllm_config, num_tokens=1, num_tokens_across_dp=each
        ):
            streams, _ = self.model(token, batch, state)
            # Steps of more tokens run the ops one by one.
            by_ops = registry.resolve_from("torch", "decoder_layers")
            streams = by_ops(self.model.layers, streams, token, plan, state)
        self.model.logits(self.model.reduce(streams))

    def _state(self, cache: step.CacheOf) -> list[LayerState]:
        """The caches of every layer, each as `cache` sees it."""
        return [
            LayerState(**{role: cache(layer) for role, layer in caches.items()})
            for caches in self.caches
        ]

    def _buffer_for_mtp(self, device: torch.device) -> torch.Tensor | None:
        """Memory that stays where it is, so that a captured graph and the speculator agree on it."""
        speculative = self.vllm_config.speculative_config
        if speculative is None or speculative.method != "mtp":
            return None
        return torch.zeros(
            self.vllm_config.scheduler_config.max_num_batched_tokens,
            self.config.hc_mult * self.config.hidden_size,
            dtype=self.model.dtype,
            device=device,
        )
