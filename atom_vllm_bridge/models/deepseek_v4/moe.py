"""Mixture of experts: k routed experts and a shared one, all with a clamped SwiGLU.

The first layers take a token's experts from a table of token ids (`hash_moe`), the others from a biased top-k (`moe`); both weigh
them by the gate's scores.
"""

import torch
from torch import nn

from atom_vllm_bridge.models.deepseek_v4.config import HASH_MOE, DeepseekV4Config
from atom_vllm_bridge.models.deepseek_v4.packing import Packable, Slot, rows
from atom_vllm_bridge.models.deepseek_v4.parallel import ALONE, Parallel
from atom_vllm_bridge.models.deepseek_v4.sharding import (
    ELSEWHERE,
    cut,
    experts_of,
    shared_of,
)
from atom_vllm_bridge.models.ops.registry import resolve


class MixtureOfExperts(Packable):
    """One layer's feed-forward.

    Args:
        config: the model's.
        mlp_type: `hash_moe` or `moe`.
        dtype: of the experts.
        parallel: its rank has a part of the routed experts, each of them whole, and if it divides of the shared one.
    """

    by_input = ("w13", "w2", "shared_w13", "shared_w2")

    def __init__(
        self,
        config: DeepseekV4Config,
        mlp_type: str,
        dtype: torch.dtype,
        device: torch.device,
        parallel: Parallel = ALONE,
    ) -> None:
        super().__init__()
        self.parallel = parallel
        self.k, self.route_scale = (
            config.num_experts_per_tok,
            config.routed_scaling_factor,
        )
        self.num_experts, self.limit = config.n_routed_experts, config.swiglu_limit
        d, inner = config.hidden_size, config.moe_intermediate_size
        self.shared_width = config.shared_intermediate_size
        self.held = experts_of(config, parallel)
        self.shared_held = shared_of(config, parallel)
        shared = len(self.shared_held)
        kind = {"dtype": dtype, "device": device}
        fp32 = {"dtype": torch.float32, "device": device}
        self.gate = nn.Parameter(torch.empty(self.num_experts, d, **fp32))
        table = bias = None
        if mlp_type == HASH_MOE:
            table = torch.zeros(
                config.vocab_size, self.k, dtype=torch.int64, device=device
            )
        else:
            bias = nn.Parameter(torch.empty(self.num_experts, **fp32))
        self.tid2eid: torch.Tensor | None
        self.register_buffer("tid2eid", table)
        self.register_parameter("bias", bias)
        # Input by input, transposed against the checkpoint; ops/torch/experts.py says why.
        hold = resolve("hold", device)
        self.w13 = hold([2 * inner], d, count=len(self.held), **kind)
        self.w2 = hold([d], inner, count=len(self.held), **kind)
        self.shared_w13 = hold([2 * shared], d, **kind)
        self.shared_w2 = hold([d], shared, **kind)
        self.router = resolve("router", device)
        self.experts = resolve("experts", device)
        self.feed_forward = resolve("feed_forward", device)

    def forward(self, x: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        """[T, d], and [T] token ids, none negative → [T, d], on every rank."""
        table = self.tid2eid
        chosen = None if table is None else table.index_select(0, input_ids)
        chosen, weights = self.router(
            x, self.gate, self.route_scale, self.k, self.bias, chosen
        )
        if self.parallel.alone:
            y = self.experts(x, chosen, weights, self.w13, self.w2, self.limit)
            return y.add_(self._shared(x)).to(x.dtype)
        y = self._routed(x, chosen, weights)
        if len(self.shared_held) < self.shared_width:
            return self.parallel.all_reduce(y.add_(self._shared(x)).to(x.dtype))
        return self.parallel.all_reduce(y.to(x.dtype)) + self._shared(x)

    def _shared(self, x: torch.Tensor) -> torch.Tensor:
        return self.feed_forward(x, self.shared_w13, self.shared_w2, self.limit)

    def _routed(
        self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """[T, d], what the experts of this rank, and those of its like in other replicas, give these tokens."""
        parallel, dtype = self.parallel, x.dtype
        if parallel.replicas > 1:
            x, chosen, weights = parallel.gather((x, chosen, weights))
        first, many = self.held.start, len(self.held)
        held = (chosen >= first) & (chosen < first + many)
        chosen = torch.where(held, chosen - first, many)
        y = self.experts(x, chosen, weights, self.w13, self.w2, self.limit)
        return parallel.scatter(y.to(dtype)) if parallel.replicas > 1 else y

    def weight_slots(self) -> dict[str, Slot]:
        """Where each published tensor goes: views into the stacked experts."""
        self.unpack()
        slots: dict[str, Slot] = {"gate.weight": self.gate.data}
        if self.tid2eid is not None:
            slots["gate.tid2eid"] = self.tid2eid
        if self.bias is not None:
            slots["gate.bias"] = self.bias.data
        inner, shared = self.w2.shape[-2], len(self.shared_held)
        d, wide = self.gate.shape[1], self.shared_width
        for e in range(self.num_experts):
            names = [f"experts.{e}.w{i}.weight" for i in (1, 2, 3)]
            if e not in self.held:
                slots |= dict.fromkeys(names, ELSEWHERE)
                continue
            n = e - self.held.start
            slots[names[0]] = rows(self.w13, 0, inner, n)
            slots[names[1]] = rows(self.w2, number=n)
            slots[names[2]] = rows(self.w13, inner, 2 * inner, n)
        gate, down = rows(self.shared_w13, 0, shared), rows(self.shared_w2)
        up, part = rows(self.shared_w13, shared), self.shared_held
        slots["shared_experts.w1.weight"] = cut(gate, (wide, d), part)
        slots["shared_experts.w2.weight"] = cut(down, (d, wide), range(d), part)
        slots["shared_experts.w3.weight"] = cut(up, (wide, d), part)
        return slots
