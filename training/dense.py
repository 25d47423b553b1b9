"""DeepSeek-V4 over whole rows of tokens, differentiable: the training twin of models/deepseek_v4, which writes caches in place.

The formulas are those of atom_vllm_bridge/models (each op's file names its source); tests hold the two to the same logits.
Instead of caches there are masks: a query sees the 128 raw keys up to its own, and every compressed entry that is complete at
its position. A CSA layer's indexer has a loss of its own, Σ t · log(t / softmax(score)), where t is what the layer's heads
attend to, on average, among the entries (DeepSeek-V3.2 report, section 2.1); no gradient passes from it to the rest.
"""

import torch
import torch.nn.functional as F

from atom_vllm_bridge.models.deepseek_v4.config import (
    CSA,
    HCA,
    SLIDING,
    DeepseekV4Config,
)
from training.layer import (
    Fused,
    Layer,
    Tensors,
    Trace,
    collapse,
    hyper_connected,
    project,
    queries,
    raw_keys,
    rms,
    rotate,
    turns,
)

RATIO = {CSA: 4, HCA: 128}


class Dense(Fused):
    """Forward of the layers over rows of `length` tokens.

    Args:
        config: dimensions.
        length: of every row, a multiple of 128.
        device: where.
    """

    def __init__(self, config: DeepseekV4Config, length: int, device: str) -> None:
        super().__init__(config)
        at = torch.arange(length, device=device)
        self.turns = {
            kind: turns(config, at, compressed=kind != SLIDING)
            for kind in (SLIDING, CSA, HCA)
        }
        self.entry_turns = {
            kind: turns(config, at[::ratio], compressed=True)
            for kind, ratio in RATIO.items()
        }
        self.unseen = {
            kind: (at[:: RATIO[kind]] + RATIO[kind] - 1) > at.unsqueeze(1)
            for kind in RATIO
        }
        # Keys of a block of queries: its own and the block before, 256 in all.
        w = config.sliding_window
        query, key = torch.arange(w, device=device), torch.arange(2 * w, device=device)
        far = (key > query.unsqueeze(1) + w) | (key <= query.unsqueeze(1))
        first = far | (key < w)
        blocks = -(-length // w)
        self.outside = torch.stack([first] + [far] * (blocks - 1))

    def target(
        self, tensors: Tensors, ids: torch.Tensor, trace: Trace, taps: tuple[int, ...]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """ids [B, T] → streams [B, T, n, d], and the mean of the streams after each layer of `taps`."""
        config = self.config
        streams = F.embedding(ids, tensors["embed.weight"]).unsqueeze(2)
        streams = streams.expand(-1, -1, config.hc_mult, -1)
        tapped = []
        kinds = zip(config.layer_types, config.mlp_layer_types, strict=True)
        for i, (layer_type, mlp_type) in enumerate(kinds):
            layer = Layer(tensors, f"layers.{i}.")
            streams = self.block(layer, streams, ids, layer_type, mlp_type, trace)
            if i in taps:
                tapped.append(streams.mean(2))
        return streams, tapped

    def hidden(self, tensors: Tensors, streams: torch.Tensor) -> torch.Tensor:
        """Streams → what the output head takes [B, T, d]."""
        y = collapse(Layer(tensors, ""), streams, self.config)
        return rms(y, tensors["norm.weight"], self.config.rms_norm_eps)

    def block(
        self,
        layer: Layer,
        streams: torch.Tensor,
        ids: torch.Tensor,
        layer_type: str,
        mlp_type: str,
        trace: Trace,
    ) -> torch.Tensor:
        """[B, T, n, d] → [B, T, n, d]."""
        return hyper_connected(
            self,
            layer,
            streams,
            ids,
            mlp_type,
            trace,
            lambda x: self.attention(layer.below("attn."), x, layer_type, trace),
        )

    def attention(
        self, layer: Layer, x: torch.Tensor, layer_type: str, trace: Trace
    ) -> torch.Tensor:
        """[B, T, d] → [B, T, d]."""
        config = self.config
        cos, sin = self.turns[layer_type]
        low, query = queries(self, layer, x, cos.unsqueeze(1), sin.unsqueeze(1))
        key = rotate(raw_keys(layer, x, config), cos, sin).to(query.dtype)
        window = config.sliding_window
        blocks = x.shape[1] // window
        # [B, b, H · w, D] against the [B, b, 2 w, D] keys around each block
        query = query.unflatten(1, (blocks, window)).transpose(2, 3)
        blocked = key.unflatten(1, (blocks, window))
        before = F.pad(blocked, (0, 0, 0, 0, 1, 0))[:, :-1]
        near = torch.cat((before, blocked), 2)
        scale, sink = config.head_dim**-0.5, layer["attn_sink"]
        scores = torch.matmul(query.flatten(2, 3), near.transpose(2, 3))
        scores = scores.unflatten(2, (-1, window))
        entries = far = unseen = index = None
        if layer_type != SLIDING:
            inner = layer.below("compressor.")
            entries = self.entries(inner, x, layer_type, config.head_dim)
            far = torch.matmul(query.flatten(1, 3), entries.transpose(1, 2))
            far = far.view(*scores.shape[:-1], -1)
            hidden = self.unseen[layer_type].unsqueeze(0)
            if layer_type == CSA:
                index = self.index_scores(layer, x.detach(), low.detach())
                index = index.masked_fill(hidden, -torch.inf)
                if trace.select and entries.shape[1] > config.index_topk:
                    chosen = index.detach().topk(config.index_topk, -1).indices
                    left = torch.ones_like(index, dtype=torch.bool)
                    hidden = hidden | left.scatter_(-1, chosen, False)
            unseen = hidden.unflatten(1, (blocks, window))
        weights, distant = self.weigh(scores, self.outside, far, unseen, sink, scale)
        o = torch.matmul(weights.flatten(2, 3), near).view(*weights.shape[:-1], -1)
        if entries is not None:
            mixed = torch.matmul(distant.flatten(1, 3), entries.to(distant.dtype))
            o = o + mixed.view(o.shape)
        if index is not None:
            attended = distant.detach().float().mean(2).flatten(1, 2)
            trace.index_losses.append(_index_loss(index, attended))
        o = o.transpose(2, 3).flatten(1, 2)
        return project(layer, o, config, cos, sin)

    def entries(
        self, layer: Layer, x: torch.Tensor, layer_type: str, dim: int
    ) -> torch.Tensor:
        """Compressed entries [B, T / ratio, D] of x [B, T, d] (models/deepseek_v4/compressor.py)."""
        ratio, eps = RATIO[layer_type], self.config.rms_norm_eps
        kv = layer.linear(x, "wkv").float().unflatten(1, (-1, ratio))
        score = layer.linear(x, "wgate").float().unflatten(1, (-1, ratio))
        score = score + layer["ape"]
        if layer_type == CSA:
            kv = torch.cat((_previous(kv[..., :dim], 0.0), kv[..., dim:]), 2)
            earlier = _previous(score[..., :dim], -torch.inf)
            score = torch.cat((earlier, score[..., dim:]), 2)
        pooled = (score.softmax(2) * kv).sum(2)
        cos, sin = self.entry_turns[layer_type]
        return rotate(rms(pooled, layer["norm.weight"], eps), cos, sin)

    def index_scores(
        self, layer: Layer, x: torch.Tensor, low: torch.Tensor
    ) -> torch.Tensor:
        """Scores [B, T, E] of entries (models/deepseek_v4/indexer.py)."""
        config, layer = self.config, layer.below("indexer.")
        heads, dim = config.index_n_heads, config.index_head_dim
        cos, sin = self.turns[CSA]
        query = layer.linear(low, "wq_b").float().unflatten(-1, (heads, dim))
        query = rotate(query, cos.unsqueeze(1), sin.unsqueeze(1))
        key = self.entries(layer.below("compressor."), x, CSA, dim)
        weight = layer.linear(x, "weights_proj").float() * (dim * heads) ** -0.5
        product = torch.matmul(query.flatten(1, 2), key.transpose(1, 2))
        product = product.float().relu().view(*weight.shape, -1)
        return (weight.unsqueeze(-1) * product).sum(2)


def _previous(grouped: torch.Tensor, fill: float) -> torch.Tensor:
    """[B, E, r, D] → the group before each."""
    return F.pad(grouped, (0, 0, 0, 0, 1, 0), value=fill)[:, :-1]


def _index_loss(scores: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    """Divergence of the indexer's softmax from what heads attend to, [B, T, E] each, over queries that see an entry."""
    seen = scores > -torch.inf
    total = attended.sum(-1, keepdim=True)
    wanted = attended / (total + 1e-9)
    logs = scores.masked_fill(~seen, -1e9).log_softmax(-1)
    each = (wanted * ((wanted + 1e-9).log() - logs)).sum(-1)
    # A query that hardly looks at entries has nothing to teach.
    weight = total.squeeze(-1)
    return (each * weight).sum() / (weight.sum() + 1e-9)
