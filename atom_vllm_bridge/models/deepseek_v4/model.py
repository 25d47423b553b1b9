"""DeepSeek-V4, from token ids to logits.

embed, repeated into n residual streams → blocks (attention, then mixture of experts, each within a hyper-connection) → the
streams collapsed → norm → logits. Caches, and which rows a token owns, come in with `Batch` and `LayerState` (state.py).
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from atom_vllm_bridge.models.deepseek_v4.attention import Attention
from atom_vllm_bridge.models.deepseek_v4.config import (
    RATIO_OF_LAYER_TYPE,
    DeepseekV4Config,
)
from atom_vllm_bridge.models.deepseek_v4.hyper_connections import (
    HyperConnection,
    HyperHead,
)
from atom_vllm_bridge.models.deepseek_v4.moe import MixtureOfExperts
from atom_vllm_bridge.models.deepseek_v4.packing import Packable, Slot
from atom_vllm_bridge.models.deepseek_v4.parallel import ALONE, Parallel
from atom_vllm_bridge.models.deepseek_v4.plan import Plan
from atom_vllm_bridge.models.deepseek_v4.rope import frequencies
from atom_vllm_bridge.models.deepseek_v4.sharding import check, cut, vocabulary_of
from atom_vllm_bridge.models.deepseek_v4.state import Batch, LayerState
from atom_vllm_bridge.models.ops.registry import Op, resolve, resolve_from
from atom_vllm_bridge.models.quantization.kv_codecs import KVCodec, kv_codec


class Block(nn.Module):
    """One decoder layer. A draft stage is one too: sliding attention, `moe`.

    Args:
        config: the model's.
        layer_type, mlp_type: kinds of attention and of feed-forward, as config.py names them.
        codec: storage of cache rows.
        dtype: of weights and activations.
        parallel: which part of its weights it has.
    """

    def __init__(
        self,
        config: DeepseekV4Config,
        layer_type: str,
        mlp_type: str,
        codec: KVCodec,
        dtype: torch.dtype,
        device: torch.device,
        parallel: Parallel = ALONE,
    ) -> None:
        super().__init__()
        fp32 = {"dtype": torch.float32, "device": device}
        ratio = RATIO_OF_LAYER_TYPE[layer_type]
        self.hc_attn = HyperConnection(config, device)
        self.attn_norm = nn.Parameter(torch.empty(config.hidden_size, **fp32))
        self.attn = Attention(config, layer_type, ratio, codec, dtype, device, parallel)
        self.hc_ffn = HyperConnection(config, device)
        self.ffn_norm = nn.Parameter(torch.empty(config.hidden_size, **fp32))
        self.ffn = MixtureOfExperts(config, mlp_type, dtype, device, parallel)
        self.decoder_layers = _decoder_layers(device, parallel)

    def forward(
        self,
        streams: torch.Tensor,
        input_ids: torch.Tensor,
        plan: Plan,
        state: LayerState,
    ) -> torch.Tensor:
        """[T, n, d] → [T, n, d]."""
        return self.decoder_layers([self], streams, input_ids, plan, [state])

    def weight_slots(self) -> dict[str, Slot]:
        """Where each published tensor of the layer goes, by its name below `layers.<i>.`."""
        slots: dict[str, Slot] = {
            "attn_norm.weight": self.attn_norm.data,
            "ffn_norm.weight": self.ffn_norm.data,
        }
        for part in ("attn", "ffn"):
            hc = getattr(self, f"hc_{part}").weight_slots()
            slots |= {f"hc_{part}_{name}": slot for name, slot in hc.items()}
            inner = getattr(self, part).weight_slots()
            slots |= {f"{part}.{name}": slot for name, slot in inner.items()}
        return slots


class DeepseekV4Model(Packable):
    """The target model. Weights are uninitialised until something is copied into `weight_slots()`.

    Args:
        config: dimensions.
        dtype: of weights and activations, float32 or bfloat16; hyper-connections, norms, gates, sinks and position biases are
            float32.
        device: where.
        kv_codec: storage of cache rows; by default the values in `dtype`.
        parallel: which part of the model this is (sharding.py), and how it reaches the others.

    Raises:
        ValueError: the model does not divide among so many ranks.
    """

    by_input = ("head",)

    def __init__(
        self,
        config: DeepseekV4Config,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        kv_codec: KVCodec | None = None,
        parallel: Parallel = ALONE,
    ) -> None:
        super().__init__()
        check(config, parallel.size, parallel.replicas)
        device = torch.device(device)
        self.parallel = parallel
        self.vocabulary, vocabulary_rows = vocabulary_of(config, parallel)
        # Rows of nobody's are multiplied with, too.
        make = torch.empty if len(self.vocabulary) == vocabulary_rows else torch.zeros
        self.config, self.dtype = config, dtype
        self.codec = kv_codec or _default_codec(config, dtype)
        kind = {"dtype": dtype, "device": device}
        self.embed = nn.Parameter(make(vocabulary_rows, config.hidden_size, **kind))
        self.layers = nn.ModuleList(
            Block(config, layer_type, mlp_type, self.codec, dtype, device, parallel)
            for layer_type, mlp_type in zip(
                config.layer_types, config.mlp_layer_types, strict=True
            )
        )
        self.hc_head = HyperHead(config, device)
        self.norm = nn.Parameter(
            torch.empty(config.hidden_size, dtype=torch.float32, device=device)
        )
        self.head = (
            None
            if config.tie_word_embeddings
            else nn.Parameter(make(config.hidden_size, vocabulary_rows, **kind))
        )
        self.decoder_layers = _decoder_layers(device, parallel)
        self.linear = resolve("linear", device)
        self.rms_norm = resolve("rms_norm", device)
        for name, compressed in (("theta", False), ("compress_theta", True)):
            theta = frequencies(config, compressed=compressed).to(device)
            self.register_buffer(name, theta, persistent=False)
        self.requires_grad_(False)

    def embed_tokens(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[T] ids → [T, d]; a negative id, a placeholder of the engine's, is embedded as 0."""
        ids = input_ids.clamp(min=0)
        if self.parallel.size == 1:
            return F.embedding(ids, self.embed)
        first, end = self.vocabulary.start, self.vocabulary.stop
        others = (ids < first) | (ids >= end)
        mine = F.embedding((ids - first).masked_fill(others, 0), self.embed)
        return self.parallel.all_reduce(mine.masked_fill(others.unsqueeze(-1), 0.0))

    def plan(self, batch: Batch) -> Plan:
        """What all layers of a step share."""
        return Plan(batch, self.theta, self.compress_theta)

    def forward(
        self,
        input_ids: torch.Tensor,
        batch: Batch,
        state: Sequence[LayerState],
        aux_layers: tuple[int, ...] = (),
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run the layers.

        Args:
            input_ids: [T] int; negative ones count as 0.
            batch: which request and position each token is.
            state: the caches of each layer.
            aux_layers: taps; id L + 1 means after layer L, as vLLM counts.

        Returns:
            The streams after the last layer [T, n, d], not reduced; and for each tap, in ascending order, the mean of the
            streams [T, d].
        """
        ids = input_ids.clamp(min=0)
        plan = self.plan(batch)
        streams = self.embed_tokens(ids).unsqueeze(1)
        streams = streams.repeat(1, self.config.hc_mult, 1)
        layers, first, taps = list(self.layers), 0, []
        # COMPILE BOUNDARY: a compiled graph bakes in which layers are tapped.
        for end in sorted({*aux_layers, len(layers)}):
            streams = self.decoder_layers(
                layers[first:end], streams, ids, plan, state[first:end]
            )
            if end in aux_layers:
                taps.append(streams.mean(1))
            first = end
        return streams, taps

    def reduce(self, streams: torch.Tensor) -> torch.Tensor:
        """[T, n, d] → hidden states [T, d] after the final norm."""
        return self.rms_norm(self.hc_head(streams), self.norm, self.config.rms_norm_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, d] → [T, V] float32."""
        head = self.embed.mT if self.head is None else self.head
        logits = self.linear(hidden, head)[:, : self.embed.shape[0]]
        if self.parallel.size > 1:
            logits = self.parallel.all_gather(logits)[:, : self.config.vocab_size]
        return logits.float()

    def weight_slots(self) -> dict[str, Slot]:
        """Every tensor that the checkpoint publishes for the target → the memory it is copied to.

        Slots are views into fused or stacked parameters, with the shape of the unquantised tensor.
        """
        self.unpack()
        mine = self.vocabulary
        whole = (self.config.vocab_size, self.config.hidden_size)
        slots: dict[str, Slot] = {
            "embed.weight": cut(self.embed.data[: len(mine)], whole, mine),
            "norm.weight": self.norm.data,
        }
        if self.head is not None:
            slots["head.weight"] = cut(self.head.data.mT[: len(mine)], whole, mine)
        head = self.hc_head.weight_slots()
        slots |= {f"hc_head_{name}": slot for name, slot in head.items()}
        for i, layer in enumerate(self.layers):
            inner = layer.weight_slots()
            slots |= {f"layers.{i}.{name}": slot for name, slot in inner.items()}
        return slots


def _decoder_layers(device: torch.device, parallel: Parallel) -> Op:
    """Layers as the device runs them best; those of several ranks op by op, for what is compiled as one cannot wait for another."""
    if parallel.alone:
        return resolve("decoder_layers", device)
    return resolve_from("torch", "decoder_layers")


def _default_codec(config: DeepseekV4Config, dtype: torch.dtype) -> KVCodec:
    return kv_codec("auto", dtype, config)
