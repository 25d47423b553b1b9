"""Score compressed entries for a query.

score[q, j] = Σ_h weight[q, h] · relu(query[q, h] · key[j])       (lightning indexer; DeepSeek-V4 report, section 2.3)
"""

import torch

from atom_vllm_bridge.models.ops.torch.gather_rows import gather_rows
from atom_vllm_bridge.models.quantization.kv_codecs import RowCodec

# Entries are scored in batches, so that the products of all heads need no more than this at once.
TEMPORARY_BYTES = 4 << 20


def indexer_logits(
    query: torch.Tensor,
    weight: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
    codec: RowCodec,
    available: torch.Tensor,
) -> torch.Tensor:
    """Score the entries of each tile for its queries.

    Args:
        query: [N, Q, H, D] float32, tiles of queries.
        weight: [N, Q, H] float32, with the scales D^-½ · H^-½ in it.
        rows: [B, R, C], the indexer's cache.
        ids: [N, E] int64, rows of the entries of each tile.
        codec: of the rows.
        available: [N, Q] int64, how many entries a query may see; the others need not be scored.

    Returns:
        [N, Q, E] float32; beyond the available ones, anything.
    """
    tiles, queries, heads, dim = query.shape
    query = query.reshape(tiles, queries * heads, dim)
    weight = weight.reshape(tiles * queries, 1, heads)
    step = max(1, TEMPORARY_BYTES // (4 * tiles * (queries * heads + dim)))
    scores = []
    for part in ids.split(step, dim=1):
        keys = codec.decode(gather_rows(rows, part))
        product = torch.bmm(query, keys.transpose(1, 2)).relu_()
        product = product.view(tiles * queries, heads, -1)
        scores.append(torch.bmm(weight, product).view(tiles, queries, -1))
    return scores[0] if len(scores) == 1 else torch.cat(scores, -1)
