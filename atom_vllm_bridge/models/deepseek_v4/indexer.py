"""The lightning indexer of a CSA layer: which compressed entries a query attends to.

score[p, j] = Σ_h w[p, h] · relu(q[p, h] · k[j]);  w = (x · weights_projᵀ) · D^-½ · H^-½;  q from attention's low-rank query,
rotated at p; k from a compressor of its own. The `index_topk` best of the entries that p may see are selected.
"""

import torch
from torch import nn

from atom_vllm_bridge.models.deepseek_v4.compressor import Compressor
from atom_vllm_bridge.models.deepseek_v4.config import DeepseekV4Config
from atom_vllm_bridge.models.deepseek_v4.plan import EVERY, TILE_BYTES, Plan
from atom_vllm_bridge.models.deepseek_v4.state import Cache
from atom_vllm_bridge.models.ops.registry import resolve
from atom_vllm_bridge.models.quantization.kv_codecs import RowCodec

# A tile's scores, and the packed copy of them that is sorted.
SCORE_BYTES = 32
# What scores may take at once: on a CPU little, for its cache; on a GPU each launch costs.
MOST_BYTES = {"cpu": TILE_BYTES, "cuda": 1 << 30}


class Indexer(nn.Module):
    """Selects compressed entries. Its projections are rows of the layer's fused ones."""

    def __init__(
        self,
        config: DeepseekV4Config,
        ratio: int,
        codec: RowCodec,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.num_heads, self.dim = config.index_n_heads, config.index_head_dim
        self.ratio, self.topk, self.codec = ratio, config.index_topk, codec
        self.scale = self.dim**-0.5 * self.num_heads**-0.5
        self.compressor = Compressor(
            self.dim, ratio, True, config.rms_norm_eps, codec, device
        )
        self.indexer_logits = resolve("indexer_logits", device)
        self.indexer_topk = resolve("indexer_topk", device)
        self.rope = resolve("rope", device)

    def forward(
        self, query: torch.Tensor, weight: torch.Tensor, plan: Plan, index: Cache
    ) -> torch.Tensor:
        """Select entries for each token.

        Args:
            query: [T, H · D], not rotated.
            weight: [T, H], not scaled.
            plan: the step.
            index: the indexer's entries, those of this step included.

        Returns:
            [T, min(index_topk, E)] int64, best first, −1 after the last.
        """
        ratio = self.ratio
        query_bytes = plan.entries(ratio) * SCORE_BYTES
        tiles = plan.tiles(plan.tile_size(query_bytes))
        query = query.float().unflatten(-1, (self.num_heads, self.dim))
        query = tiles.split(self.rope(query, plan.compress_rotation))
        weight = tiles.split(weight.float() * self.scale)
        available = plan.available(tiles, ratio)
        most = MOST_BYTES.get(query.device.type, TILE_BYTES)
        step = max(1, most // (query_bytes * tiles.size))
        selected = []
        tile_count = query.shape[0]
        for first in range(0, tile_count, step):
            at = slice(first, first + step) if step < tile_count else EVERY
            ids = plan.entry_ids(index, tiles, at)
            scores = self.indexer_logits(
                query[at], weight[at], index.rows, ids, self.codec, available[at]
            )
            selected.append(self.indexer_topk(scores, available[at], self.topk))
        return tiles.join(torch.cat(selected) if len(selected) > 1 else selected[0])
