"""Attention over a sliding window and compressed entries, keys that are also values, with a sink.

o[q, h] = Σ_j w_j · key_j,   w = softmax over the visible keys and one extra logit, sink[h], of   scale · query[q, h] · key_j
"""

from dataclasses import dataclass

import torch

from atom_vllm_bridge.models.ops.ragged import Ragged
from atom_vllm_bridge.models.ops.torch.gather_rows import gather_rows
from atom_vllm_bridge.models.quantization.kv_codecs import RowCodec

# Tiles are computed in batches, so that keys and scores need no more than this at once.
TEMPORARY_BYTES = 4 << 20


@dataclass(frozen=True)
class Keys:
    """Keys of tiles of queries, in a cache.

    Attributes:
        rows: [B, R, C] in the codec's storage.
        ids: [N, E] int64, rows of each tile's keys; where hidden from every query of a tile that sees another key, the id
            of a row with finite values.
        hidden: [N, Q, E] bool, keys that a query does not see.
        none: [N, 1, 1] bool, tiles without a visible key, whose rows may hold anything; None: there is no such tile.
        ragged: the same keys as a list for each query [N · Q], where the step's builder made it.
    """

    rows: torch.Tensor
    ids: torch.Tensor
    hidden: torch.Tensor
    none: torch.Tensor | None = None
    ragged: Ragged | None = None


def sparse_attention(
    query: torch.Tensor,
    sink: torch.Tensor,
    scale: float,
    window: Keys,
    compressed: Keys | None,
    codec: RowCodec,
) -> torch.Tensor:
    """Attend.

    Args:
        query: [N, Q, H, D] float32, tiles of queries.
        sink: [H] float32.
        scale: of the scores.
        window: the raw keys around each tile.
        compressed: the compressed keys, if the layer has any.
        codec: of the rows.

    Returns:
        [N, Q, H, D] float32.
    """
    tiles, queries, heads, dim = query.shape
    sources = (window,) if compressed is None else (window, compressed)
    query = query.reshape(tiles, queries * heads, dim)
    sink = sink.view(1, 1, heads, 1).expand(tiles, queries, heads, 1)
    width = sum(source.ids.shape[1] for source in sources)
    step = max(1, TEMPORARY_BYTES // (4 * width * (dim + queries * heads)))
    out = torch.empty_like(query)
    for first in range(0, tiles, step):
        at = slice(first, first + step)
        keys, scores = [], []
        for source in sources:
            key = codec.decode(gather_rows(source.rows, source.ids[at]))
            score = torch.bmm(query[at], key.transpose(1, 2)).mul_(scale)
            score = score.view(-1, queries, heads, key.shape[1])
            keys.append(key)
            scores.append(
                score.masked_fill_(source.hidden[at].unsqueeze(2), -torch.inf)
            )
        weights = torch.cat((*scores, sink[at]), -1).softmax(-1)
        weights = weights.view(-1, queries * heads, width + 1)
        start = keys[0].shape[1]
        output = torch.bmm(weights[..., :start], keys[0])
        for source, key in zip(sources[1:], keys[1:], strict=True):
            part = torch.bmm(weights[..., start : start + key.shape[1]], key)
            if source.none is not None:
                # Weight zero times a row that nobody wrote is not zero if the row holds NaN.
                part.masked_fill_(source.none[at], 0.0)
            output += part
            start += key.shape[1]
        out[at] = output
    return out.view(tiles, queries, heads, dim)
