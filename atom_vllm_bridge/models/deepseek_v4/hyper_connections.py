"""Manifold-constrained hyper-connections: a block reads a mixture of n residual streams and writes back to all of them.

The mixtures depend on the token; ops/torch/hc_pre.py has the formulas.
"""

import torch
from torch import nn

from atom_vllm_bridge.models.deepseek_v4.config import DeepseekV4Config
from atom_vllm_bridge.models.ops.registry import resolve


class HyperConnection(nn.Module):
    """Around one block: `read` gives its input, `write` takes its output."""

    def __init__(self, config: DeepseekV4Config, device: torch.device) -> None:
        super().__init__()
        n, fp32 = config.hc_mult, {"dtype": torch.float32, "device": device}
        self.iterations, self.eps = config.hc_sinkhorn_iters, config.hc_eps
        self.norm_eps = config.rms_norm_eps
        self.fn = nn.Parameter(torch.empty((2 + n) * n, n * config.hidden_size, **fp32))
        self.base = nn.Parameter(torch.empty((2 + n) * n, **fp32))
        self.scale = nn.Parameter(torch.empty(3, **fp32))
        self.hc_pre = resolve("hc_pre", device)
        self.hc_post = resolve("hc_post", device)

    def read(
        self, streams: torch.Tensor, weight: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[T, n, d] → the block's input [T, d], normed with `weight` if there is one, and the weights that `write` needs."""
        return self.hc_pre(
            streams,
            self.fn,
            self.base,
            self.scale,
            self.iterations,
            self.eps,
            self.norm_eps,
            weight,
        )

    def write(
        self,
        x: torch.Tensor,
        streams: torch.Tensor,
        post: torch.Tensor,
        comb: torch.Tensor,
    ) -> torch.Tensor:
        """The block's output [T, d] and the streams before it → the streams after it."""
        return self.hc_post(x, streams, post, comb)

    def weight_slots(self) -> dict[str, torch.Tensor]:
        return {"fn": self.fn.data, "base": self.base.data, "scale": self.scale.data}


class HyperHead(nn.Module):
    """After the last block: [T, n, d] → [T, d]."""

    def __init__(self, config: DeepseekV4Config, device: torch.device) -> None:
        super().__init__()
        n, fp32 = config.hc_mult, {"dtype": torch.float32, "device": device}
        self.eps, self.norm_eps = config.hc_eps, config.rms_norm_eps
        self.fn = nn.Parameter(torch.empty(n, n * config.hidden_size, **fp32))
        self.base = nn.Parameter(torch.empty(n, **fp32))
        self.scale = nn.Parameter(torch.empty(1, **fp32))
        self.hc_head = resolve("hc_head", device)

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        return self.hc_head(
            streams, self.fn, self.base, self.scale, self.eps, self.norm_eps
        )

    def weight_slots(self) -> dict[str, torch.Tensor]:
        return {"fn": self.fn.data, "base": self.base.data, "scale": self.scale.data}
