"""Multi-token prediction: one more decoder layer that drafts the token after next from the target's streams and the next token.

R = e_proj · rms(embed(x_{t+1}); enorm) + h_proj · rms(R_target,t; hnorm), for each stream → block → R′;   U = head · rms(collapsed R′)

Drafting goes on from its own output: R′ takes the place of the target's streams, and the drafted token that of x_{t+1}. The
layer has keys of its own, a sliding window; position t holds what token t + 1 and the streams at t make. At position 0 the
embedding counts as zero, as in the published implementations.
"""

import torch
from torch import nn

from atom_vllm_bridge.models.deepseek_v4.config import MOE, SLIDING, DeepseekV4Config
from atom_vllm_bridge.models.deepseek_v4.hyper_connections import HyperHead
from atom_vllm_bridge.models.deepseek_v4.model import Block
from atom_vllm_bridge.models.deepseek_v4.packing import Slot, rows
from atom_vllm_bridge.models.deepseek_v4.parallel import ALONE, Parallel
from atom_vllm_bridge.models.deepseek_v4.plan import Plan
from atom_vllm_bridge.models.deepseek_v4.rope import frequencies
from atom_vllm_bridge.models.deepseek_v4.sharding import check
from atom_vllm_bridge.models.deepseek_v4.state import Batch, Cache, LayerState
from atom_vllm_bridge.models.ops.registry import resolve
from atom_vllm_bridge.models.quantization.kv_codecs import KVCodec


class MTPDraft(nn.Module):
    """The draft model. Weights are uninitialised until something is copied into `weight_slots()`.

    Embedding and output head are the target's and come in as arguments.

    Args:
        config: the target's dimensions, which the layer shares.
        dtype: of weights and activations; hyper-connections, norms and gates are float32.
        kv_codec: storage of the window's rows.
        parallel: which part of a decoder layer this has; all else is whole on every rank.

    Raises:
        ValueError: the layer does not divide among so many ranks.
    """

    def __init__(
        self,
        config: DeepseekV4Config,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        kv_codec: KVCodec,
        parallel: Parallel = ALONE,
    ) -> None:
        super().__init__()
        check(config, parallel.size, parallel.replicas)
        device = torch.device(device)
        self.config = config
        d = config.hidden_size
        kind = {"dtype": dtype, "device": device}
        fp32 = {"dtype": torch.float32, "device": device}
        self.enorm = nn.Parameter(torch.empty(d, **fp32))
        self.hnorm = nn.Parameter(torch.empty(d, **fp32))
        hold = resolve("hold", device)
        self.e_proj, self.h_proj = hold([d], d, **kind), hold([d], d, **kind)
        self.block = Block(config, SLIDING, MOE, kv_codec, dtype, device, parallel)
        self.hc_head = HyperHead(config, device)
        self.norm = nn.Parameter(torch.empty(d, **fp32))
        self.linear = resolve("linear", device)
        self.rms_norm = resolve("rms_norm", device)
        theta = frequencies(config, compressed=False).to(device)
        self.register_buffer("theta", theta, persistent=False)
        self.requires_grad_(False)

    def forward(
        self,
        embedded: torch.Tensor,
        streams: torch.Tensor,
        batch: Batch,
        window: Cache,
    ) -> torch.Tensor:
        """One step of drafting.

        Args:
            embedded: [T, d], of the token after each position.
            streams: [T, n, d], of the target at each position, or of this layer's last step.
            batch: the positions.
            window: the layer's cache.

        Returns:
            [T, n, d], not reduced.
        """
        eps = self.config.rms_norm_eps
        embedded = embedded.masked_fill((batch.positions <= 0).unsqueeze(1), 0.0)
        token = self.linear(self.rms_norm(embedded, self.enorm, eps), self.e_proj)
        normed = self.rms_norm(streams, self.hnorm, eps).flatten(0, 1)
        streams = self.linear(normed, self.h_proj).view_as(streams)
        plan = Plan(batch, self.theta, self.theta)
        return self.block(
            streams + token.unsqueeze(1), batch.positions, plan, LayerState(window)
        )

    def head_input(self, streams: torch.Tensor) -> torch.Tensor:
        """[T, n, d] → [T, d], what the target's output head takes."""
        return self.rms_norm(self.hc_head(streams), self.norm, self.config.rms_norm_eps)

    def weight_slots(self) -> dict[str, Slot]:
        """Every tensor that the checkpoint publishes for the draft → the memory it is copied to."""
        slots: dict[str, Slot] = {
            "enorm.weight": self.enorm.data,
            "hnorm.weight": self.hnorm.data,
            "e_proj.weight": rows(self.e_proj),
            "h_proj.weight": rows(self.h_proj),
            "norm.weight": self.norm.data,
            **self.block.weight_slots(),
        }
        head = self.hc_head.weight_slots()
        slots |= {f"hc_head_{name}": slot for name, slot in head.items()}
        return {f"mtp.0.{name}": slot for name, slot in slots.items()}
