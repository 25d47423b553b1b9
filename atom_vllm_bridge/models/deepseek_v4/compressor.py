"""The rolling compressor: every `ratio` tokens, the last K tokens' inputs become one entry.

[kv | score] = x · [wkv; wgate]ᵀ, float32, kept for each token with the score's position bias `ape` added. At every position p
with (p + 1) % ratio = 0 the last K rows are pooled, normed, rotated at the first position of p's group, and stored. Rows are
written before they are read, so a chunk, its predecessors and a draft that was rejected all look alike.
"""

import torch
from torch import nn

from atom_vllm_bridge.models.deepseek_v4.plan import Plan
from atom_vllm_bridge.models.deepseek_v4.ring import roll_up, unrolled
from atom_vllm_bridge.models.deepseek_v4.state import Cache
from atom_vllm_bridge.models.ops.registry import resolve
from atom_vllm_bridge.models.quantization.kv_codecs import RowCodec


class Compressor(nn.Module):
    """Pools tokens into the entries of one compressed cache (a layer's own, or its indexer's).

    The projections are rows of the layer's fused input projection and not kept here.

    Args:
        dim: width of an entry.
        ratio: tokens an entry.
        overlap: an entry spans its own group of tokens and the one before.
        norm_eps: of the norm of entries.
        codec: storage of entries.
    """

    def __init__(
        self,
        dim: int,
        ratio: int,
        overlap: bool,
        norm_eps: float,
        codec: RowCodec,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.dim, self.ratio, self.overlap = dim, ratio, overlap
        self.norm_eps, self.codec = norm_eps, codec
        self.parts = 2 if overlap else 1
        fp32 = {"dtype": torch.float32, "device": device}
        self.ape = nn.Parameter(torch.empty(ratio, self.parts * dim, **fp32))
        self.norm = nn.Parameter(torch.empty(dim, **fp32))
        self.compressor_pool = resolve("compressor_pool", device)
        self.write_inputs = resolve("write_inputs", device)
        self.write_keys = resolve("write_keys", device)
        self.gather_rows = resolve("gather_rows", device)
        self.write_rows = resolve("write_rows", device)

    @property
    def projected(self) -> int:
        """Columns of kv and score together."""
        return 2 * self.parts * self.dim

    def forward(
        self, inputs: torch.Tensor, plan: Plan, state: Cache, compressed: Cache
    ) -> None:
        """Store the tokens' inputs, then the entries that they complete.

        Args:
            inputs: [T, projected], kv beside score; may be changed.
            plan: the step.
            state: the rolling rows.
            compressed: the entries.
        """
        phase = plan.phase(self.ratio)
        rolling = unrolled(state, plan.batch, self.gather_rows)
        self.write_inputs(inputs, self.ape, phase, rolling.rows, rolling.slot_ids())
        roll_up(state, rolling, self.write_rows)
        cut = rolling.rows.unflatten(-1, (2 * self.parts, self.dim)).flatten(1, 2)
        pool = plan.pool(Cache(cut, rolling.table), compressed, self.overlap)
        if pool is None:
            return
        entry = self.compressor_pool(cut, pool.ids, pool.unseen)
        self.write_keys(
            entry,
            self.norm,
            self.norm_eps,
            pool.rotation,
            compressed.rows,
            pool.write,
            self.codec,
        )

    def weight_slots(self) -> dict[str, torch.Tensor]:
        return {"ape": self.ape.data, "norm.weight": self.norm.data}
