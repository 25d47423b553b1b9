"""DSpark: a block of draft tokens from one pass over a few decoder stages, then a Markov head from left to right.

The stages know the target through its hidden states: a mean over the residual streams is tapped after some layers, and the
taps of a token are projected to one context row, from which each stage takes its keys, and nothing else. A block is the last
verified token and noise tokens after it; each of its queries sees the window of context before the block, and the whole block.

context = rms(main_proj · [tap …])          kv_s = rms(wkv_s · context), rotated at the token's position, for every stage s
U = head · rms(h),  h = the block's streams, collapsed        logits_k = U_k + W2 · W1[x_{k−1}]        c_k = σ(w · [h_k; W1[x_{k−1}]])
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from reprlib import repr as short
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from atom_vllm_bridge.models.deepseek_v4.config import (
    MOE,
    SLIDING,
    DeepseekV4Config,
    integer,
    need_integer,
)
from atom_vllm_bridge.models.deepseek_v4.hyper_connections import HyperHead
from atom_vllm_bridge.models.deepseek_v4.model import Block
from atom_vllm_bridge.models.deepseek_v4.packing import Slot, rows
from atom_vllm_bridge.models.deepseek_v4.parallel import ALONE, Parallel
from atom_vllm_bridge.models.deepseek_v4.plan import Plan, Tiles
from atom_vllm_bridge.models.deepseek_v4.rope import frequencies
from atom_vllm_bridge.models.deepseek_v4.sharding import check
from atom_vllm_bridge.models.deepseek_v4.state import Batch, Cache, LayerState
from atom_vllm_bridge.models.ops.registry import resolve
from atom_vllm_bridge.models.ops.torch.sparse_attention import Keys
from atom_vllm_bridge.models.quantization.kv_codecs import KVCodec


@dataclass(frozen=True)
class DSparkConfig:
    """What config.json says of the draft, beside the target's dimensions.

    Attributes:
        target_layer_ids: layers of the target after which the streams are tapped, ascending.
        block_size: tokens a block when the draft was trained; other numbers work, and are accepted less.
        noise_token_id: stands for the tokens of a block that are not known yet.
        markov_rank: of the Markov head.
    """

    target_layer_ids: tuple[int, ...]
    block_size: int
    noise_token_id: int
    markov_rank: int

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> "DSparkConfig":
        """Read the content of config.json.

        Raises:
            ValueError: a key is missing, is of another type, or names a layer or token that does not exist.
        """
        layers, vocabulary = (
            need_integer(hf, key) for key in ("num_hidden_layers", "vocab_size")
        )
        given: dict[str, Any] = {
            field.name: hf.get(f"dspark_{field.name}") for field in fields(cls)
        }
        for key, value in given.items():
            if value is None:
                raise ValueError(
                    f"config: dspark_{key} is missing; the checkpoint has no DSpark draft."
                )
        taps = given["target_layer_ids"]
        integers = isinstance(taps, list | tuple) and all(type(t) is int for t in taps)
        ascending = bool(integers and taps) and list(taps) == sorted(set(taps))
        if not ascending or not 0 <= taps[0] <= taps[-1] < layers:
            raise ValueError(
                f"config: dspark_target_layer_ids = {short(taps)} must ascend within the {layers} layers of the target."
            )
        noise = given["noise_token_id"]
        if type(noise) is not int or not 0 <= noise < vocabulary:
            raise ValueError(
                f"config: dspark_noise_token_id = {short(noise)} is not one of {vocabulary} tokens."
            )
        for key in ("block_size", "markov_rank"):
            integer(f"dspark_{key}", given[key])
        return cls(**(given | {"target_layer_ids": tuple(taps)}))


class BlockPlan(Plan):
    """The plan of a step whose requests hold one block each: queries see all of it, later tokens too."""

    causal = False

    def tile_size(self, query_bytes: int) -> int:
        """A block is one tile, whatever its scores take."""
        return self.batch.max_query_len

    def window_keys(self, cache: Cache, tiles: Tiles, window: int) -> Keys:
        """`window` tokens of context before the block, and the block.

        Positions before the sequence, or at and beyond its end, are hidden, and read as the nearest one that is not.
        """
        table, queries = cache.table, tiles.size

        def rows() -> tuple[torch.Tensor, torch.Tensor]:
            return self._op("block_rows")(
                cache.blocks(),
                tiles.request,
                tiles.start,
                self.batch.seq_lens,
                queries,
                window,
            )

        ids, hidden = table.derive(f"block {window} {queries} {cache.pitch}", rows)
        lists = cache.listed(tiles.request.numel() * queries, window + queries)
        return Keys(cache.rows, ids, hidden, ragged=lists)

    def _list_tiles(self) -> Tiles:
        return self.tiles(self.tile_size(0))


class DSparkDraft(nn.Module):
    """The draft model. Weights are uninitialised until something is copied into `weight_slots()`.

    Embedding and output head are the target's and come in as arguments.

    Args:
        config: the target's dimensions, which the stages share.
        dspark: the draft's own.
        stages: how many `mtp.{i}` the checkpoint holds.
        confidence: whether it has a confidence head.
        dtype: of weights and activations; hyper-connections, norms, gates and the confidence head are float32.
        kv_codec: storage of the window's rows.
        parallel: which part of a decoder layer this has; all else is whole on every rank.

    Raises:
        ValueError: the layer does not divide among so many ranks.
    """

    def __init__(
        self,
        config: DeepseekV4Config,
        dspark: DSparkConfig,
        stages: int,
        *,
        confidence: bool,
        dtype: torch.dtype,
        device: torch.device | str,
        kv_codec: KVCodec,
        parallel: Parallel = ALONE,
    ) -> None:
        super().__init__()
        check(config, parallel.size, parallel.replicas)
        device = torch.device(device)
        self.config, self.dspark = config, dspark
        d, rank = config.hidden_size, dspark.markov_rank
        kind = {"dtype": dtype, "device": device}
        fp32 = {"dtype": torch.float32, "device": device}
        self.stages = nn.ModuleList(
            Block(config, SLIDING, MOE, kv_codec, dtype, device, parallel)
            for _ in range(stages)
        )
        taps = len(dspark.target_layer_ids) * d
        self.main_proj = resolve("hold", device)([d], taps, **kind)
        self.main_norm = nn.Parameter(torch.empty(d, **fp32))
        self.hc_head = HyperHead(config, device)
        self.norm = nn.Parameter(torch.empty(d, **fp32))
        self.markov_w1 = nn.Parameter(torch.empty(config.vocab_size, rank, **kind))
        self.markov_w2 = nn.Parameter(torch.empty(rank, config.vocab_size, **kind))
        self.confidence_head = (
            nn.Parameter(torch.empty(d + rank, **fp32)) if confidence else None
        )
        self.linear = resolve("linear", device)
        self.rms_norm = resolve("rms_norm", device)
        self.rotations = resolve("rotations", device)
        theta = frequencies(config, compressed=False).to(device)
        self.register_buffer("theta", theta, persistent=False)
        self.requires_grad_(False)

    def context(self, taps: torch.Tensor) -> torch.Tensor:
        """[T, n · d], the taps of a token side by side → its context row [T, d]."""
        eps = self.config.rms_norm_eps
        return self.rms_norm(self.linear(taps, self.main_proj), self.main_norm, eps)

    def write_context(
        self, context: torch.Tensor, positions: torch.Tensor, windows: Sequence[Cache]
    ) -> None:
        """Store the keys of verified tokens in every stage's window.

        Args:
            context: [T, d].
            positions: [T] int64; of rows that are not written, anything.
            windows: a stage's cache each; their slots say where, −1 for nowhere.
        """
        rotation = self.rotations(positions.clamp(min=0), self.theta)
        for stage, window in zip(self.stages, windows, strict=True):
            stage.attn.write_kv(stage.attn.project_kv(context), rotation, window)

    def forward(
        self, embedded: torch.Tensor, batch: Batch, windows: Sequence[Cache]
    ) -> torch.Tensor:
        """Run the stages over one block a request; its rows go into the windows behind the context.

        Args:
            embedded: [T, d], of the last verified token and then noise, for each request.
            batch: the blocks; a request's length includes its block.
            windows: a stage's cache each.

        Returns:
            [T, d], collapsed, before the norm; row k predicts the token after position k.
        """
        plan = BlockPlan(batch, self.theta, self.theta)
        streams = embedded.unsqueeze(1).repeat(1, self.config.hc_mult, 1)
        for stage, window in zip(self.stages, windows, strict=True):
            streams = stage(streams, batch.positions, plan, LayerState(window=window))
        return self.hc_head(streams)

    def head_input(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, d] → [T, d], what the target's output head takes to give U."""
        return self.rms_norm(hidden, self.norm, self.config.rms_norm_eps)

    def markov_embed(self, token: torch.Tensor) -> torch.Tensor:
        """[B] ids of the tokens before → [B, r]; a negative id counts as 0."""
        return F.embedding(token.clamp(min=0), self.markov_w1)

    def markov_bias(self, embedded: torch.Tensor) -> torch.Tensor:
        """[B, r] → [B, V] float32, to be added to U."""
        return (embedded @ self.markov_w2).float()

    def confidence(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Probability that a draft is accepted.

        Args:
            hidden: [B, d], from `forward`.
            embedded: [B, r], `markov_embed` of the token before.

        Returns:
            [B] float32.

        Raises:
            ValueError: the checkpoint has no confidence head.
        """
        if self.confidence_head is None:
            raise ValueError("dspark: the checkpoint has no confidence head.")
        both = torch.cat((hidden, embedded), -1).float()
        return torch.sigmoid(both @ self.confidence_head)

    def weight_slots(self) -> dict[str, Slot]:
        """Every tensor that the checkpoint publishes for the draft → the memory it is copied to."""
        slots: dict[str, Slot] = {
            "mtp.0.main_proj.weight": rows(self.main_proj),
            "mtp.0.main_norm.weight": self.main_norm.data,
        }
        for i, stage in enumerate(self.stages):
            slots |= {f"mtp.{i}.{k}": slot for k, slot in stage.weight_slots().items()}
        last = f"mtp.{len(self.stages) - 1}."
        head = self.hc_head.weight_slots()
        slots |= {f"{last}hc_head_{name}": slot for name, slot in head.items()}
        slots |= {
            f"{last}norm.weight": self.norm.data,
            f"{last}markov_head.markov_w1.weight": self.markov_w1.data,
            f"{last}markov_head.markov_w2.weight": self.markov_w2.data.mT,
        }
        if self.confidence_head is not None:
            weight = self.confidence_head.data.unsqueeze(0)
            slots[f"{last}confidence_head.proj.weight"] = weight
        return slots
